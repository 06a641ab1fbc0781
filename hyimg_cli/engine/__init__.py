"""Runs and sessions, built from the packages in the lower layers."""
