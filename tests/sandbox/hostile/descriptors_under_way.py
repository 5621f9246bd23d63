"""Sends descriptors that nobody receives: the kernel counts them by user, and lets no program of that user send more."""

import socket

sender, receiver = socket.socketpair()
attempt("sendmsg", socket.send_fds, sender, [b"x"], [0])
