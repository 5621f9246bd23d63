"""Ranks on another node: what they write lies where this node sees it, or an error names the place."""

import sys
from pathlib import Path

import pytest
from nodes import Cluster
from paced_run import model_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]

ON_A_NODE_WITHOUT_CPUS = """
import sys
from pathlib import Path
import pytest
from arl.api.settings.engines import DiskWeightsConfig, TrainConfig
from arl.api.errors import ConfigError, TransportError
from arl.engine.fsdp.ray_engine import RayTrainEngine
from arl.engine.weights.disk import DiskTransport

if __name__ == "__main__":
    model, shared, hidden = map(Path, sys.argv[1:])
    engine = RayTrainEngine(model, TrainConfig(num_ranks=2, ray_address="auto"))
    transport = DiskTransport(DiskWeightsConfig(), shared / "run", engine)
    assert transport.directory.parent == shared / "run" / "weights"  # /dev/shm is not shared
    written = transport.write(engine.snapshot(), None)
    assert (written.directory / "model.safetensors").stat().st_size > 0
    transport.close()
    elsewhere = f"rank 0, on 10.77.0.2, does not see {hidden}"
    with pytest.raises(TransportError, match=rf"{elsewhere}.*set weights.directory to a place"):
        DiskTransport(DiskWeightsConfig(directory=hidden), shared / "run", engine)
    with pytest.raises(ConfigError, match=rf"{elsewhere}.*set run_dir to storage that all nodes share"):
        engine.check_shares(hidden)
    with pytest.raises(TransportError, match=rf"{elsewhere}.*choose a directory that both see"):
        engine.export(hidden / "exported")
    assert list(hidden.iterdir()) == []
    assert engine.export(shared / "exported") > 0
    engine.check_shares(shared)
    engine.close()
"""


def test_what_ranks_of_another_node_write_lies_where_this_one_sees_it(tmp_path: Path):
    with Cluster(2, shared=tmp_path) as cluster:
        cluster.start_ray(num_cpus=[0, 2])
        script = tmp_path / "script.py"
        script.write_text(ON_A_NODE_WITHOUT_CPUS)
        cluster.nodes[0].run([sys.executable, script, model_of(cluster), tmp_path, "/tmp/hidden"], timeout_s=120)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["exported", "model", "run", "script.py"]
