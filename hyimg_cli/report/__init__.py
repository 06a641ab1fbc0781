"""Pages to look at and to pass on: one HTML file each, complete in itself."""
