"""Takes memory that can outlast its mapping: memfd, System V, message queues, /dev/shm, shared mappings, pipes."""

attempt("memfd", os.memfd_create, "hoard")
attempt("memfd by its number", lambda: checked(libc.syscall(319 if os.uname().machine == "x86_64" else 279, b"x", 0)))
attempt("shmget", lambda: checked(libc.shmget(1, 1 << 30, 0o1600)))
attempt("msgget", lambda: checked(libc.msgget(1, 0o1600)))
attempt("mq_open", lambda: checked(libc.mq_open(b"/hoard", os.O_CREAT | os.O_RDWR, 0o600, None)))
attempt("shared mapping", mmap.mmap, -1, 1 << 20)
attempt("/dev/zero", os.open, "/dev/zero", os.O_RDWR)
attempt("vmsplice", lambda: checked(libc.syscall(278 if os.uname().machine == "x86_64" else 75, -1, None, 0, 0)))
file = os.open("/dev/shm/hoard", os.O_CREAT | os.O_WRONLY)
attempt("/dev/shm", lambda: [os.posix_fallocate(file, 0, megabytes << 20) for megabytes in (4, 8, 12)])
