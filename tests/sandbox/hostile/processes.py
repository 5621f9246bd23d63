"""Looks for other processes."""

print("saw", sorted(int(name) for name in os.listdir("/proc") if name.isdigit()), os.getppid())
