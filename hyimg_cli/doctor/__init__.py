"""Whether this machine is ready for a run: checks, each of which says what it found."""
