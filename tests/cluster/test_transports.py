"""Trainings whose driver, ranks and server have nodes of their own, with each way for weights to travel.

The driver is on node-1, which has no CPUs for Ray, as a head node without GPUs; ranks are on node-2, the server is on
node-3. Weights are a tiny model's, over gloo on CPUs. Not covered: NCCL, stock SGLang servers, and NFS, which may show
files late.
"""

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from nodes import Cluster
from paced_run import PORT, PacedRun, serve, start_ready

from arl.api.events import RunBegan, ServerFenced, ServerLoaded

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

RANKS = {"num_ranks": 2, "ray_address": "auto"}
MIRROR_PORT = 30900


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(3, shared=tmp_path_factory.mktemp("shared")) as cluster:
        serve(cluster, cluster.nodes[2])
        cluster.start_ray(num_cpus=[0, 2])
        yield cluster


def begin(cluster: Cluster, name: str, *, steps: int = 3, port: int = PORT, **settings: Any) -> PacedRun:
    engine = {"kind": "sglang", "addresses": [f"http://10.77.0.3:{port}"], "update_timeout_s": 30}
    return PacedRun(cluster, cluster.nodes[0], name, steps=steps, engine=engine, **settings)


def start_mirror(cluster: Cluster) -> subprocess.Popen[bytes]:
    log = cluster.shared / "mirror.log"
    return start_ready(cluster.nodes[2], "arl.engine.weights.mirror", "--port", str(MIRROR_PORT), log=log)


@pytest.mark.parametrize(
    ("weights", "train"),
    [
        ({}, {}),
        ({"transport": "distributed"}, {}),
        ({"transport": "adapter"}, {"lora": {"rank": 2}}),
        ({"transport": "delta", "mirrors": {f"http://10.77.0.3:{PORT}": f"http://10.77.0.3:{MIRROR_PORT}"}}, {}),
    ],
    ids=["disk", "distributed", "adapter", "delta"],
)
def test_a_run_trains_with_weights_that_travel_by(cluster: Cluster, weights: dict[str, Any], train: dict[str, Any]):
    transport = weights.get("transport", "disk")
    if transport == "delta":
        start_mirror(cluster)
    port = PORT
    if transport == "adapter":  # its server must hold the model that it was started with
        serve(cluster, cluster.nodes[2], port := PORT + 1)
    run = begin(cluster, transport, port=port, weights=weights, train=RANKS | train)
    run.train(2)
    written = list(run.directory.glob("weights/*/version-*"))
    assert bool(written) == (transport != "distributed")
    assert cluster.nodes[0].run(["ls", "/dev/shm"]) == ""  # the driver's own memory holds nothing that others need
    record = run.finish()
    system = [event for _, event in record.system]
    assert not any(isinstance(event, ServerFenced) for event in system), run.said
    assert [event.version for event in system if isinstance(event, ServerLoaded)][:3] == [0, 1, 2]
    assert list(run.directory.glob("weights/*")) == []


def test_a_run_that_ended_continues_with_its_ranks_on_other_nodes(cluster: Cluster):
    run = begin(cluster, "continues", steps=4, train=RANKS)
    run.train(2)
    run.process.kill()
    run.process.wait()
    _, second, third = cluster.nodes
    second.stop_ray()
    third.start_ray(2)
    run.start()
    began = [event.version for _, event in run.finish().system if isinstance(event, RunBegan)]
    assert began in ([0, 2], [0, 1])  # 1: it was killed before version 2 was saved


def test_a_driver_that_trains_by_itself_gives_servers_elsewhere_the_run_directory(cluster: Cluster):
    run = begin(cluster, "alone", steps=2)
    run.train(1)
    assert cluster.nodes[0].run(["ls", "/dev/shm"]) == ""
    run.finish()


def test_a_run_directory_that_the_server_does_not_see_is_an_error_that_says_what_to_set(cluster: Cluster):
    run = begin(cluster, "unseen", steps=2, run_dir="/tmp/own")
    said = run.fail()
    assert "If http://10.77.0.3:30000 does not see /tmp/own/weights/arl-weights-node-1-" in said
    assert "set run_dir or weights.directory to storage that both see, or weights.transport=distributed" in said
