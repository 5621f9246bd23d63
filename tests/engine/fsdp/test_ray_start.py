"""A Ray that a run starts listens to this machine only, leaves the process as it was, and ends with the run."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from light_rank import LightRank

from arl.api.errors import ConfigError, ModelError, TrainingError
from arl.api.settings.engines import TrainConfig
from arl.api.version import install_command
from arl.engine.fsdp import ray_engine
from arl.engine.fsdp.ray_cluster import Placement, RayLease, _as_ray_starts
from arl.engine.fsdp.ray_engine import RankRoom, RayTrainEngine

pytestmark = pytest.mark.timeout(300)  # Ray takes its time to start on a machine that has other things to do
LISTEN = "0A"
STOPPED_WITH_RAY = """
import asyncio, os, signal
from arl import Config
from arl.run.script import run_script
from arl.engine.fsdp.ray_cluster import RayLease

async def main(config):
    lease = await asyncio.to_thread(RayLease, None, num_cpus=1, num_gpus=0)
    os.kill(os.getpid(), signal.SIGTERM)
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(4)  # longer than the 3 s after which Ray's own handler aborts the process
        await asyncio.to_thread(lease.release)
        print("saved", flush=True)

run_script(main, Config, ["--model", "x"])
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where Ray writes. The name of tmp_path is too long for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="r-", dir="/tmp") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        monkeypatch.setenv("RAY_TMPDIR", directory)  # where `auto` looks for a cluster, and clusters are noted
        yield Path(directory)


def processes_of(directory: Path) -> list[Path]:
    """/proc entries of the processes whose command line names the directory, as those of Ray's daemons do."""
    found: list[Path] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(directory).encode() in (entry / "cmdline").read_bytes():
                found.append(entry)
        except OSError:
            continue  # it ended
    return found


def listening_at(process: Path) -> set[str]:
    """Local addresses, in hexadecimal, at which a process waits for connections."""
    targets = [os.readlink(fd) for fd in (process / "fd").iterdir() if fd.is_symlink()]
    inodes = {match[1] for target in targets if (match := re.fullmatch(r"socket:\[(\d+)\]", target))}
    rows = [line.split() for table in ("tcp", "tcp6") for line in (process / "net" / table).read_text().splitlines()]
    return {row[1].split(":")[0] for row in rows if row[3] == LISTEN and row[9] in inodes}


@pytest.fixture
def notices() -> Iterator[list[int]]:
    """The SIGTERMs that this process has received."""
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    yield received
    signal.signal(signal.SIGTERM, before)


@pytest.mark.runs
def test_without_a_model_nothing_stays_behind(
    tmp_path: Path, temporary: Path, notices: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))  # where the rank finds its module
    before = dict(os.environ)
    with _as_ray_starts(private=True):
        from arl.engine.fsdp import ranks
    monkeypatch.setattr(ranks, "RankActor", LightRank)
    with pytest.raises(ModelError, match="nowhere") as error:
        RayTrainEngine(tmp_path / "nowhere", TrainConfig())
    assert "on rank 0" in str(error.value.__cause__)
    assert dict(os.environ) == before
    os.kill(os.getpid(), signal.SIGTERM)
    assert notices == [signal.SIGTERM]
    assert processes_of(temporary) == []
    assert list(temporary.iterdir()) == []


@pytest.mark.runs
def test_a_running_ray_is_used_and_left_as_it_was(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    import ray  # before arl's own import of it, as in a notebook that uses Ray itself

    lease = RayLease(None, num_cpus=1, num_gpus=0)
    try:
        addresses = {address for process in processes_of(temporary) for address in listening_at(process)}
        loopback = {"0100007F", "0000000000000000FFFF00000100007F"}
        assert addresses
        assert addresses <= loopback

        monkeypatch.setattr(RayLease, "_holders", 0)  # as if it were someone else's
        monkeypatch.setattr(ray_engine, "START_TIMEOUT_S", 1.0)
        with pytest.raises(
            TrainingError, match=r"2 ranks need 1 CPU\(s\) each, and the Ray cluster has 1 of 1 CPUs free"
        ):
            RayTrainEngine(tmp_path, TrainConfig(num_ranks=2))
        monkeypatch.setattr(ray_engine, "_ROOM_TIMEOUT_S", 1.0)
        monkeypatch.setattr(ray_engine, "_REPLACE_TIMEOUT_S", 0.1)
        policy, both = (RankRoom(TrainConfig(num_ranks=2, min_ranks=1), num_engines=n) for n in (1, 2))
        assert policy.wait([2, 1]) == 1
        assert "training goes on with 1 rank(s) of 2, until the cluster has room" in caplog.text
        assert not policy.has(2, 0.1)
        assert policy.has(1, 60.0)  # once Ray has noticed that the places before are free
        monkeypatch.setattr(ray_engine, "_ROOM_TIMEOUT_S", 0.1)
        with pytest.raises(TrainingError, match=r"no room for 1 rank\(s\), the fewest of train.min_ranks"):
            both.wait([2, 1])
        for room in (policy, both):
            room.close()
        monkeypatch.undo()
        assert ray.is_initialized()
        assert ray.available_resources()["CPU"] == 1
    finally:
        lease.release()
    assert not ray.is_initialized()
    assert processes_of(temporary) == []


def test_the_most_ranks_start_that_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine, "_lease", lambda config: None)
    monkeypatch.setattr(ray_engine, "has_room", lambda bundles, timeout_s: len(bundles) < 4)
    room = RankRoom(TrainConfig(num_ranks=4, min_ranks=1), num_engines=1)
    assert room.wait([4, 2, 1]) == 2


def test_starting_ray_never_unsets_variables_that_were_set_before(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CHANGED", "before")
    before, unset = dict(os.environ), list[bytes]()
    unsetenv = os.unsetenv
    monkeypatch.setattr(os, "unsetenv", lambda name: (unset.append(name), unsetenv(name)))
    with _as_ray_starts(private=True):
        os.environ.update(CHANGED="by Ray", ADDED="by Ray")
    assert dict(os.environ) == before
    assert b"ADDED" in unset
    assert {os.fsdecode(name) for name in unset}.isdisjoint(before)


def test_without_ray_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape(install_command("ray"))):
        RayTrainEngine(tmp_path, TrainConfig(num_ranks=2))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "auto"])
def test_a_missing_cluster_is_an_error_with_its_address(tmp_path: Path, address: str):
    with pytest.raises(ConfigError, match=f"ray_address={address}"):
        RayTrainEngine(tmp_path, TrainConfig(num_ranks=2, ray_address=address))


@pytest.mark.slow
def test_rank_0_is_on_this_node_where_there_is_room(temporary: Path):
    from ray.cluster_utils import Cluster

    lease = None
    (temporary / "ray").mkdir()  # Ray notes its address in it and does not make it
    cluster = Cluster(True, head_node_args={"num_cpus": 1, "include_dashboard": False, "temp_dir": str(temporary)})
    try:
        cluster.add_node(num_cpus=2, node_ip_address="127.0.0.2")
        cluster.wait_for_nodes()
        lease = RayLease(cluster.address, num_cpus=2, num_gpus=0)
        deadline = time.monotonic() + 30
        here = Placement(2, num_cpus=1, num_gpus=0, deadline=deadline)
        assert here.address != "127.0.0.2"  # though both have room there
        elsewhere = Placement(1, num_cpus=1, num_gpus=0, deadline=deadline)
        assert elsewhere.address == "127.0.0.2"
    finally:
        if lease:
            lease.release()
        cluster.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["killed", "without closing"])
def test_a_process_takes_its_ray_along(temporary: Path, end: str):
    script = (
        f"import tempfile; tempfile.tempdir = {str(temporary)!r}\n"
        "from arl.engine.fsdp.ray_cluster import Placement, RayLease\n"
        "RayLease(None, num_cpus=1, num_gpus=0)\n"
        "print('there', flush=True)\n"
        "input()\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        assert processes_of(temporary)
        if end == "killed":
            process.kill()
        else:
            process.communicate("\n")
            assert list(temporary.iterdir()) == []
    deadline = time.monotonic() + 60
    while processes_of(temporary) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert processes_of(temporary) == []
    RayLease(None, num_cpus=1, num_gpus=0).release()  # the next start
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_a_run_over_ray_that_gets_sigterm_cleans_up_for_as_long_as_it_takes():
    command = [sys.executable, "-c", STOPPED_WITH_RAY]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (ended.stdout, ended.returncode) == ("saved\n", 143), ended.stderr
    assert (
        ended.stderr == "stopped by SIGTERM; the same command continues from its newest checkpoint, if there is one\n"
    )
