"""Writes for ever."""

while True:
    os.write(1, b"x" * (1 << 16))
