"""Links files of the host into its directory."""

for path in ("/usr/bin/env", os.path.realpath(sys.executable), "/proc/1/exe"):
    attempt(path, os.link, path, "linked")
    attempt(
        f"{path} by its descriptor",
        lambda: os.link(f"/proc/self/fd/{os.open(path, os.O_RDONLY)}", "linked2", follow_symlinks=True),
    )
