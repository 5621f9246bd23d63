"""Sends every signal to its parent, which is pid 1, and to numbers that the host uses."""

import os

for signal in range(1, 65):
    try:
        os.kill(1, signal)
    except OSError:
        pass
for pid in given["pids"]:
    attempt(f"pid {pid}", os.kill, pid, 9)
print("still here", os.getppid())
