"""Asks for more memory than there is, in one piece."""

attempt("a terabyte", lambda: len(bytearray(1 << 40)))
