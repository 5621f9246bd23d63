"""Reads an address that is not mapped."""

import ctypes

ctypes.string_at(0)
