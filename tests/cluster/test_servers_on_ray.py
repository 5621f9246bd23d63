"""Servers that arl starts on the nodes of a Ray cluster, where its scheduler places them beside ranks.

Servers are embedded ones, on CPUs. Not covered: GPUs, and SGLang.
"""

import re
from pathlib import Path

import pytest
from nodes import NOTICES_SOON, Cluster
from paced_run import PacedRun

from arl.api.events import ProcessRestarted, RunPlaced, ServerFenced
from arl.engine.client.servers_file import read_state
from arl.observe.events.run_record import RunRecord

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

UNTIL_SERVERS_ENDED = "while pgrep --full 'arl[.]engine[.]local|[S]erverActor' > /dev/null; do sleep 0.1; done"
ON_RAY = {"kind": "local", "num_servers": 2, "on_ray": True, "startup_timeout_s": 90}


def begin(cluster: Cluster, steps: int) -> PacedRun:
    train = {"num_ranks": 2, "ray_address": "auto"}
    return PacedRun(cluster, cluster.nodes[0], "run", steps=steps, train=train, engine=ON_RAY)


def placed(run: PacedRun) -> RunPlaced:
    records = [record for _, record in RunRecord(run.directory).files.new_records()]
    (table,) = [record for record in records if isinstance(record, RunPlaced)]
    return table


def serving(run: PacedRun) -> set[str]:
    """The addresses of its servers."""
    state = read_state(run.directory)
    assert state is not None
    return {row.address for row in state.servers if row.state == "serving"}


def test_ray_places_servers_and_ranks_and_a_server_that_dies_is_started_again(tmp_path: Path) -> None:
    with Cluster(3, shared=tmp_path) as cluster:
        cluster.start_ray(num_cpus=[2, 2, 0])
        run = begin(cluster, 6)
        run.train(2)
        parts = placed(run).parts
        hosts = {kind: {part.host for part in parts if part.part == kind} for kind in ("trainer", "server")}
        assert hosts == {"trainer": {"node-1"}, "server": {"node-2"}}, "ranks belong beside the controller"
        assert all(re.match(r"http://10\.77\.0\.2:\d+$", part.address) for part in parts if part.part == "server")
        cluster.nodes[1].run(["pkill", "-KILL", "--oldest", "--full", "arl[.]engine[.]local"])
        logs = run.directory / "logs"
        run.until(lambda: sum(log.read_text().count('"ready"') for log in logs.glob("server-*.log")) == 3, "no restart")
        run.train(4)
        first = serving(run)
        cluster.nodes[0].run(["pkill", "-KILL", "--full", "arl[.]object_process.*ray-servers"])  # as a lost head does
        run.until(lambda: len(serving(run) - first) == 2, "the servers got no other places")
        record = run.finish()
        restarted = [event for _, event in record.system if isinstance(event, ProcessRestarted)]
        assert len(restarted) == 3
        assert "SIGKILL" in restarted[0].how
        cluster.nodes[1].run(["sh", "-c", UNTIL_SERVERS_ENDED])


def test_servers_of_a_lost_node_get_another_place(tmp_path: Path) -> None:
    with Cluster(3, shared=tmp_path) as cluster:
        first, second, third = cluster.nodes
        first.start_ray(2, env=NOTICES_SOON)
        second.start_ray(2)
        run = begin(cluster, 6)
        run.train(2)
        third.start_ray(2)
        second.kill()
        run.until(lambda: sum("10.77.0.3" in address for address in serving(run)) == 2, "no servers moved")
        run.train(4)
        record = run.finish()
        fenced = {event.server for _, event in record.system if isinstance(event, ServerFenced)}
        assert all(server.startswith("http://10.77.0.2:") for server in fenced)
