"""The batch script, in a real Slurm of nodes in namespaces: it trains, is requeued, and continues."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from described_runs import described, said, trained, wait_until
from nodes import Cluster, ClusterError, Node

from arl.cluster.description import SlurmDescription
from arl.cluster.slurm import batch_script
from arl.training.run_files import read_jsonl

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
MISSING = [program for program in PROGRAMS if shutil.which(program) is None]
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(420),
    pytest.mark.skipif(bool(MISSING), reason=f"there is no {', '.join(MISSING)}: make cluster-packages"),
]
CONFIGURATION = """
ClusterName=arl
SlurmctldHost=node-1
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={munge}/socket
StateSaveLocation={shared}/state
SlurmdSpoolDir=/tmp/slurmd
SlurmctldPidFile=/tmp/slurmctld.pid
SlurmdPidFile=/tmp/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
NodeName=node-[1-{count}] CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""
FIRST = 1
"""The number of the first job of a Slurm."""


class Slurm:
    """One job's worth of it, on all nodes of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.shared, self._node = cluster.shared, cluster.nodes[0]
        self._environment = {"SLURM_CONF": str(self.shared / "slurm.conf")}
        self.log = self.shared / f"sums-{FIRST}.log"

    def start(self, nodes: list[Node]) -> None:
        conf, env = self.shared / "slurm.conf", self._environment
        self._node.start(["slurmctld", "-D", "-f", conf], log=self.shared / "slurmctld.log", env=env)
        wait_until(lambda: self._answers("scontrol", "ping"), self.shared / "slurmctld.log")
        for node in nodes:
            log = self.shared / f"slurmd-{node.name}.log"
            node.start(["slurmd", "-D", "-f", conf, "-N", node.name], log=log, env=env)
        idle = ["sh", "-c", "sinfo --noheader --format=%t | grep --line-regexp idle && ! sinfo | grep unk"]
        wait_until(lambda: self._answers(*idle), self.shared / "slurmd-node-1.log")

    def run(self, *command: str) -> str:
        return self._node.run(command, env=self._environment)

    def _answers(self, *command: str) -> bool:
        try:
            self.run(*command)
        except ClusterError:
            return False
        return True

    def submit(self, **changes: Any) -> None:
        description = described(self.shared, "slurm", time="10", **changes)
        assert isinstance(description, SlurmDescription)
        (self.shared / "sums.sbatch").write_text(batch_script(description))
        self.run("sbatch", f"--chdir={self.shared}", str(self.shared / "sums.sbatch"))

    def again(self) -> None:
        """Start a job that went back into the queue soon, not in two minutes; Slurm refuses to in the same second."""
        wait_until(lambda: "JobState=PENDING" in self.run("scontrol", "show", "job", str(FIRST)), self.log)
        self.run("scontrol", "update", f"JobId={FIRST}", "StartTime=now+4")


@contextmanager
def slurm_of(count: int, shared: Path) -> Iterator[Slurm]:
    munge = shared / "munge"
    munge.mkdir(mode=0o755)
    key = munge / "key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o600)
    files = [f"--{name}-file={munge}/{name}" for name in ("key", "pid", "log", "seed")]
    (shared / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    text = CONFIGURATION.format(munge=munge, shared=shared, count=count, cpus=os.cpu_count())
    (shared / "slurm.conf").write_text(text)
    daemon = ["setpriv", "--pdeathsig", "KILL", "munged", "--foreground", "--force", f"--socket={munge}/socket", *files]
    with subprocess.Popen(daemon, stderr=subprocess.DEVNULL) as munged, Cluster(count, shared=shared) as cluster:
        wait_until((munge / "socket").exists, munge / "log")
        try:
            slurm = Slurm(cluster)
            slurm.start(cluster.nodes)
            yield slurm
        finally:
            munged.terminate()


def continued_from(slurm: Slurm) -> int:
    """The first version that the job trained when it ran again. Each version has one line in metrics.jsonl."""
    versions = [row["version"] for row in read_jsonl(slurm.shared / "run" / "metrics.jsonl")]
    assert versions == list(range(1, len(versions) + 1))
    first, _, second = said(slurm.log).rpartition("trains; look at it with")
    assert "trained 1\n" in first
    return int(second.partition("trained ")[2].partition("\n")[0])


def test_a_requeued_job_waits_for_its_predecessor_and_continues_from_its_checkpoint(tmp_path: Path):
    with slurm_of(2, tmp_path) as slurm:
        slurm.submit(steps=14)
        wait_until(lambda: len(trained(slurm.log)) >= 3, slurm.log)
        slurm.run("scontrol", "requeue", str(FIRST))
        wait_until(lambda: "ended with code 143" in said(slurm.log), slurm.log)
        before = trained(slurm.log)
        holder = subprocess.Popen(["flock", tmp_path / "run" / "run.lock", "sleep", "1000"])
        (tmp_path / "run" / "run.lock").write_text('{"host": "node-2", "pid": 7, "since": "a while"}')
        slurm.again()
        wait_until(lambda: f'holds {tmp_path}/run/run.lock: {{"host": "node-2"' in said(slurm.log), slurm.log)
        assert trained(slurm.log) == before
        subprocess.run(["pkill", "--parent", str(holder.pid)], check=True)
        holder.wait()
        wait_until(lambda: trained(slurm.log)[-1] == 14, slurm.log)
        assert trained(slurm.log)[len(before) :] == list(range(continued_from(slurm), 15))
        wait_until(lambda: "ended with code 0" in said(slurm.log), slurm.log)
        wait_until(lambda: "JobState=COMPLETED" in slurm.run("scontrol", "show", "job", str(FIRST)), slurm.log)
        assert list(tmp_path.glob("run-keys*")) == []


def test_near_its_time_limit_a_job_writes_a_checkpoint_and_goes_back_into_the_queue(tmp_path: Path):
    with slurm_of(2, tmp_path) as slurm:
        slurm.submit()
        wait_until(lambda: len(trained(slurm.log)) >= 2, slurm.log)
        slurm.run("scancel", "--batch", "--signal=USR1", str(FIRST))  # as --signal=B:USR1 does
        slurm.again()
        assert "the training script ended with code 138" in said(slurm.log)
        before = trained(slurm.log)
        wait_until(lambda: len(trained(slurm.log)) > len(before), slurm.log)
        assert continued_from(slurm) > before[-1]


def test_a_job_whose_time_ends_before_it_trains_goes_back_into_the_queue(tmp_path: Path):
    with slurm_of(2, tmp_path) as slurm:
        (tmp_path / "run").mkdir()
        with subprocess.Popen(["flock", tmp_path / "run" / "run.lock", "sleep", "998"]) as holder:
            slurm.submit()
            wait_until(lambda: "waits for the end of the run" in said(slurm.log), slurm.log)
            slurm.run("scancel", "--batch", "--signal=USR1", str(FIRST))
            wait_until(lambda: "JobState=PENDING" in slurm.run("scontrol", "show", "job", str(FIRST)), slurm.log)
            subprocess.run(["pkill", "--parent", str(holder.pid)], check=True)
        assert "goes back into the queue" in said(slurm.log)


def test_ray_outlives_the_signal_to_all_processes_until_its_ranks_have_written_the_checkpoint(tmp_path: Path):
    with slurm_of(3, tmp_path) as slurm:
        slurm.submit(trainer={"nodes": 2, "cpus_per_node": 1})
        wait_until(lambda: len(trained(slurm.log)) >= 2, slurm.log, 150)
        slurm.run("scontrol", "requeue", str(FIRST))
        slurm.again()
        assert "the training script ended with code 143" in said(slurm.log)
        before = trained(slurm.log)
        wait_until(lambda: len(trained(slurm.log)) > len(before), slurm.log, 150)
        assert continued_from(slurm) > before[-1]


def test_a_node_that_cannot_take_part_is_named_and_nothing_starts(tmp_path: Path):
    with slurm_of(2, tmp_path) as slurm:
        slurm.submit(interface="ib7")
        wait_until(lambda: "nothing was started" in said(slurm.log), slurm.log)
        for node in ("node-1", "node-2"):
            assert f"{node} cannot take part: interface ib7 has no address here: No such device" in said(slurm.log)
        wait_until(lambda: "JobState=FAILED" in slurm.run("scontrol", "show", "job", str(FIRST)), slurm.log)
