"""Sends every signal to its parent, pid 1, and kills process ids of the host."""

for signal in range(1, 65):
    try:
        os.kill(1, signal)
    except OSError:
        pass
for pid in given["pids"]:
    attempt(f"pid {pid}", os.kill, pid, 9)
print("still here", os.getppid())
