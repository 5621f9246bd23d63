"""Reads files of the host that a program does not need."""

paths = (
    "/etc/passwd /etc/shadow /etc/hostname /etc/resolv.conf /root/.bashrc /root/.ssh /home /var /sys /run /opt /boot"
)
paths += (
    " /mnt /srv /proc/1/root/etc/passwd /proc/self/root/../../etc/passwd /proc/1/cwd/etc/passwd ../../../etc/passwd"
)
for path in [*paths.split(), *given["paths"]]:
    attempt(path, lambda: os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(20))
