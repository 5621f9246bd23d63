"""Opens and makes devices."""

for path in ("/dev/mem", "/dev/kmsg", "/dev/fuse", "/dev/kvm", "/dev/vsock", "/dev/sda", "/dev/vda", "/dev/net/tun"):
    attempt(path, lambda: os.open(path, os.O_RDONLY))
attempt("mknod", os.mknod, "device", 0o600 | stat.S_IFBLK, os.makedev(8, 0))
print(sorted(os.listdir("/dev")))
