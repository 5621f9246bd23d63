"""Does not read its input."""

print("done")
