"""Makes an empty file that is larger than any disk."""

file = os.open("sparse", os.O_CREAT | os.O_WRONLY)
attempt("a terabyte", os.ftruncate, file, 1 << 40)
attempt("its last byte", os.pwrite, file, b"x", 1 << 40)
