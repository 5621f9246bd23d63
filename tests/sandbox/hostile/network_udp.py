"""Sends datagrams to the host and to the world. It may send to its own loopback, where nobody listens."""

udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.sendto(b"escaped", ("127.0.0.1", given["udp"]))
attempt("8.8.8.8", udp.sendto, b"escaped", ("8.8.8.8", 53))
attempt(
    "broadcast",
    lambda: (udp.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1), udp.sendto(b"escaped", ("255.255.255.255", 9))),
)
