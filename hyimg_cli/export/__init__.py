"""Datasets made of runs: rows, splits, a licence gate, files that resume, a hash to verify."""
