"""Run the job of a finished file again from its record, and compare the results."""
