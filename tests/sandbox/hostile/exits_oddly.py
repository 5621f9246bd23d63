"""Ends with a code of its own, in the midst of things, and leaves work to do at its exit."""

import atexit
import os
import time

atexit.register(time.sleep, 600)
os._exit(77)
