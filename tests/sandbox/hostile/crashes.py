"""Reads an address that is not mapped."""

ctypes.string_at(0)
