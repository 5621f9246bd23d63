"""A cluster of nodes on one machine: what is a machine elsewhere is a set of namespaces here.

    with Cluster(3, shared=tmp_path) as cluster:
        cluster.start_ray(num_cpus=[0, 2, 0])  # the first node is Ray's head
        driver, ranks, server = cluster.nodes
        driver.run([sys.executable, "train.py"])

Each node has its own network (10.77.0.1, .2, ... at one switch), host name, processes, /dev/shm and /tmp. All see the
directory `shared` at the same path, as they would see NFS, and have the code and its Python environment installed. The
switch is a network namespace, too, so clusters of several test processes do not see each other. Every process in a
cluster ends with the process that made it, and the namespaces end with their processes.

What real clusters have and this one has not: clocks that differ, slow and lossy networks, the delays and the locks of
NFS, memory and CPUs of each node's own.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Self

REPOSITORY = Path(__file__).parents[2]
RAY_PORT = 6379
NOTICES_SOON = {"RAY_health_check_period_ms": "500", "RAY_health_check_timeout_ms": "1000"}
"""Ray's environment, so that it takes a node that is silent for 3 s in place of half a minute for dead."""
_RAY = (sys.executable, "-m", "ray.scripts.scripts")
_ENDING_S = 30.0
_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
_SWITCH = ("unshare", "--net", "sh", "-euc", "ip link add switch type bridge; ip link set switch up; echo $$; exec cat")
_NODE = ("unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "sh", "-euc")
_BOOT = """
read -r pid rest < /proc/self/stat  # the id that processes outside the node know this one by
hostname "$1"
hosts=$2
shift 2
test ! -e /etc/resolv.conf || mount --bind /dev/null /etc/resolv.conf  # no question waits for a server of names
mount --rbind /tmp /mnt
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
printf %s "$hosts" > /tmp/hosts
mount --bind /tmp/hosts /etc/hosts
rm /tmp/hosts
for path; do
    case $path in /tmp/*) mkdir -p "$path"; mount --rbind "/mnt/${path#/tmp/}" "$path" ;; esac
done
umount --lazy /mnt
mount -t proc proc /proc
mount -t sysfs sysfs /sys  # with the network interfaces of this node
echo "$pid"
exec >&-
while :; do sleep 1000 & wait $!; done  # and reap what others leave
"""


class ClusterError(Exception):
    """A command that builds or uses a cluster failed; the message holds what it printed."""


@cache
def why_none() -> str | None:
    """Why this machine allows no cluster; None if it does."""
    try:
        with Cluster(1, shared=REPOSITORY):
            return None
    except (OSError, ClusterError) as error:
        return f"namespaces cannot be made here: {error}"


class Cluster:
    """`count` nodes, up from the start. Leaving the block ends them and everything in them."""

    def __init__(self, count: int, *, shared: Path) -> None:
        """shared: a directory that all nodes see."""
        self.shared = shared
        self.nodes = [Node(self, number) for number in range(1, count + 1)]
        self._switch: subprocess.Popen[str] | None = None
        self._switch_id = 0
        self._drops: set[tuple[Node, Node]] = set()

    def __enter__(self) -> Self:
        self._switch, self._switch_id = _held([*_WITH_PARENT, *_SWITCH])
        try:
            for node in self.nodes:
                node.boot()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            if node.is_up:
                node.end()
        if self._switch is not None:
            self._switch.kill()
            self._switch.communicate()

    def start_ray(self, num_cpus: Sequence[int]) -> None:
        """Start Ray on the first nodes, with so many CPUs each. The first is the head."""
        for node, count in zip(self.nodes, num_cpus, strict=False):
            node.start_ray(count)

    def connect(self, node: Node, init: int) -> None:
        """Plug a node, whose first process is `init`, into the switch."""
        _ip(
            self._switch_id,
            f"link add {node.name} type veth peer name eth0 address {node.mac} netns {init}",
            f"link set {node.name} master switch up",
        )

    def disconnect(self, node: Node) -> None:
        _ip(self._switch_id, f"link delete {node.name}")

    def drop(self, sender: Node, receiver: Node) -> None:
        """Drop what `receiver` gets from `sender`. Idempotent."""
        if (sender, receiver) not in self._drops:
            self._drops.add((sender, receiver))
            receiver.configure(f"rule add preference 10 from {sender.address} iif eth0 blackhole")

    def heal(self, node: Node) -> None:
        """Drop nothing from or to `node` any more."""
        for sender, receiver in [pair for pair in self._drops if node in pair]:
            self._drops.remove((sender, receiver))
            if receiver.is_up:
                receiver.configure(f"rule delete preference 10 from {sender.address} iif eth0 blackhole")

    def forget_drops(self, receiver: Node) -> None:
        """The rules of a node ended with it."""
        self._drops = {pair for pair in self._drops if pair[1] is not receiver}


class Node:
    """A machine of a cluster."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.name = f"node-{number}"
        self.address = f"10.77.0.{number}"
        self.mac = f"02:00:0a:4d:00:{number:02x}"
        self._cluster = cluster
        self._unshare: subprocess.Popen[str] | None = None
        self._init = 0
        self._started: list[subprocess.Popen[bytes]] = []

    @property
    def is_up(self) -> bool:
        return self._unshare is not None

    def run(self, argv: Sequence[str | Path], *, timeout_s: float = 60.0, env: dict[str, str] | None = None) -> str:
        """Run a program in the node's /tmp; returns what it printed. Raises ClusterError if it fails.

        env: variables beside those that every program gets here.
        """
        return _run(self._command(argv), timeout_s=timeout_s, env=_environment(env))

    def start(
        self, argv: Sequence[str | Path], *, log: Path, env: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a program; `log` gets what it prints. Killing the process that is returned kills the program."""
        command, environment = self._command(argv), _environment(env)
        with log.open("ab") as file:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment)
        self._started.append(process)
        return process

    def kill(self) -> None:
        """Lose power: the network is silent before the processes end, so nobody is told."""
        self.cut()
        self.end()

    def restart(self) -> None:
        """Come back after `kill` with the same name and address, and nothing in /tmp and /dev/shm."""
        self.boot()
        self.heal()

    def cut(self, *others: Node) -> None:
        """Drop what this node and `others` (if none are named: all) send each other."""
        for other in others or self._cluster.nodes:
            if other is not self and other.is_up:
                self._cluster.drop(self, other)
                self._cluster.drop(other, self)

    def cut_incoming(self, *others: Node) -> None:
        """Drop what this node gets from `others` (if none are named: from all). What it sends arrives."""
        for other in others or self._cluster.nodes:
            if other is not self:
                self._cluster.drop(other, self)

    def heal(self) -> None:
        """Undo all cuts between this node and others."""
        self._cluster.heal(self)

    def start_ray(self, num_cpus: int, env: dict[str, str] | None = None) -> None:
        """Join the cluster's Ray; the first node is its head. Ray ends with the node, or with stop_ray.

        env: variables that Ray and its tasks get here.
        """
        head = self._cluster.nodes[0]
        where = [f"--address={head.address}:{RAY_PORT}"]
        if head is self:
            where = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false", "--disable-usage-stats"]
        here = [f"--node-ip-address={self.address}", f"--num-cpus={num_cpus}", "--num-gpus=0"]
        self.run([*_RAY, "start", *where, *here, "--object-store-memory=100000000"], env=env)

    def stop_ray(self) -> None:
        self.run([*_RAY, "stop", "--force"])

    def boot(self) -> None:
        assert not self.is_up, f"{self.name} is up"
        nodes = self._cluster.nodes
        hosts = "127.0.0.1 localhost\n" + "".join(f"{node.address} {node.name}\n" for node in nodes)
        installed = [self._cluster.shared, REPOSITORY, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()]
        boot = [*_WITH_PARENT, *_NODE, _BOOT, "boot", self.name, hosts, *installed]
        self._unshare, self._init = _held(boot)
        self._cluster.connect(self, self._init)
        self.configure(
            "link set lo up",
            f"address add {self.address}/24 dev eth0",
            "link set eth0 up",
            "route add default dev eth0",  # leads nowhere
            # Each node knows the others: a question about addresses that is dropped would be an error, not silence.
            *(f"neighbour add {node.address} lladdr {node.mac} dev eth0" for node in nodes if node is not self),
            "rule add preference 100 lookup local",  # after the rules that drop
            "rule delete preference 0",
        )

    def end(self) -> None:
        """End all processes, and wait until none is left."""
        assert self._unshare is not None
        ending = os.pidfd_open(self._init)
        try:
            self._cluster.disconnect(self)
            self._unshare.kill()
            self._unshare.communicate()
            if not select.select([ending], [], [], _ENDING_S)[0]:
                raise ClusterError(f"{self.name} has processes that do not end")
            while self._started:
                self._started.pop().wait()
        finally:
            os.close(ending)
            self._unshare = None
            self._cluster.forget_drops(self)

    def configure(self, *commands: str) -> None:
        """Run commands of `ip` in this node's network."""
        _ip(self._init, *commands)

    def _command(self, argv: Sequence[str | Path]) -> list[str]:
        assert self.is_up, f"{self.name} is down"
        enter = ["nsenter", f"--target={self._init}", "--mount", "--uts", "--ipc", "--net", "--pid"]
        return [*_WITH_PARENT, *enter, *_WITH_PARENT, "env", "--chdir=/tmp", *map(str, argv)]


def _held(command: Iterable[str | Path]) -> tuple[subprocess.Popen[str], int]:
    """Start a process that holds namespaces; returns it, and the process id that it prints when they are ready."""
    pipe = subprocess.PIPE
    holder = subprocess.Popen([*map(str, command)], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert holder.stdout is not None
    if line := holder.stdout.readline():
        return holder, int(line)
    raise ClusterError(holder.communicate()[1].strip())


def _ip(process: int, *commands: str) -> None:
    """Run commands of `ip` in the network of a process."""
    _run(["nsenter", f"--target={process}", "--net", "ip", "-batch", "-"], timeout_s=30.0, stdin="\n".join(commands))


def _run(command: Sequence[str], *, timeout_s: float, env: dict[str, str] | None = None, stdin: str = "") -> str:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout_s, env=env, check=False)
    if done.returncode:
        said = f"{done.stdout}{done.stderr}".strip()
        raise ClusterError(f"{' '.join(command)} ended with {done.returncode}: {said}")
    return done.stdout


def _environment(more: dict[str, str] | None) -> dict[str, str]:
    """What a login on a node would set, and nothing of this process's tests."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    own = {"HOME": "/tmp", "PYTHONPATH": str(REPOSITORY), "RAY_USAGE_STATS_ENABLED": "0"}
    return kept | own | (more or {})
