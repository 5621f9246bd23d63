"""The nodes of a cluster are as separate as machines, and nothing of them stays behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes import REPOSITORY, Cluster, Node

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
client.settimeout(0.5)
client.sendto(sys.argv[2].encode(), (sys.argv[1], 9000))
try:
    print(client.recv(100).decode())
except TimeoutError:
    print("silence")
"""
HOSTS_OF_TASKS = """
import ray, socket
ray.init(address="auto", logging_level="ERROR")

@ray.remote(num_cpus=1)
def here():
    return socket.gethostname()

print(*sorted(ray.get([here.options(scheduling_strategy="SPREAD").remote() for _ in range(2)])))
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


def is_answered(node: Node, other: Node, word: str) -> bool:
    """False after silence, as where a cable is cut. Raises ClusterError if a host or a network refuses."""
    return node.run([sys.executable, "-c", SAY, other.address, word]) == f"heard {word}\n"


def test_a_node_has_its_own_files_memory_processes_and_name(cluster: Cluster):
    first, second, _ = cluster.nodes
    first.run(["touch", "/tmp/own", "/dev/shm/own", cluster.shared / "shared"])
    assert "own" not in second.run(["ls", "/dev/shm", "/tmp"])
    assert "shared" in second.run(["ls", cluster.shared])
    assert second.run(["hostname"]) == "node-2\n"
    assert first.address in second.run(["getent", "hosts", "node-1"])
    assert second.run(["sh", "-c", "echo $$"]) != f"{os.getpid()}\n"
    assert second.run(["sh", "-c", "echo /proc/[0-9]*"]).count("/proc/") < 6
    assert Path(first.run([sys.executable, "-c", "import arl; print(arl.__file__)"])).parents[1] == REPOSITORY


def test_cuts_are_silent_have_directions_and_heal(cluster: Cluster, tmp_path: Path):
    first, second, third = cluster.nodes
    listen(second, tmp_path / "heard")
    assert is_answered(first, second, "before")
    second.cut(first)
    assert not is_answered(first, second, "lost")
    assert is_answered(third, second, "other")
    second.heal()
    first.cut_incoming()
    assert not is_answered(first, second, "arrives")
    first.heal()
    assert is_answered(first, second, "after")
    assert (tmp_path / "heard").read_text().split() == ["before", "other", "arrives", "after"]


def test_a_node_that_was_killed_comes_back_empty(cluster: Cluster, tmp_path: Path):
    first, second, _ = cluster.nodes
    second.run(["touch", "/tmp/own"])
    listen(second, tmp_path / "heard")
    second.kill()
    assert not is_answered(first, second, "lost")
    second.restart()
    assert "own" not in second.run(["ls", "/tmp"])
    listen(second, tmp_path / "heard")
    assert is_answered(first, second, "back")


def test_nothing_outlives_the_process_that_made_a_cluster(tmp_path: Path):
    seconds = str(100_000 + os.getpid())  # a number by which to find the process
    command = [sys.executable, "-c", UP_UNTIL_KILLED, tmp_path, seconds]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        sleeping = ["pgrep", "--full", f"^sleep {seconds}"]
        assert subprocess.run(sleeping, stdout=subprocess.DEVNULL, check=False).returncode == 0
        owner.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while subprocess.run(sleeping, stdout=subprocess.DEVNULL, check=False).returncode == 0:
        assert time.monotonic() < deadline, "processes of the cluster are alive"


def test_ray_runs_on_all_nodes(cluster: Cluster):
    cluster.start_ray(num_cpus=[0, 1, 1])
    assert cluster.nodes[0].run([sys.executable, "-c", HOSTS_OF_TASKS]) == "node-2 node-3\n"
