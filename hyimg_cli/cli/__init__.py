"""The command line: what to do is read from flags and environment, what happens is shown."""
