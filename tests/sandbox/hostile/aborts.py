"""Aborts."""

os.abort()
