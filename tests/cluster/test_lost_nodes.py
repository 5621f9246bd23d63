"""Runs that lose nodes: of ranks, of servers, and the head of the Ray cluster.

Not covered: networks that lose some packets, nodes that hang but answer the network, and a head that keeps its state in
Redis, which Ray offers, and which can restart.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from nodes import NOTICES_SOON, Cluster
from paced_run import PacedRun, serve

from arl.api.events import ProcessRestarted, RunBegan, ServerFenced, ServerReturned, TrainerRecovered

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

LOSES_SOON = NOTICES_SOON | {"RAY_gcs_rpc_server_reconnect_timeout_s": "5"}
"""Ray's processes wait for a head that is lost for 5 s in place of a minute."""
TRAINER_ENDED = "while pgrep --full 'arl[.]object_process' > /dev/null; do sleep 0.1; done"


def test_a_run_goes_on_with_fewer_ranks_when_a_node_is_lost_and_with_all_when_it_is_back(tmp_path: Path) -> None:
    with Cluster(2, shared=tmp_path) as cluster:
        here, other = cluster.nodes
        here.start_ray(1, env=NOTICES_SOON)
        other.start_ray(1)
        train = {"num_ranks": 2, "min_ranks": 1, "ray_address": "auto"}
        run = PacedRun(cluster, here, "run", steps=7, train=train, checkpoint={"every": 2})
        run.train(3)
        other.kill()
        run.train(5)
        other.restart()
        other.start_ray(1)
        record = run.finish()
    counts = {int(version): int(count) for version, count in re.findall(r"trained (\d+) on (\d+) ranks", run.said)}
    assert [counts[version] for version in (1, 2, 3, 5, 7)] == [2, 2, 2, 1, 2], counts
    system = [event for _, event in record.system]
    assert [event.num_ranks for event in system if isinstance(event, TrainerRecovered)] == [1, 2]
    assert not any(isinstance(event, ServerFenced | ProcessRestarted) for event in system), "servers were disturbed"


def test_a_run_whose_head_restarts_ends_with_an_error_and_the_same_command_continues(tmp_path: Path):
    with Cluster(2, shared=tmp_path) as cluster:
        head, other = cluster.nodes
        head.start_ray(0, env=LOSES_SOON)
        other.start_ray(2, env=LOSES_SOON)
        train = {"num_ranks": 2, "ray_address": "auto"}
        run = PacedRun(cluster, other, "run", steps=4, env=LOSES_SOON, train=train)
        run.train(2)
        head.kill()
        head.restart()  # without Ray: it refuses connections
        other.run(["sh", "-c", TRAINER_ENDED], timeout_s=90)  # as all of a lost head's processes do
        said = run.fail()
        assert "the trainer's process ended" in said
        assert re.search("there is no Ray cluster|GCS", said), said  # Ray's own name for what runs on the head
        other.kill()  # what is left of Ray does not join a new head
        other.restart()
        head.start_ray(0)
        other.start_ray(2)
        run.start()
        began = [event.version for _, event in run.finish().system if isinstance(event, RunBegan)]
        assert began in ([0, 2], [0, 1])  # 1: the head was lost before version 2 was saved


FAULTS: dict[str, Callable[[Cluster], None]] = {
    "the node loses power": lambda cluster: cluster.nodes[2].kill(),
    "the network is cut": lambda cluster: cluster.nodes[2].cut(cluster.nodes[0]),
    "answers are lost": lambda cluster: cluster.nodes[0].cut_incoming(cluster.nodes[2]),
    "requests are lost": lambda cluster: cluster.nodes[2].cut_incoming(cluster.nodes[0]),
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Without Ray: the driver trains on node-1, and nodes 2 and 3 have servers."""
    with Cluster(3, shared=tmp_path_factory.mktemp("shared")) as cluster:
        for node in cluster.nodes[1:]:
            serve(cluster, node)
        yield cluster


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_is_lost_is_fenced_and_returns(cluster: Cluster, fault: str):
    last = cluster.nodes[2]
    addresses = [f"http://{node.address}:30000" for node in cluster.nodes[1:]]
    run = PacedRun(
        cluster,
        cluster.nodes[0],
        fault.replace(" ", "-"),
        steps=6,
        engine={"kind": "sglang", "addresses": addresses, "update_timeout_s": 5, "request_timeout_s": 60},
    )
    run.train(2)
    FAULTS[fault](cluster)
    run.train(4)
    run.until(lambda: f"{addresses[1]} is fenced" in run.said, "the server was not fenced")
    if last.is_up:
        last.heal()
    else:
        last.restart()
        serve(cluster, last)
    run.until(lambda: f"{addresses[1]} serves again" in run.said, "the server did not return")
    record = run.finish()
    told = [event for _, event in record.system if isinstance(event, ServerFenced | ServerReturned)]
    assert {event.server for event in told} == {addresses[1]}
    assert isinstance(told[0], ServerFenced)
    assert isinstance(told[-1], ServerReturned)
