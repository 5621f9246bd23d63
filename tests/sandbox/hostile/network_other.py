"""Opens sockets that no network namespace confines, or that need rights."""

import socket

for family, kind in [
    ("AF_VSOCK", "SOCK_STREAM"),
    ("AF_NETLINK", "SOCK_RAW"),
    ("AF_ALG", "SOCK_SEQPACKET"),
    ("AF_PACKET", "SOCK_RAW"),
    ("AF_INET", "SOCK_RAW"),
    ("AF_BLUETOOTH", "SOCK_RAW"),
]:
    attempt(family, lambda: socket.socket(getattr(socket, family), getattr(socket, kind)))
