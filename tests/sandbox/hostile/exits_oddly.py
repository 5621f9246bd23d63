"""Ends by os._exit, past an exit handler that would wait."""

atexit.register(time.sleep, 600)
os._exit(77)
