"""Leaves behind a daemon in its own session with no open files."""

if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for file in (0, 1, 2):
            os.close(file)
        time.sleep(600)
    os._exit(0)
os.wait()
print("gone")
