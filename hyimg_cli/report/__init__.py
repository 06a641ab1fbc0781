"""Report pages to view and share: of a run, and of a comparison."""
