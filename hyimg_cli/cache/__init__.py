"""Caches: entries on disk and bounded memos in memory."""
