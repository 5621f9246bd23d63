"""This machine: its address, its GPUs, and the names of servers' hosts."""

from __future__ import annotations

import glob
import os
import socket
from urllib.parse import urlsplit

from arl.web.addresses import is_here


def visible_gpus() -> int | None:
    """How many NVIDIA GPUs this process may use; None where that cannot be told without torch."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return len([one for one in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if one.strip() not in ("", "-1")])
    if found := len(glob.glob("/dev/nvidia[0-9]*")):
        return found
    return None if any(map(os.path.exists, ("/dev/kfd", "/dev/dxg", "/dev/nvhost-gpu"))) else 0


def own_address() -> str:
    """This machine's address towards others, found without sending anything; loopback without a network."""
    for family, other in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((other, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"


def hostname_of(url: str) -> str:
    """The name of a server's host: this machine's own, if the server is here."""
    return socket.gethostname() if is_here(url) else urlsplit(url).hostname or ""
