"""Types into the terminal that arl was started from."""

for file in (0, 1, 2):
    attempt(f"TIOCSTI {file}", fcntl.ioctl, file, 0x5412, b"x")
for path in ("/dev/tty", "/dev/console", "/dev/ptmx", "/dev/pts/0"):
    attempt(path, lambda: os.open(path, os.O_RDWR))
