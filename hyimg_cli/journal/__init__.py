"""A run's folder: its lock, its lines, and what can be resumed."""
