"""Checkpoints on disk: read them, and check that they are what a model expects."""
