"""Keys and values: which prefixes are shared (segments, tree), and their memory (arena, buffer)."""
