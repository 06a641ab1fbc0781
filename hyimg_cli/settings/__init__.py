"""What may be set outside the manifest: declared once, read everywhere."""
