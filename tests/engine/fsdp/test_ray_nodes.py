"""Ranks on another machine: what they write lies where this machine sees it, or an error names the place.

The other machine is a Ray node in a mount namespace, with a /dev/shm and a directory of its own.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from train_models import write_model

from arl.api.engine_config import DiskWeightsConfig, TrainConfig
from arl.api.errors import ConfigError, TransportError
from arl.engine.fsdp.ray_engine import RayTrainEngine
from arl.engine.weights.disk import DiskTransport

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def hidden() -> Iterator[Path]:
    """A directory of which each of the two machines has its own."""
    with tempfile.TemporaryDirectory(prefix="r-", dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture
def cluster(hidden: Path) -> Iterator[str]:
    """The address of a Ray cluster whose other machine alone has CPUs."""
    if shutil.which("unshare") is None or subprocess.call(["unshare", "-m", "true"], stderr=subprocess.DEVNULL):
        pytest.skip("this user cannot make mount namespaces here")
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="r-", dir="/tmp") as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", directory)
        Path(directory, "ray").mkdir()  # Ray notes its address in it and does not make it
        # Ray takes 127.0.0.1 for its machine's outer address. Where arl has imported it, it listens at loopback alone.
        here = {"node_ip_address": "127.0.0.3", "num_cpus": 0, "include_dashboard": False, "temp_dir": directory}
        cluster = Cluster(True, head_node_args=here)
        start = f"{sys.executable} -m ray.scripts.scripts start --block --address={cluster.address} --num-cpus=2"
        start += " --node-ip-address=127.0.0.2 --object-store-memory=100000000"
        mounts = f"mount -t tmpfs none /dev/shm && mount -t tmpfs none {hidden}"
        environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
        node = subprocess.Popen(["unshare", "-m", "sh", "-c", f"{mounts} && exec {start}"], env=environment)
        try:
            yield cluster.address
        finally:
            node.terminate()
            node.wait(60)
            cluster.shutdown()


def test_what_ranks_of_another_machine_write_lies_where_this_one_sees_it(cluster: str, hidden: Path, tmp_path: Path):
    engine = RayTrainEngine(write_model(tmp_path / "model"), TrainConfig(num_ranks=2, ray_address=cluster))
    try:
        transport = DiskTransport(DiskWeightsConfig(), tmp_path / "run", engine)  # /dev/shm is not shared
        assert transport.directory.parent == tmp_path / "run" / "weights"
        written = transport.write(engine.snapshot(), None)
        assert (written.directory / "model.safetensors").stat().st_size > 0
        transport.close()
        elsewhere = f"rank 0, on 127.0.0.2, does not see {hidden}"
        with pytest.raises(TransportError, match=rf"{elsewhere}.*set weights\.directory to a place"):
            DiskTransport(DiskWeightsConfig(directory=hidden), tmp_path / "run", engine)
        with pytest.raises(ConfigError, match=rf"{elsewhere}.*set run_dir to storage that all nodes share"):
            engine.check_shares(hidden)
        with pytest.raises(TransportError, match=rf"{elsewhere}.*choose a directory that both see"):
            engine.export(hidden / "exported")
        assert list(hidden.iterdir()) == []
        assert engine.export(tmp_path / "exported") > 0
        engine.check_shares(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["exported", "model", "run"]
    finally:
        engine.close()
