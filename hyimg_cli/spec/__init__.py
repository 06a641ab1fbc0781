"""Facts that rooms hand to each other: frozen dataclasses, names, units. Standard library only."""
