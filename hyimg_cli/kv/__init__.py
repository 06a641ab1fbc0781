"""Keys and values: which prefixes are kept and shared (segments, tree), where they lie (buffer)."""
