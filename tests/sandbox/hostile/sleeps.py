"""Never ends."""

import time

print("asleep", flush=True)
while True:
    time.sleep(600)
