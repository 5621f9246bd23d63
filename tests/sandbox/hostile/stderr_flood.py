"""Writes for ever, to stderr, from several processes."""

import os

os.fork()
os.fork()
while True:
    os.write(2, b"x" * (1 << 16))
