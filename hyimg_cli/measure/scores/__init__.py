"""Compare scored runs: means, their intervals, and what is missing."""
