"""Makes namespaces in which it would be root."""

for flag in (0x10000000, 0x00020000, 0x40000000, 0x20000000):
    attempt(f"unshare {flag:#x}", lambda: checked(libc.unshare(flag)))
clone = 56 if os.uname().machine == "x86_64" else 220
attempt("clone", lambda: checked(libc.syscall(clone, 0x10000000 | 17, 0, 0, 0, 0)))
attempt("clone3", lambda: checked(libc.syscall(435, 0, 0)))
attempt("setns", lambda: checked(libc.setns(os.open("/proc/1/ns/mnt", os.O_RDONLY), 0)))
command = ["/usr/bin/unshare", "-Ur", "/usr/bin/true"]
attempt("unshare(1)", lambda: subprocess.run(command, check=True, capture_output=True))
