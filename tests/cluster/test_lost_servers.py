"""Servers on nodes that are lost, or that a network cuts off, are fenced; they return, and the run loses nothing.

Each run has a server that stays and one that is lost. Their weights lie in the run directory, which all nodes see. Not
covered: networks that lose some packets, and nodes that hang but answer the network.
"""

from collections.abc import Callable, Iterator

import pytest
from nodes import Cluster
from paced_run import PacedRun, serve

from arl.api.events import ServerFenced, ServerReturned

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

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
