"""Writes bytes that are not text."""

os.write(1, b"a\0b\xff\xfe\x80c\n")
os.write(2, b"\x1b[2J\xc3")
