"""Forks children that end at once, and waits for none."""

while True:
    try:
        if os.fork() == 0:
            os._exit(0)
    except OSError:
        pass
