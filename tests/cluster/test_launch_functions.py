"""Functions of the scripts for Slurm and ssh, each called on this machine."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE

import pytest
from test_launch_files import example

from arl.cluster.host_script import BEGINS
from arl.commands.launching import write_launch


def functions(kind: str, tmp_path: Path, **changes: object) -> str:
    """The script of a run in tmp_path, up to where it begins to do anything."""
    changes = {
        "run_dir": str(tmp_path),
        "workdir": str(tmp_path),
        "python": sys.executable,
        "interface": None,
    } | changes
    text = write_launch(example(kind, tmp_path, **changes), tmp_path).read_text().partition(BEGINS)[0]
    return text.replace("PLACE=/tmp/arl-$NAME", f"PLACE={tmp_path}/place")


def call(script: str, *lines: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], **variables}
    return subprocess.run(
        ["bash", "-c", "\n".join([script, *lines])],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


@contextmanager
def held_by(tmp_path: Path, host: str, pid: int) -> Iterator[None]:
    (tmp_path / "run.lock").write_text(f'{{"host": "{host}", "pid": {pid}, "since": "a while"}}')
    with subprocess.Popen(
        ["flock", tmp_path / "run.lock", "sh", "-c", "echo; exec cat"], stdin=PIPE, stdout=PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        yield
        holder.communicate()


def test_what_a_function_leaves_on_a_host_ends_with_it(tmp_path: Path):
    """Such as the mirror of a machine whose servers are given up: as long as it has its output, ssh does not end."""
    leaves = "leaves() { sleep 60 & return 3; }"
    done = call(functions("ssh", tmp_path), leaves, 'rm "$ALIVE"', "guarded leaves <&$LIFE")
    assert done.returncode == 3, done.stderr


def test_stop_ends_no_process_for_a_run_on_another_host(tmp_path: Path, other: subprocess.Popen[bytes]):
    with held_by(tmp_path, "another-host", other.pid):
        done = call(functions("ssh", tmp_path), 'rm "$ALIVE"', "end_training")
    assert (done.returncode, other.poll()) == (0, None)
    assert "leaves the run on another-host, which holds" in done.stderr


def test_stop_goes_on_when_the_run_has_just_ended(tmp_path: Path, other: subprocess.Popen[bytes]):
    other.kill()
    other.wait()
    with held_by(tmp_path, os.uname().nodename, other.pid):
        done = call(functions("ssh", tmp_path), 'rm "$ALIVE"', "NOTICE_S=-14", "end_training", "echo goes on")
    assert done.stdout == "goes on\n"


def test_a_start_finds_out_early_that_the_training_script_cannot_begin(tmp_path: Path):
    script = functions("ssh", tmp_path, command="python train.py", key_files={"WANDB_API_KEY": "~/a key"})
    lines = ('rm "$ALIVE"', "new_keys", "environment", "can_train", 'echo "$WANDB_API_KEY"')
    done = call(script, *lines, HOME=str(tmp_path))
    assert (done.returncode, "a key: No such file" in done.stderr) == (1, True)
    (tmp_path / "a key").write_text("the key\n")
    done = call(script, *lines, HOME=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "the key\n")
    script = functions("ssh", tmp_path, command="pyhton train.py")
    done = call(script, *lines[:-1], HOME=str(tmp_path))
    assert (done.returncode, "has no program pyhton, with which command begins" in done.stderr) == (1, True)


def test_a_requeued_job_signals_no_process_of_before(tmp_path: Path, other: subprocess.Popen[bytes]):
    keys = tmp_path.with_name(f"{tmp_path.name}-keys-7")
    keys.mkdir()
    (keys / "train.pid").write_text(str(other.pid))
    scontrol = "scontrol() { echo node-1; }"
    call(f"{scontrol}\n{functions('slurm', tmp_path)}", "notify TERM", SLURM_JOB_ID="7", SLURM_JOB_NODELIST="node-1")
    assert other.poll() is None
