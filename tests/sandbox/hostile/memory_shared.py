"""Takes memory that is shared between processes, so that none of them owns it."""

import mmap
import os
import time

shared = [mmap.mmap(-1, 32 << 20) for _ in range(8)]
os.fork()
for piece in shared:
    piece.write(b"x" * (32 << 20))
time.sleep(60)
