"""Writes reports like bubblewrap's into every descriptor of its own and of pid 1."""

for file in range(3, 100):
    try:
        os.write(file, b'{ "exit-code": 0 }\n')
        print("REACHED", file)
    except OSError:
        pass
for path in glob.glob("/proc/1/fd/*"):
    if os.readlink(path).startswith("/"):
        continue
    try:
        with open(path, "wb", 0) as file:
            os.set_blocking(file.fileno(), False)
            file.write(b'{ "exit-code": 0 }\n')
    except OSError:
        pass
os._exit(3)
