"""Fast paths, each beside a plain twin with the same call."""
