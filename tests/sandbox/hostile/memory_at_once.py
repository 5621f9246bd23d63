"""Asks for more memory than there is, at once."""

attempt("a terabyte", lambda: len(bytearray(1 << 40)))
