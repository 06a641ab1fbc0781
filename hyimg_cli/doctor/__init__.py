"""Checks of a machine before a run, each of which says what it found."""
