"""Fast paths, each next to a plain twin with the same call."""
