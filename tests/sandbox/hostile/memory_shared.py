"""Has memory that its processes share, which counts once."""

import os
import time

shared = bytearray(b"x") * (60 << 20)
if os.fork() == 0 or os.fork() == 0 or os.fork() == 0:
    time.sleep(0.5)
    os._exit(shared[-1] != ord("x"))
for _ in range(3):
    os.wait()
print("shared")
