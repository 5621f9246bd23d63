"""The filter of system calls, run by a small machine that does what the kernel does with it."""

import errno
import struct

import pytest

from arl.sandbox.seccomp import seccomp_filter

ALLOWED, ERRNO = 0x7FFF0000, 0x00050000


def verdict(program: bytes, arch: int, number: int, *arguments: int) -> int:
    """0 where the call is allowed, else the error it gets."""
    data = struct.pack("=iIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    instructions = list(struct.iter_unpack("=HBBI", program))
    at, loaded = 0, 0
    while True:
        code, if_true, if_false, operand = instructions[at]
        at += 1
        match code:
            case 0x20:
                (loaded,) = struct.unpack_from("=I", data, operand)
            case 0x54:
                loaded &= operand
            case 0x06:
                assert operand == ALLOWED or operand & 0xFFFF0000 == ERRNO
                return 0 if operand == ALLOWED else operand & 0xFFFF
            case _:
                holds = {0x15: loaded == operand, 0x35: loaded >= operand, 0x45: bool(loaded & operand)}[code]
                at += if_true if holds else if_false


X86_64 = {"arch": 0xC000003E, "read": 0, "ioctl": 16, "socket": 41, "clone": 56, "mount": 165, "memfd_create": 319}
X86_64 |= {"mmap": 9, "vmsplice": 278, "sendmsg": 46, "sendmmsg": 307, "setsockopt": 54, "fcntl": 72, "flock": 73}
X86_64 |= {"io_setup": 206, "inotify_init1": 294}
AARCH64 = {"arch": 0xC00000B7, "read": 63, "ioctl": 29, "socket": 198, "clone": 220, "mount": 40, "memfd_create": 279}
AARCH64 |= {"mmap": 222, "vmsplice": 75, "sendmsg": 211, "sendmmsg": 269, "setsockopt": 208, "fcntl": 25, "flock": 32}
AARCH64 |= {"io_setup": 0, "inotify_init1": 26}


@pytest.mark.parametrize(("machine", "calls"), [("x86_64", X86_64), ("aarch64", AARCH64)])
def test_only_system_calls_that_programs_need_are_allowed(machine: str, calls: dict[str, int]) -> None:
    program, arch = seccomp_filter(machine), calls["arch"]
    fork, thread, new_user = 0x11, 0x3D0F00, 0x10000011
    for name, arguments in {"read": (), "ioctl": (0, 0x5401), "socket": (2,), "clone": (fork,)}.items():
        assert verdict(program, arch, calls[name], *arguments) == 0
    assert verdict(program, arch, calls["clone"], thread) == 0
    assert verdict(program, arch, calls["clone"], new_user) == errno.EPERM
    assert verdict(program, arch, calls["mount"]) == errno.EPERM
    for name in ("memfd_create", "vmsplice", "sendmsg", "sendmmsg", "io_setup", "inotify_init1"):
        assert verdict(program, arch, calls[name]) == errno.EPERM
    private, shared, shared_file = 0x22, 0x21, 0x01
    assert [verdict(program, arch, calls["mmap"], 0, 1, 3, flags) for flags in (private, shared_file)] == [0, 0]
    assert verdict(program, arch, calls["mmap"], 0, 1, 3, shared | 0x4000) == errno.EPERM
    assert verdict(program, arch, calls["ioctl"], 0, 0x5412) == errno.EPERM
    assert verdict(program, arch, calls["socket"], 40) == errno.EAFNOSUPPORT
    assert verdict(program, arch, 435) == errno.ENOSYS  # clone3
    assert verdict(program, arch, calls["flock"], 3, 1) == errno.ENOLCK
    get_flags, set_lock, set_pipe_size, notify = 3, 6, 1031, 1026
    assert [verdict(program, arch, calls["fcntl"], 3, command) for command in (get_flags, set_lock)] == [0, 0]
    assert verdict(program, arch, calls["fcntl"], 3, set_pipe_size) == errno.EPERM
    assert verdict(program, arch, calls["fcntl"], 3, notify) == errno.EPERM
    reuse_address, send_buffer, no_delay = (1, 2), (1, 7), (6, 7)
    assert [verdict(program, arch, calls["setsockopt"], 3, *option) for option in (reuse_address, no_delay)] == [0, 0]
    assert verdict(program, arch, calls["setsockopt"], 3, *send_buffer) == errno.EPERM


def test_calls_by_the_numbers_of_another_machine_are_refused() -> None:
    program = seccomp_filter("x86_64")
    assert verdict(program, 0x40000003, 0) == errno.ENOSYS  # i386
    assert verdict(program, X86_64["arch"], 0x40000000) == errno.ENOSYS  # x32


def test_an_unknown_machine_has_no_filter() -> None:
    assert seccomp_filter("riscv64") == b""
