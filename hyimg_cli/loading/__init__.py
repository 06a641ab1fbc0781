"""Checkpoints on disk: what is in them, and whether it is what a model expects."""
