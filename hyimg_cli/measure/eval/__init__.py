"""`hyimg eval`: distances held against gates and written as records. No model runs."""
