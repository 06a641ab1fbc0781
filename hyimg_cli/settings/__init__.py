"""Settings outside the manifest: declared once, read everywhere."""
