"""Attacks on the real code: `python -m tests.faults` runs every campaign and prints a table."""
