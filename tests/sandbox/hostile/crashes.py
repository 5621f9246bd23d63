"""Reads memory that is not there."""

import ctypes

ctypes.string_at(0)
