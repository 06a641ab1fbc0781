"""What `hyimg eval` does: pairs are found, measured, and held against gates. No model runs."""
