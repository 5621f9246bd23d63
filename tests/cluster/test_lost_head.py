"""What a run does when the head of its Ray cluster is lost: Ray itself does not go on without it.

Not covered: a head that keeps its state in Redis, which Ray offers, and which can restart.
"""

import re
from pathlib import Path

import pytest
from nodes import NOTICES_SOON, Cluster
from paced_run import PacedRun

from arl.api.events import RunBegan

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

LOSES_SOON = NOTICES_SOON | {"RAY_gcs_rpc_server_reconnect_timeout_s": "5"}
"""Ray's processes wait for a head that is lost for 5 s in place of a minute."""
TRAINER_ENDED = "while pgrep --full 'arl[.]object_process' > /dev/null; do sleep 0.1; done"


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
