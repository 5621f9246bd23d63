"""Room for thousands of connections at once."""

from __future__ import annotations

import resource


def allow_many_connections() -> None:
    """Raise this process's soft limit of open files, often 1,024 or less, to what it is allowed.

    Every request in flight holds a connection, and each connection is an open file, here and in the server; child
    processes inherit the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else max(soft, 1 << 16)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
