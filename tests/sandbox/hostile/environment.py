"""Looks for the host's variables in its own environment and in that of every process that it sees."""

found = repr(dict(os.environ))
for file in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
    try:
        found += open(file).read()
    except OSError:
        pass
print("REACHED" if given["secret"] in found or "VIRTUAL_ENV" in found else "refused")
print(sorted(os.environ))
