"""What the pods of the manifests run, on nodes in namespaces: a preempted trainer's next pod continues its run."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from described_runs import PYTHON, described, said, trained, wait_until
from nodes import REPOSITORY, Cluster, Node

from arl.cluster.description import KubernetesDescription
from arl.cluster.kubernetes import manifests

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]
SECRETS = {"server": "the key of servers", "mirror": "the key of mirrors"}


class Pods:
    """Nodes as pods of a run: node-1 and node-2 can hold its trainer, node-3 its server."""

    def __init__(self, cluster: Cluster, **changes: Any) -> None:
        shared = cluster.shared
        needs = {"cpus_per_server": 1, "memory_gb": 1}
        content = {
            "image": "arl",
            "volume": {"claim": "shared", "path": str(shared)},
            "trainer": {"cpus_per_node": 1, "memory_gb": 1, **changes.pop("trainer", {})},
            "servers": {"kind": "embedded", "startup_s": 90, **needs},
        }
        description = described(shared, "kubernetes", **content, **changes)
        assert isinstance(description, KubernetesDescription)
        self._shared = shared
        self._documents = list(yaml.safe_load_all(manifests(description)))
        (scripts,) = (document["data"] for document in self._documents if document["kind"] == "ConfigMap")
        for name, text in scripts.items():
            (shared / name).write_text(text)
        *self.trainers, self.server = cluster.nodes
        for node in self.trainers:  # as the cluster's DNS would
            name = "sums-servers-0.sums-servers"
            node.run(["sh", "-c", f"echo {self.server.address} {name} >>/etc/hosts"])

    def container(self, name: str) -> dict[str, Any]:
        return next(found for document in self._documents for found in containers(document) if found["name"] == name)

    def start(self, name: str, node: Node, log: Path, command: list[str] | None = None) -> subprocess.Popen[bytes]:
        """Run a container's command, or another one with its variables."""
        container = self.container(name)
        env = {"PATH": f"{PYTHON.parent}:/usr/bin:/bin:/usr/sbin:/sbin"}
        for variable in container["env"]:
            source = variable.get("valueFrom")
            env[variable["name"]] = SECRETS[source["secretKeyRef"]["key"]] if source else variable["value"]
        return node.start(self._here(command or container["command"]), log=log, env=env)

    def _here(self, command: list[str]) -> list[str]:
        return [word.replace("/arl-scripts", str(self._shared)) for word in command]

    def stop(self, node: Node) -> None:
        """What Kubernetes runs before it ends the head of a Ray cluster; returns when it is done."""
        node.run(self._here(self.container("trainer")["lifecycle"]["preStop"]["exec"]["command"]), timeout_s=90)


def containers(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, list):
        for one in value:
            yield from containers(one)
    elif isinstance(value, dict):
        yield from value.get("containers", ())
        for one in value.values():
            yield from containers(one)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(3, shared=tmp_path) as cluster:
        yield cluster


def test_a_pod_that_replaces_a_preempted_one_waits_for_its_checkpoint_and_continues(cluster: Cluster):
    shared = cluster.shared
    first, second = shared / "first", shared / "second"
    pods = Pods(cluster, transport="delta")
    pods.start("server", pods.server, shared / "server")
    pods.start("mirror", pods.server, shared / "mirror")
    old = pods.start("trainer", pods.trainers[0], first)
    wait_until(lambda: len(trained(first)) >= 2, first)
    pods.start("trainer", pods.trainers[1], second)
    wait_until(lambda: "waits for the end of the run" in said(second), second)
    assert '"host": "node-1"' in said(second)
    pods.trainers[0].run(["pkill", "-TERM", "--full", "^bash .*/train.sh"])  # as Kubernetes: the container's process 1
    assert old.wait(90) == 143, said(first)
    wait_until(lambda: trained(second), second)
    assert trained(second)[0] > trained(first)[-1]


def test_before_rays_head_ends_the_training_script_writes_its_checkpoint(cluster: Cluster):
    shared, log = cluster.shared, cluster.shared / "log"
    pods = Pods(cluster, trainer={"nodes": 2}, ray_version="2.60.0")
    script = (shared / "train.sh").read_text()
    for flag in ("--train.num_ranks 2", "--train.ray_address auto"):  # Ray has tests of its own
        assert flag in script
        script = script.replace(flag, "")
    (shared / "train.sh").write_text(script)
    pods.start("server", pods.server, shared / "server")
    job = pods.start("trainer", pods.trainers[0], log, ["bash", "/arl-scripts/train.sh"])
    wait_until(lambda: trained(log), log)
    pods.stop(pods.trainers[0])
    end = json.loads((shared / "run" / "END.json").read_text())
    assert (end["how"], end["signal"]) == ("interrupted", "SIGTERM")
    assert end["checkpoint"] is not None
    assert job.wait(30) == 143
    pods.stop(pods.trainers[1])  # a head on which nothing was started ends at once


def test_servers_and_mirrors_of_pods_answer_their_probes_and_need_their_keys(cluster: Cluster):
    shared = cluster.shared
    pods = Pods(cluster, transport="delta")
    ask = "import sys, urllib.request as r; print(r.urlopen(r.Request(sys.argv[1], headers={'X': 'y'})).status)"
    for name, probe, open_path, closed_path in (
        ("server", "livenessProbe", "/health", "/get_model_info"),
        ("mirror", "readinessProbe", "/health", "/version"),
    ):
        pods.start(name, pods.server, shared / name)
        container = pods.container(name)
        port = next(
            port["containerPort"] for port in container["ports"] if port["name"] == name.replace("server", "http")
        )
        assert container[probe]["httpGet"]["path"] == open_path
        url = f"http://{pods.server.address}:{port}"
        wait_until(lambda: "ready" in said(shared / name), shared / name)  # noqa: B023 - called within the loop
        assert pods.trainers[0].run([PYTHON, "-c", ask, url + open_path]) == "200\n"
        with pytest.raises(Exception, match="401"):
            pods.trainers[0].run([PYTHON, "-c", ask, url + closed_path])


def test_the_scripts_find_the_sources(cluster: Cluster):
    """The environment of the description reaches every container."""
    for name in ("server", "trainer"):
        variables = {one["name"]: one.get("value") for one in Pods(cluster).container(name)["env"]}
        assert variables["PYTHONPATH"] == str(REPOSITORY)
