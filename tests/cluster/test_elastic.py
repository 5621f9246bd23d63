"""A run that loses a node goes on with the ranks that there are, and with all of them when the node is back."""

import re
from pathlib import Path

import pytest
from nodes import NOTICES_SOON, Cluster
from paced_run import PacedRun

from arl.api.events import ProcessRestarted, ServerFenced, TrainerRecovered

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


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
