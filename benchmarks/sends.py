"""What a trainer sends to bring many servers to a version, and how long that takes, where its network is the limit.

    python benchmarks/sends.py mirrors --counts 1 4 8 16    weights.transport=delta
    python benchmarks/sends.py groups --counts 1 4 8 16     weights.transport=distributed, over gloo

Each server is a machine of its own (namespaces, tests/cluster/nodes.py) whose network sends --megabit. `mirrors` sends
a whole model to real mirrors. `groups` broadcasts as the trainer does to processes that receive as servers do, through
a group for each. Needs root, iproute2 and util-linux.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "cluster"))

from nodes import Cluster, Node
from rich.console import Console
from rich.table import Table

from arl.engine.weights.delta import MirrorClient, package, survey
from arl.runtime.threads import offload

ROOT = Path(__file__).parents[1]
PORT, KEY = 30900, "benchmark"
NUM_BUCKETS = 4
TIMEOUT = timedelta(seconds=110)
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


def sent_bytes() -> int:
    """What this machine has sent."""
    return int(SENT.read_text())


# Mirrors


async def bring(addresses: list[str], version: int, num_bytes: int, scratch: Path) -> dict[str, float]:
    """Send a new model to all mirrors; returns the seconds until the last had it, and copies of it that left here."""
    (directory := scratch / f"{version}").mkdir()
    (directory / "model.bin").write_bytes(os.urandom(num_bytes))
    with ThreadPoolExecutor(1) as pool:
        new = survey(directory, pool)

    async def pieces() -> AsyncIterator[bytes]:
        left = package(new, version)
        while piece := await offload(next, left, b""):
            yield piece

    began, before = time.perf_counter(), sent_bytes()
    await asyncio.gather(*(MirrorClient(address, KEY).put(pieces()) for address in addresses))
    return {"seconds": time.perf_counter() - began, "copies": (sent_bytes() - before) / num_bytes}


def send_to_mirrors(args: argparse.Namespace) -> None:
    addresses = [f"http://10.77.0.{number}:{PORT}" for number in range(2, 2 + max(args.counts))]
    with tempfile.TemporaryDirectory() as scratch:
        for version, count in enumerate(args.counts):
            found = asyncio.run(bring(addresses[:count], version, args.bytes, Path(scratch)))
            print(json.dumps({"count": count, **found}), flush=True)


# Groups


def group_of(port: int, rank: int) -> Any:
    import torch.distributed as dist

    store = dist.TCPStore("10.77.0.1", port, 2, rank == 0, timeout=TIMEOUT, wait_for_workers=False)
    return dist.ProcessGroupGloo(dist.PrefixStore("weights", store), rank, 2, TIMEOUT)


def broadcast(group: Any, num_bytes: int) -> None:
    import torch
    import torch.distributed as dist

    for _ in range(NUM_BUCKETS):
        group.broadcast([torch.zeros(num_bytes // NUM_BUCKETS, dtype=torch.uint8)], dist.BroadcastOptions()).wait()
    group.barrier().wait()  # all have everything


def receive(args: argparse.Namespace) -> None:
    for course, count in enumerate(args.counts):
        if args.index < count:
            broadcast(group_of(PORT + 100 * course + args.index, 1), args.bytes)


def send_to_groups(args: argparse.Namespace) -> None:
    for course, count in enumerate(args.counts):
        with ThreadPoolExecutor(count) as pool:
            groups = list(pool.map(lambda index, course=course: group_of(PORT + 100 * course + index, 0), range(count)))
            began, before = time.perf_counter(), sent_bytes()
            list(pool.map(lambda group: broadcast(group, args.bytes), groups))
            found = {"seconds": time.perf_counter() - began, "copies": (sent_bytes() - before) / args.bytes}
        print(json.dumps({"count": count, **found}), flush=True)


# The machines


def limit(node: Node, megabit: int) -> None:
    shape = ["root", "tbf", "rate", f"{megabit}mbit", "burst", "64kb", "latency", "50ms"]
    node.run(["tc", "qdisc", "add", "dev", "eth0", *shape])


def play(node: Node, role: str, args: argparse.Namespace, *more: str) -> list[str]:
    sizes = ["--megabytes", str(args.megabytes), "--counts", *map(str, args.counts)]
    return [sys.executable, str(ROOT / "benchmarks" / "sends.py"), args.what, "--role", role, *sizes, *more]


def measure(args: argparse.Namespace, shared: Path) -> list[dict[str, Any]]:
    (shared / "key").write_text(KEY)
    log = shared / "log"
    mirror = ["-m", "arl.engine.weights.mirror", "--host", "0.0.0.0", "--port", str(PORT), "--num-threads", "1"]
    with Cluster(1 + max(args.counts), shared=shared) as cluster:
        trainer, *servers = cluster.nodes
        for node in cluster.nodes:
            limit(node, args.megabit)
        for index, node in enumerate(servers):
            if args.what == "mirrors":
                node.start([sys.executable, *mirror, "--api-key-file", str(shared / "key")], log=log)
            else:
                node.start(play(node, "receiver", args, "--index", str(index)), log=log)
        if args.what == "mirrors":
            wait_for_lines(log, len(servers))
        return [json.loads(line) for line in trainer.run(play(trainer, "sender", args), timeout_s=600).splitlines()]


def wait_for_lines(log: Path, count: int) -> None:
    is_over = threading.Event()
    while log.read_bytes().count(b'"ready"') < count:
        is_over.wait(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Sends to many servers.")
    parser.add_argument("what", choices=("mirrors", "groups"))
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--megabytes", type=int, default=4, help="the model's size")
    parser.add_argument("--megabit", type=int, default=20, help="a second that each machine sends")
    parser.add_argument("--role", choices=("sender", "receiver"), help=argparse.SUPPRESS)
    parser.add_argument("--index", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.bytes = args.megabytes * 1_000_000
    if args.role == "receiver":
        receive(args)
    elif args.role == "sender":
        (send_to_mirrors if args.what == "mirrors" else send_to_groups)(args)
    else:
        report(args)


def report(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        rows = measure(args, Path(name))
    one_send_s = 8 * args.bytes / (args.megabit * 1e6)
    table = Table(
        title=f"{args.megabytes} MB to {args.what}; {args.megabit} Mbit/s a machine, so a send takes {one_send_s:.2f} s"
    )
    for column in ("servers", "copies that left the trainer", "seconds"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(str(row["count"]), f"{row['copies']:.2f}", f"{row['seconds']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
