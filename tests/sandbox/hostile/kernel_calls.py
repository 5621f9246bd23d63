"""Calls parts of the kernel that programs seldom need and that have had holes."""


def call(number):
    if libc.syscall(number, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() in (1, 38):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


numbers = {"bpf": (321, 280), "userfaultfd": (323, 282), "perf_event_open": (298, 241), "io_uring_setup": (425, 425)}
numbers |= {"keyctl": (250, 219), "add_key": (248, 217), "kexec_load": (246, 104), "init_module": (175, 105)}
numbers |= {"open_by_handle_at": (304, 265), "reboot": (169, 142), "swapon": (167, 224), "personality": (135, 92)}
for name, by_machine in numbers.items():
    attempt(name, call, by_machine[os.uname().machine != "x86_64"])
if os.uname().machine == "x86_64":
    attempt("x32", call, 0x40000000 + 39)
