"""Takes memory in many processes, a little in each."""

for _ in range(8):
    if os.fork() == 0:
        hoard = bytearray(os.urandom(1 << 10)) * (20 << 10)
        time.sleep(60)
time.sleep(60)
