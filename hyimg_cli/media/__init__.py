"""Pictures and videos on disk: read and fit source images, write results and their metadata."""
