"""Runs and sessions, built from the packages of the lower layers."""
