"""Variants of the engine on the same jobs: seconds by phase, distances, and a verdict."""
