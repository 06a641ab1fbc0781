"""A run's folder: its lock, its result lines, and resuming a run."""
