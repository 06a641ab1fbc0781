"""What the rooms say to each other: frozen dataclasses, names, units. Standard library only."""
