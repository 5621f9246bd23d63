"""The nodes of a cluster are as separate as machines, and nothing of them stays behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes import Cluster, Node

pytestmark = pytest.mark.cluster

LISTEN = """
import socket
server = socket.socket(type=socket.SOCK_DGRAM)
server.bind(("0.0.0.0", 9000))
while True:
    said, visitor = server.recvfrom(100)
    print(said.decode(), flush=True)
    server.sendto(b"heard " + said, visitor)
"""
SAY = """
import socket, sys
client = socket.socket(type=socket.SOCK_DGRAM)
client.settimeout(float(sys.argv[3]))
client.sendto(sys.argv[2].encode(), (sys.argv[1], 9000))
try:
    print(client.recv(100).decode())
except TimeoutError:
    print("silence")
"""
UP_UNTIL_KILLED = """
import sys, time
from pathlib import Path
from nodes import Cluster
with Cluster(2, shared=Path(sys.argv[1])) as cluster:
    cluster.nodes[1].start(["sleep", sys.argv[2]], log=Path("/dev/null"))
    print("up", flush=True)
    time.sleep(100)
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(3, shared=tmp_path) as cluster:
        yield cluster


def listen(node: Node, log: Path) -> None:
    node.start([sys.executable, "-c", LISTEN], log=log)
    node.run(["sh", "-c", "until ss --listening --udp --numeric | grep --quiet :9000; do sleep 0.05; done"])


def is_answered(node: Node, other: Node, word: str, within_s: float = 30.0) -> bool:
    """False after silence, as where a cable is cut. Raises ClusterError if a host or a network refuses."""
    return node.run([sys.executable, "-c", SAY, other.address, word, str(within_s)]) == f"heard {word}\n"


def test_cuts_are_silent_have_directions_and_heal(cluster: Cluster, tmp_path: Path):
    first, second, third = cluster.nodes
    listen(second, tmp_path / "heard")
    assert is_answered(first, second, "before")
    second.cut(first)
    assert not is_answered(first, second, "lost", 0.5)
    assert is_answered(third, second, "other")
    second.heal()
    first.cut_incoming()
    assert not is_answered(first, second, "arrives", 0.5)
    first.heal()
    assert is_answered(first, second, "after")
    assert (tmp_path / "heard").read_text().split() == ["before", "other", "arrives", "after"]


def test_nothing_outlives_the_process_that_made_a_cluster(tmp_path: Path):
    seconds = str(100_000 + os.getpid())  # a number by which to find the process
    command = [sys.executable, "-c", UP_UNTIL_KILLED, tmp_path, seconds]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        until_there = f"until pgrep --full '^sleep {seconds}'; do sleep 0.1; done"
        subprocess.run(["sh", "-c", until_there], stdout=subprocess.DEVNULL, timeout=60, check=True)
        owner.send_signal(signal.SIGKILL)
    until_gone = f"while pgrep --full '^sleep {seconds}'; do sleep 0.1; done"
    subprocess.run(["sh", "-c", until_gone], stdout=subprocess.DEVNULL, timeout=60, check=True)
