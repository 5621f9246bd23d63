"""Uses up what the kernel counts by user or for the machine: asynchronous I/O, watches, timers, pipes, buffers."""

is_arm = os.uname().machine != "x86_64"


def call(numbers, *arguments):
    return checked(libc.syscall(numbers[is_arm], *arguments))


attempt("io_setup", call, (206, 0), 1000, ctypes.byref(ctypes.c_ulong(0)))
attempt("inotify_init1", call, (294, 26), 0)
if not is_arm:
    attempt("inotify_init", call, (253, 0))
reader, writer = os.pipe()
attempt("larger pipe", fcntl.fcntl, writer, 1031, 1 << 20)
with open("/usr/bin/env", "rb") as hosts:
    attempt("flock", fcntl.flock, hosts, fcntl.LOCK_SH)
    attempt("lease", fcntl.fcntl, hosts, 1024, fcntl.F_RDLCK)
directory = os.open("/usr", os.O_RDONLY)
attempt("dnotify", fcntl.fcntl, directory, 1026, 1)
for one in socket.socketpair():
    attempt("larger buffer", one.setsockopt, socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
    attempt("larger buffer", one.setsockopt, socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)


def timers():
    for count in range(100_000):
        if libc.timer_create(0, None, ctypes.byref(ctypes.c_void_p())) == -1:
            return count
    return 100_000


print("few timers", timers() <= 256)
