"""Connects to a server on the host, and to the world."""

ours = [("127.0.0.1", given["tcp"]), ("localhost", given["tcp"])]
for address in [*ours, ("1.1.1.1", 53), ("192.168.0.1", 80), ("169.254.169.254", 80)]:
    attempt(f"{address}", lambda: socket.create_connection(address, timeout=1).send(b"escaped"))
attempt("IPv6", lambda: socket.create_connection(("::1", given["tcp"]), timeout=1))
