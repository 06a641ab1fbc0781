"""Memory of a run: what it needs, what is available, and what would make it fit."""
