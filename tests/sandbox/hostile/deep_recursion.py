"""Recurses in C until the stack overflows."""

sys.setrecursionlimit(1 << 30)
compare = ctypes.CFUNCTYPE(ctypes.c_int)
call = compare(lambda: call())
call()
