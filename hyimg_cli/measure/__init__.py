"""Runs and files compared: bench, eval and replay."""
