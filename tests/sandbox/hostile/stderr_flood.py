"""Writes to stderr for ever, from several processes."""

os.fork()
os.fork()
while True:
    os.write(2, b"x" * (1 << 16))
