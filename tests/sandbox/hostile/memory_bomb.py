"""Takes memory piece by piece, and catches MemoryError."""

hoard = []
while True:
    try:
        hoard.append(b"x" * (1 << 20))
    except MemoryError:
        pass
