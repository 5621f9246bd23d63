"""Writes to memory through /proc: that of pid 1, and its own read-only code."""

attempt("pid 1", open, "/proc/1/mem", "r+b", 0)
code = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value
with open("/proc/self/mem", "r+b", 0) as memory:
    memory.seek(code)
    memory.write(b"\xcc" * 8)  # its own copy alone: what others run stays as it is
ctypes.CDLL(None).getpid()
