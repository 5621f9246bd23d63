"""Never ends, and ignores every signal."""

for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except OSError:
        pass
while True:
    signal.pause()
