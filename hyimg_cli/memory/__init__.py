"""Memory of a run: what is needed, what there is, whether it fits, what would make it fit."""
