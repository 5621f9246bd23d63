"""Opens sockets that no network namespace confines, or that need rights."""

kinds = {"AF_VSOCK": "SOCK_STREAM", "AF_ALG": "SOCK_SEQPACKET"}
for family in ("AF_VSOCK", "AF_NETLINK", "AF_ALG", "AF_PACKET", "AF_INET", "AF_BLUETOOTH"):
    kind = kinds.get(family, "SOCK_RAW")
    attempt(family, lambda: socket.socket(getattr(socket, family), getattr(socket, kind)))
