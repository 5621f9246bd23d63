"""The script that works by ssh, between three nodes with real ssh servers."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from described_runs import described, said, trained, wait_until
from nodes import Cluster, Node

from arl.cluster.description import SshDescription
from arl.cluster.ssh import ssh_script

SSHD = "/usr/sbin/sshd"
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not Path(SSHD).exists(), reason="there is no sshd: make cluster-packages"),
]
OTHER_ARL = "import arl.api.installing; arl.api.installing.__version__ = '99.0'\n"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Three nodes, each of which lets the holder of shared/key in."""
    for name in ("key", "host"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    options = ["UsePAM no", "StrictModes no", "PidFile none", "PermitRootLogin prohibit-password"]
    own = [f"HostKey {tmp_path}/host", f"AuthorizedKeysFile {tmp_path}/key.pub"]
    (tmp_path / "sshd_config").write_text("\n".join([*options, *own, ""]))
    os.makedirs("/run/sshd", exist_ok=True)
    with Cluster(3, shared=tmp_path) as cluster:
        for node in cluster.nodes:
            node.start([SSHD, "-D", "-e", "-f", tmp_path / "sshd_config"], log=tmp_path / f"sshd-{node.name}.log")
            node.run(["sh", "-c", "until ss --listening --tcp --numeric | grep --quiet :22; do sleep 0.05; done"])
        yield cluster


def write_script(shared: Path, **changes: Any) -> Path:
    key = ["-i", str(shared / "key"), "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]
    hosts = {"hosts": ["node-1", "node-2", "node-3"], "ssh_options": [*key, "-o", "LogLevel=ERROR"]}
    changes.setdefault("servers", {"kind": "embedded", "nodes": 2, "restarts": 1, "startup_s": 60})
    script = shared / "sums.sh"
    description = described(shared, "ssh", **hosts, **changes)
    assert isinstance(description, SshDescription)
    script.write_text(ssh_script(description))
    return script


def start(node: Node, script: Path, log: Path) -> subprocess.Popen[bytes]:
    return node.start(["bash", script], log=log)


def left_on(node: Node) -> list[str]:
    """What a run has left on a node: its processes, and its files in /tmp."""
    processes = node.run(["ps", "-A", "-o", "args="]).splitlines()
    files = [f"/tmp/{name}" for name in node.run(["ls", "/tmp"]).split() if name.startswith("arl-sums")]
    return [line for line in processes if "arl." in line or "agent_script" in line or "ray" in line] + files


def test_a_run_over_three_hosts_trains_and_leaves_nothing_behind(cluster: Cluster):
    shared, log = cluster.shared, cluster.shared / "log"
    (shared / "run").mkdir()
    (shared / "run" / "servers.txt").write_text("http://10.77.0.9:1\n")  # of an earlier start
    process = start(cluster.nodes[0], write_script(shared, steps=12), log)
    wait_until(lambda: trained(log), log)
    cluster.nodes[2].run(["pkill", "-KILL", "-f", "^[^ ]*python -m arl.engine.local"])
    assert process.wait(120) == 0, said(log)
    assert trained(log) == list(range(1, 13))
    assert "server 0 on node-3 ended with code 137; it starts again (1 of 1)" in said(
        shared / "run" / "logs" / "launch" / "servers-node-3.log"
    )
    assert [left for node in cluster.nodes for left in left_on(node)] == []
    assert list(shared.glob("run-keys*")) == []


def test_trainers_on_two_hosts_are_ranks_of_one_ray(cluster: Cluster):
    shared, log = cluster.shared, cluster.shared / "log"
    servers = {"kind": "embedded", "nodes": 1, "startup_s": 60}
    script = write_script(shared, steps=4, trainer={"nodes": 2, "cpus_per_node": 1}, servers=servers, transport="delta")
    assert start(cluster.nodes[0], script, log).wait(150) == 0, said(log)
    assert trained(log) == [1, 2, 3, 4]
    wait_until(lambda: not any(left_on(node) for node in cluster.nodes), log)


def test_what_a_killed_script_started_writes_a_checkpoint_and_ends(cluster: Cluster):
    shared, log = cluster.shared, cluster.shared / "log"
    process = start(cluster.nodes[0], write_script(shared), log)
    wait_until(lambda: len(trained(log)) >= 2, log)
    process.kill()
    wait_until(lambda: not any(left_on(node) for node in cluster.nodes), log)
    end = json.loads((shared / "run" / "END.json").read_text())
    assert (end["how"], end["signal"]) == ("interrupted", "SIGTERM")
    assert end["version"] >= 2
    assert end["checkpoint"] is not None


def test_stop_from_elsewhere_is_as_ctrl_c(cluster: Cluster):
    shared, log = cluster.shared, cluster.shared / "log"
    script = write_script(shared)
    process = start(cluster.nodes[0], script, log)
    wait_until(lambda: trained(log), log)
    cluster.nodes[1].run(["bash", script, "stop"])
    assert process.wait(90) == 143, said(log)
    assert [left for node in cluster.nodes for left in left_on(node)] == []


def test_hosts_without_the_packages_or_with_others_are_named_before_anything_starts(cluster: Cluster):
    shared, log = cluster.shared, cluster.shared / "log"
    other = shared / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text(OTHER_ARL)
    first, second, _ = cluster.nodes
    for node, path in ((first, ""), (second, f"{other}:")):
        wrapper = f'#!/bin/sh\nPYTHONPATH={path}$PYTHONPATH exec {sys.executable} "$@"\n'
        (shared / node.name).write_text(wrapper)
        node.run(["install", "-D", shared / node.name, "/tmp/own/bin/python"])
    process = start(first, write_script(shared, python="/tmp/own/bin/python"), log)
    assert process.wait(90) == 1
    assert re.search(r"node-2 has python=[\d.]+,arl=99.0,.*, but node-1 has python=[\d.]+,arl=0", said(log))
    assert "node-3 cannot take part: " in said(log)
    assert "node-3 has no /tmp/own/bin/python" in said(log)
    assert "nothing was started" in said(log)
    assert list(shared.glob("run-keys*")) == []


def test_a_start_waits_for_who_trains_in_the_run_dir_and_says_who(cluster: Cluster):
    shared, log, second = cluster.shared, cluster.shared / "log", cluster.shared / "second"
    (shared / "run").mkdir()
    (shared / "run" / "run.lock").write_text('{"host": "node-9", "pid": 7, "since": "long ago"}')
    cluster.nodes[2].start(["flock", shared / "run" / "run.lock", "sleep", "999"], log=log)
    start(cluster.nodes[0], write_script(shared), second)
    wait_until(lambda: 'run.lock: {"host": "node-9"' in said(second), second)
    assert "waits for the end of the run that holds" in said(second)
    cluster.nodes[2].run(["pkill", "--full", "^sleep 999"])
    wait_until(lambda: "starts 2 servers" in said(second), second)


def test_the_keys_are_for_one_user_and_on_no_command_line(cluster: Cluster):
    shared, log = cluster.shared, cluster.shared / "log"
    start(cluster.nodes[0], write_script(shared), log)
    wait_until(lambda: trained(log), log)
    (keys,) = shared.glob("run-keys*")
    assert keys.stat().st_mode & 0o777 == 0o700
    secrets = {file.read_text().strip() for file in keys.iterdir() if file.name in ("server", "mirror", "ray")}
    assert len(secrets) == 3
    assert {file.stat().st_mode & 0o777 for file in keys.iterdir() if file.name != "train.pid"} == {0o600}
    lines = "".join(node.run(["ps", "-A", "-o", "args="]) for node in cluster.nodes)
    assert "arl.engine.local" in lines
    assert [key for key in secrets if key in lines] == []
    texts = [file.read_bytes() for file in (shared / "run").rglob("*") if file.is_file()]
    assert [key for key in secrets if any(key.encode() in text for text in texts)] == []
