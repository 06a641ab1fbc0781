"""Content that is kept: bounded memos in memory."""
