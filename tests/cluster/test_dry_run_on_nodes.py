"""`--dry-run` on a cluster finds what differs between its machines, and leaves nothing on them."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nodes import REPOSITORY, Cluster, ClusterError

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SCRIPT = "import arl; arl.run_script(None, arl.Config)"
OTHER_CLOCK = "import time; true = time.time; time.time = lambda: true() + 7200\n"
WITHOUT_ARL = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "arl":
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Missing())
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The driver is on node-1, ranks have room on node-2, servers are on node-3."""
    with Cluster(3, shared=tmp_path_factory.mktemp("shared")) as cluster:
        cluster.start_ray(num_cpus=[0, 2, 0])
        yield cluster


def dry_run(cluster: Cluster, *flags: str | Path) -> dict[str, Any]:
    """The record that it prints on node-1."""
    own = ["--model", "none", "--train.num_ranks", "2", "--train.ray_address", "auto", "--log.format", "json"]
    command = ["sh", "-c", '"$@" || test $? = 1', "sh", sys.executable, "-c", SCRIPT, "--dry-run", *own, *flags]
    return json.loads(cluster.nodes[0].run(command, timeout_s=120).splitlines()[-1])


def test_nodes_that_fit_have_no_mistakes_and_keep_nothing(cluster: Cluster) -> None:
    said = dry_run(cluster, "--run_dir", cluster.shared / "a" / "run")
    assert (said["mistakes"], said["warnings"]) == ([], [])
    ranks = [(part["name"], part["host"], part["address"]) for part in said["parts"] if part["part"] == "trainer"]
    assert ranks == [("policy rank 0", "node-2", "10.77.0.2"), ("policy rank 1", "node-2", "10.77.0.2")]
    assert said["shared"][0]["seen"] == {"node-2": "yes"}
    assert list(cluster.shared.iterdir()) == []
    for node in cluster.nodes:
        assert "NodeProbe" not in node.run(["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"])


def test_a_server_that_does_not_reach_rank_0_is_a_mistake(cluster: Cluster) -> None:
    _, ranks, server = cluster.nodes
    to_server = ["--engine.kind", "sglang", "--engine.addresses", "http://node-3:30000"]
    to_server += ["--weights.transport", "distributed", "--run_dir", str(cluster.shared / "run")]
    (silent,) = dry_run(cluster, *to_server)["mistakes"]
    assert silent.startswith("http://node-3:30000/model_info could not be reached")
    ranks.cut_incoming(server)
    try:
        network = dry_run(cluster, *to_server)["mistakes"]
    finally:
        ranks.heal()
    assert len(network) == 2
    (cut,) = [mistake for mistake in network if "reach each other" in mistake]
    assert cut.startswith("http://node-3:30000 on node-3 and rank 0 on node-2 do not reach each other (at 10.77.0.2: ")


def test_a_real_start_finds_the_same_before_it_loads_anything(cluster: Cluster) -> None:
    script = (
        "from arl.api.settings.run import Config; from arl.run.learner import host_learner; "
        "host_learner(Config(model='none', run_dir='/tmp/own/run', train={'num_ranks': 2, 'ray_address': 'auto'}), "
        "looks_at_nodes=True)"
    )
    with pytest.raises(ClusterError, match=r"ConfigError: /tmp/own/run \(run_dir\) is not seen on node-2"):
        cluster.nodes[0].run([sys.executable, "-c", script], timeout_s=120)


def test_other_clocks_and_versions_are_found(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    shared = tmp_path_factory.mktemp("shared")
    clock, old, none = (shared / name for name in ("clock", "old", "none"))
    for directory in (clock, old / "arl_train-0.0.1.dist-info", none):
        directory.mkdir(parents=True)
    (clock / "sitecustomize.py").write_text(OTHER_CLOCK)
    metadata = "Metadata-Version: 2.1\nName: arl-train\nVersion: 0.0.1\n"
    (old / "arl_train-0.0.1.dist-info" / "METADATA").write_text(metadata)
    (none / "sitecustomize.py").write_text(WITHOUT_ARL)
    with Cluster(4, shared=shared) as cluster:
        cluster.start_ray(num_cpus=[0])
        for node, changed in zip(cluster.nodes[1:], (clock, old, none), strict=True):
            node.start_ray(1, env={"PYTHONPATH": f"{changed}:{REPOSITORY}"})
        said = dry_run(cluster, "--run_dir", shared / "run", "--train.num_ranks", "3")
    late, other, missing = sorted(said["mistakes"], key=lambda text: text[text.index("node-") :])
    assert late.startswith("the clock of node-2 is 7200 s ahead of this machine's")
    assert other.startswith("node-3 has arl 0.0.1, this machine ")
    assert missing.startswith("node-4 has no arl: install this version")
