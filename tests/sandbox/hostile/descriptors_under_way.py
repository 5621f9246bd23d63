"""Sends descriptors that nobody receives: the kernel counts them by user, for all programs together."""

sender, receiver = socket.socketpair()
attempt("sendmsg", socket.send_fds, sender, [b"x"], [0])
