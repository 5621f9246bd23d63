"""Reads nothing of what it is given."""

print("done")
