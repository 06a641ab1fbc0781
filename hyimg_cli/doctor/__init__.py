"""Checks of a machine before a run; each reports its findings."""
