"""Ends while its children hold its output open."""

for _ in range(3):
    if os.fork() == 0:
        time.sleep(600)
print("gone")
