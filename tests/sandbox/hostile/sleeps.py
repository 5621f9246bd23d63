"""Never ends."""

print("asleep", flush=True)
while True:
    time.sleep(600)
