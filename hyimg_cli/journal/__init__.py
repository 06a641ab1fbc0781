"""A run's folder: its lock, its lines, what may be resumed."""
