"""Candidates scored by anybody's scorers in processes of their own, and the best of them picked."""
