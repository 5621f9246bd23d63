"""Kills every process that it may."""

import os

if os.fork() == 0:
    os.setsid()
    os.kill(-1, 9)
os.wait()
