"""Keys and values: which prefixes are kept and shared (segments, tree), and where they are stored
(buffer).
"""
