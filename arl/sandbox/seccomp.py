"""A second wall inside bubblewrap: the kernel refuses system calls that a Python program does not need.

Namespaces already keep a program from the host's files and processes. The filter refuses calls that

- hold memory where no limit counts it (memfd, System V, shared mappings without a file, vmsplice);
- use up resources that the kernel counts by user or for the whole machine, so for all programs and arl together
  (sendmsg passes descriptors; asynchronous I/O, inotify, larger pipes and socket buffers);
- watch or lock files of the host that a program may read (inotify, dnotify, leases, flock; POSIX locks remain);
- reach past namespaces (vsock, the kernel's keyrings);
- have been ways out of a kernel (user namespaces, BPF, io_uring and others).

The list follows Docker's and Flatpak's.
"""

from __future__ import annotations

import errno
import platform
import struct

_COMMON = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "clone3": 435, "pidfd_getfd": 438,
    "process_madvise": 440, "mount_setattr": 442, "memfd_secret": 447,
}  # fmt: skip
_X86_64 = {
    "mmap": 9, "ioctl": 16, "setsockopt": 54, "fcntl": 72, "flock": 73, "io_setup": 206, "inotify_init": 253,
    "inotify_init1": 294, "shmget": 29, "shmat": 30, "shmctl": 31, "socket": 41, "sendmsg": 46, "clone": 56,
    "semget": 64, "msgget": 68, "ptrace": 101, "syslog": 103, "personality": 135, "vhangup": 153, "modify_ldt": 154,
    "pivot_root": 155, "chroot": 161, "acct": 163, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168,
    "reboot": 169, "iopl": 172, "ioperm": 173, "init_module": 175, "delete_module": 176, "quotactl": 179,
    "mq_open": 240, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272,
    "vmsplice": 278, "perf_event_open": 298, "fanotify_init": 300, "name_to_handle_at": 303, "open_by_handle_at": 304,
    "sendmmsg": 307, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
    "finit_module": 313, "memfd_create": 319, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
}  # fmt: skip
_AARCH64 = {
    "io_setup": 0, "fcntl": 25, "inotify_init1": 26, "flock": 32, "setsockopt": 208, "ioctl": 29, "umount2": 39,
    "mount": 40, "pivot_root": 41, "chroot": 51, "vhangup": 58, "quotactl": 60, "vmsplice": 75, "acct": 89,
    "personality": 92, "unshare": 97, "kexec_load": 104, "init_module": 105, "delete_module": 106, "syslog": 116,
    "ptrace": 117, "reboot": 142, "mq_open": 180, "msgget": 186, "semget": 190, "shmget": 194, "shmctl": 195,
    "shmat": 196, "socket": 198, "sendmsg": 211, "add_key": 217, "request_key": 218, "keyctl": 219, "clone": 220,
    "mmap": 222, "swapon": 224, "swapoff": 225, "perf_event_open": 241, "fanotify_init": 262,
    "name_to_handle_at": 264, "open_by_handle_at": 265, "setns": 268, "sendmmsg": 269, "process_vm_readv": 270,
    "process_vm_writev": 271, "kcmp": 272, "finit_module": 273, "memfd_create": 279, "bpf": 280, "userfaultfd": 282,
    "kexec_file_load": 294,
}  # fmt: skip
_MACHINES = {"x86_64": (0xC000003E, _X86_64), "aarch64": (0xC00000B7, _AARCH64)}
"""Machine -> (AUDIT_ARCH of linux/audit.h, number of each call), from asm/unistd.h."""

_CONDITIONAL = ("clone", "clone3", "fcntl", "flock", "ioctl", "mmap", "setsockopt", "socket")
_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
_TERMINAL_INPUT = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX type into the terminal."""
_FILE_CONTROL = (1024, 1026, 1031)
"""F_SETLEASE, F_NOTIFY and F_SETPIPE_SZ."""
_SOCKET_LEVEL, _BUFFER_SIZES = 1, (7, 8, 32, 33)
"""SOL_SOCKET; SO_SNDBUF, SO_RCVBUF and both again with FORCE. The keeper counts sockets by their usual sizes."""
_SHARED_WITHOUT_FILE = 0x21
"""MAP_SHARED and MAP_ANONYMOUS. Such memory stays held even while it is resident in no process."""
_SOCKETS = (1, 2, 10)
"""AF_UNIX, AF_INET and AF_INET6. The network namespace confines them."""
_OTHER_ABI = 0x40000000
"""From this number on, x32 has the same calls again."""

_NUMBER, _ARCH, _FIRST_ARGUMENT, _SECOND_ARGUMENT, _THIRD_ARGUMENT, _FOURTH_ARGUMENT = 0, 4, 16, 24, 32, 40
_LOAD, _MASK, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


def seccomp_filter(machine: str = platform.machine()) -> bytes:
    """The filter as an array of struct sock_filter (linux/filter.h); b"" for a machine that this file does not list."""
    if machine not in _MACHINES:
        return b""
    arch, listed = _MACHINES[machine]
    numbers = {**_COMMON, **listed}
    refused = [number for name, number in numbers.items() if name not in _CONDITIONAL]
    program = [
        _load(_ARCH),
        (_EQUAL, 1, 0, arch),
        _refuse(errno.ENOSYS),
        _load(_NUMBER),
        *_when(_AT_LEAST, _OTHER_ABI, [_refuse(errno.ENOSYS)]),
        *_when(_EQUAL, numbers["clone3"], [_refuse(errno.ENOSYS)]),  # C libraries then use clone, whose flags show
    ]
    for number in refused:
        program += _when(_EQUAL, number, [_refuse(errno.EPERM)])
    program += _when(_EQUAL, numbers["clone"], _argument(_FIRST_ARGUMENT, _ANY_BIT, (_NAMESPACES,)))
    program += _when(_EQUAL, numbers["ioctl"], _argument(_SECOND_ARGUMENT, _EQUAL, _TERMINAL_INPUT))
    program += _when(_EQUAL, numbers["fcntl"], _argument(_SECOND_ARGUMENT, _EQUAL, _FILE_CONTROL))
    program += _when(_EQUAL, numbers["flock"], [_refuse(errno.ENOLCK)])  # as on file systems without flock
    allow = (_RETURN, 0, 0, _ALLOW)
    sizes = _when(_EQUAL, _SOCKET_LEVEL, _argument(_THIRD_ARGUMENT, _EQUAL, _BUFFER_SIZES))
    program += _when(_EQUAL, numbers["setsockopt"], [_load(_SECOND_ARGUMENT), *sizes, allow])
    masked = [_load(_FOURTH_ARGUMENT), (_MASK, 0, 0, _SHARED_WITHOUT_FILE)]
    refusing = _when(_EQUAL, _SHARED_WITHOUT_FILE, [_refuse(errno.EPERM)])
    program += _when(_EQUAL, numbers["mmap"], [*masked, *refusing, allow])
    allowed = [step for family in _SOCKETS for step in _when(_EQUAL, family, [allow])]
    refused_family = _refuse(errno.EAFNOSUPPORT)
    program += _when(_EQUAL, numbers["socket"], [_load(_FIRST_ARGUMENT), *allowed, refused_family])
    program.append(allow)
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


_Instruction = tuple[int, int, int, int]
"""code, instructions to skip when true, when false, operand."""


def _load(offset: int) -> _Instruction:
    return (_LOAD, 0, 0, offset)


def _refuse(error: int) -> _Instruction:
    return (_RETURN, 0, 0, _ERRNO | error)


def _when(test: int, operand: int, body: list[_Instruction]) -> list[_Instruction]:
    """Run the body, which ends with a return, if the value loaded last passes the test; else skip it."""
    return [(test, 0, len(body), operand), *body]


def _argument(offset: int, test: int, operands: tuple[int, ...]) -> list[_Instruction]:
    """Refuse if the argument passes the test with any operand, else allow."""
    tests = [step for operand in operands for step in _when(test, operand, [_refuse(errno.EPERM)])]
    return [_load(offset), *tests, (_RETURN, 0, 0, _ALLOW)]
