"""Distances of two pictures: arrays in, numbers out. Models and files are no matter here."""
