"""Looks up the address of a name."""

for name in ("example.com", "metadata.google.internal"):
    attempt(name, socket.getaddrinfo, name, 80)
