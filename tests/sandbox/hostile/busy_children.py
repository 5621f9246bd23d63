"""Computes for ever, in processes that each end soon."""

while True:
    if os.fork() == 0:
        began = time.process_time()
        while time.process_time() - began < 0.05:
            pass
        os._exit(0)
    os.wait()
