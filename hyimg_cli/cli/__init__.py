"""The command line: read flags and environment, show what happens."""
