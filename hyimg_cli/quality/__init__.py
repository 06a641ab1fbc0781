"""Distances between two pictures: arrays in, numbers out, independent of models and files."""
