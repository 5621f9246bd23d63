"""Whose a base URL's host is: this machine's, or another's."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit


def addresses_of(url: str) -> set[str]:
    """The IP addresses of a server's host; empty if its name is unknown here. May wait for a server of names."""
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(urlsplit(url).hostname, None)}
    except (OSError, ValueError):
        return set()


def is_here(url: str) -> bool:
    """Whether a server's host is this machine, by its addresses. A name that is unknown here is elsewhere."""
    return any(map(_is_own, addresses_of(url)))


def _is_own(address: str) -> bool:
    """A machine reaches its own address from that address; asking which one it would use sends nothing."""
    host = ipaddress.ip_address(address.partition("%")[0])
    if host.is_loopback or host.is_unspecified:
        return True
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0]) == address
    except OSError:
        return False
