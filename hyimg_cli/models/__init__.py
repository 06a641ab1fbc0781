"""One family per folder, closed to each other; `registry` finds them without importing torch."""
