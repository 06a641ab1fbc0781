"""Pictures on disk: read and fit source images, write results and what they carry."""
