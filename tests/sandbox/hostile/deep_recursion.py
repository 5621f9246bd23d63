"""Recurses in C until the stack overflows."""

import ctypes
import sys

sys.setrecursionlimit(1 << 30)
compare = ctypes.CFUNCTYPE(ctypes.c_int)
call = compare(lambda: call())
call()
