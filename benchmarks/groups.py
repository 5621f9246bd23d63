"""Why each server has a process group of its own: what one group for all would save, and what it costs when one stalls.

    python benchmarks/groups.py --servers 1 2 4 8        over gloo, on this machine; needs ss (iproute2)

The sender broadcasts the same buckets to every server, through a group each at once, or through one group. Servers
receive as stock SGLang does: with torch's default timeout, and they stay in a group that failed. Then one server is
stopped in the middle of a publish. The sender gives up after 3 s and leaves; the table has the servers that still wait.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing as mp
import os
import queue
import re
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

BUCKET_BYTES, NUM_BUCKETS, PUBLISHES = 8 << 20, 8, 5
MEETING = timedelta(seconds=60)
SENDERS = timedelta(seconds=3)
SERVERS = timedelta(minutes=30)
WATCHED_S = 15.0
CONTEXT: Any = mp.get_context("fork")  # which does not import torch anew


def meet(port: int, rank: int, size: int) -> dist.ProcessGroupGloo:
    store = TCPStore("127.0.0.1", port, size, rank == 0, timeout=MEETING, wait_for_workers=False)
    return dist.ProcessGroupGloo(PrefixStore("weights", store), rank, size, MEETING)


def broadcast(group: dist.ProcessGroupGloo, data: torch.Tensor, timeout: timedelta) -> None:
    options = dist.BroadcastOptions()
    options.timeout = timeout
    group.broadcast([data], options).wait()  # pyright: ignore[reportAttributeAccessIssue]


def serve(index: int, port: int, rank: int, size: int, ends: Any) -> None:
    """Receive buckets for ever, and tell of each; tell of a failure, and stay."""
    torch.set_num_threads(1)
    group, data = meet(port, rank, size), torch.empty(BUCKET_BYTES, dtype=torch.uint8)
    with suppress(RuntimeError):
        while True:
            broadcast(group, data, SERVERS)
            ends.put((index, True))
    ends.put((index, False))
    signal.pause()


@dataclass
class Fleet:
    """A sender and its servers, in one group or in one each."""

    num_servers: int
    is_shared: bool
    ends: Any = field(default_factory=lambda: CONTEXT.Queue())
    servers: list[Any] = field(default_factory=list[Any])
    groups: list[dist.ProcessGroupGloo] = field(default_factory=list[dist.ProcessGroupGloo])

    def __post_init__(self) -> None:
        count, size = (1, self.num_servers + 1) if self.is_shared else (self.num_servers, 2)
        ports = [free_port() for _ in range(count)]
        for index in range(self.num_servers):
            port, rank = (ports[0], index + 1) if self.is_shared else (ports[index], 1)
            arguments = (index, port, rank, size, self.ends)
            self.servers.append(CONTEXT.Process(target=serve, args=arguments, daemon=True))
            self.servers[-1].start()
        self.threads = ThreadPoolExecutor(count)
        self.groups = list(self.threads.map(lambda port: meet(port, 0, size), ports))

    def publish(self) -> None:
        """Send everything. Raises RuntimeError when a server does not take it."""
        data = torch.zeros(BUCKET_BYTES, dtype=torch.uint8)

        def send(group: dist.ProcessGroupGloo) -> None:
            for _ in range(NUM_BUCKETS):
                broadcast(group, data, SENDERS)

        list(self.threads.map(send, self.groups))

    def publish_to_all(self) -> float:
        """Seconds until every server has everything."""
        began = time.perf_counter()
        self.publish()
        for _ in range(self.num_servers * NUM_BUCKETS):
            self.ends.get(timeout=60)
        return time.perf_counter() - began

    def waiting_after_stall(self, stalled: int) -> int:
        """How many other servers neither have everything nor have failed, so long after one was stopped."""
        os.kill(self.servers[stalled].pid, signal.SIGSTOP)
        with suppress(RuntimeError):
            self.publish()
        if self.is_shared:
            self.groups.clear()  # rank 0 leaves
            gc.collect()
        left = dict.fromkeys(set(range(self.num_servers)) - {stalled}, NUM_BUCKETS)
        deadline = time.monotonic() + WATCHED_S
        while left and (rest := deadline - time.monotonic()) > 0:
            with suppress(queue.Empty):
                index, is_bucket = self.ends.get(timeout=rest)
                left[index] = left.get(index, 1) - 1 if is_bucket else 0
                if left[index] == 0:
                    del left[index]
        return len(left)

    def close(self) -> None:
        for server in self.servers:
            server.kill()
            server.join()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def sent_bytes() -> int:
    """What this process has sent over TCP."""
    lines = subprocess.run(["ss", "-tinpH"], capture_output=True, text=True, check=True).stdout.splitlines()
    ours = [after for before, after in pairwise(lines) if f"pid={os.getpid()}," in before]
    return sum(int(found[1]) for line in ours if (found := re.search(r"bytes_sent:(\d+)", line)))


def measure(num_servers: int, is_shared: bool) -> tuple[str, str, str]:
    fleet = Fleet(num_servers, is_shared)
    try:
        fleet.publish_to_all()
        before = sent_bytes()
        times = [1000 * fleet.publish_to_all() for _ in range(PUBLISHES)]
        copies = (sent_bytes() - before) / (PUBLISHES * NUM_BUCKETS * BUCKET_BYTES)
        waiting = fleet.waiting_after_stall(0)
    finally:
        fleet.close()
    time_ms = f"{median(times):.0f} ({min(times):.0f} to {max(times):.0f})"
    return f"{copies:.1f}", time_ms, f"{waiting} of {num_servers - 1}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A process group for each server, or one for all.")
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 4, 8])
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    size = NUM_BUCKETS * BUCKET_BYTES / 1e6
    table = Table(title=f"{size:.0f} MB to servers of this machine; then the first one is stopped")
    for column in ("servers", "groups", "copies that rank 0 sends", "publish (ms)", f"waiting {WATCHED_S:g} s later"):
        table.add_column(column, justify="right")
    for num_servers in args.servers:
        for is_shared in (False, True):
            table.add_row(str(num_servers), "one" if is_shared else "one each", *measure(num_servers, is_shared))
    Console().print(table)


if __name__ == "__main__":
    main()
