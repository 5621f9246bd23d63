"""Takes memory that no process maps: memfd, System V segments, message queues, a file in /dev/shm."""

import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)


def called(result):
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


attempt("memfd", os.memfd_create, "hoard")
attempt("memfd by its number", lambda: called(libc.syscall(319 if os.uname().machine == "x86_64" else 279, b"x", 0)))
attempt("shmget", lambda: called(libc.shmget(1, 1 << 30, 0o1600)))
attempt("msgget", lambda: called(libc.msgget(1, 0o1600)))
attempt("mq_open", lambda: called(libc.mq_open(b"/hoard", os.O_CREAT | os.O_RDWR, 0o600, None)))
file = os.open("/dev/shm/hoard", os.O_CREAT | os.O_WRONLY)
attempt("/dev/shm", lambda: [os.posix_fallocate(file, 0, megabytes << 20) for megabytes in (4, 8, 12)])
