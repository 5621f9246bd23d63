"""`arl launch`: make what a run on many machines needs from one description, and submit it."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from arl.api.errors import ArlError, ConfigError
from arl.cli import exit_with
from arl.cluster.description import AnyDescription, KubernetesDescription, SlurmDescription, read_description
from arl.cluster.kubernetes import manifests, secret
from arl.cluster.slurm import batch_script
from arl.cluster.ssh import ssh_script

ABOUT = (
    "Make what a run on many machines needs from one description: a batch script for Slurm, manifests for Kubernetes, "
    "or a script that works by ssh. Then submit it."
)


def main(argv: Sequence[str]) -> None:
    """argv: the arguments after `arl launch`. A wrong description ends the process with code 2."""
    parser = argparse.ArgumentParser(prog="arl launch", description=ABOUT, allow_abbrev=False)
    parser.add_argument("description", type=Path, metavar="FILE", help="the description of the run, in YAML")
    parser.add_argument("--dry-run", action="store_true", help="write the file, and start nothing")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where to write it (default: beside FILE)")
    options = parser.parse_args(argv)
    try:
        description = read_description(options.description)
        path = write_launch(description, options.output or options.description.parent)
        sys.stdout.write(f"wrote {path}\n")
        if options.dry_run:
            sys.stdout.write(f"nothing was started; {_how_to_start(description, path)}\n")
            return
        sys.stdout.flush()
        _submit(description, path)
    except ConfigError as error:
        exit_with(2, f"error: {error}")
    except ArlError as error:
        exit_with(1, f"error: {error}")


def write_launch(description: AnyDescription, directory: Path) -> Path:
    """Write the one file that the description asks for, named after the run. Raises ConfigError (--output)."""
    match description:
        case SlurmDescription():
            name, text = f"{description.name}.sbatch", batch_script(description)
        case KubernetesDescription():
            name, text = f"{description.name}.manifests.yaml", manifests(description)
        case _:
            name, text = f"{description.name}.sh", ssh_script(description)
    path = directory / name
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; --output names another directory") from None
    return path


def _command(description: AnyDescription, path: Path) -> list[str]:
    match description:
        case SlurmDescription():
            return ["sbatch", str(path)]
        case KubernetesDescription():
            return ["kubectl", "apply", "-f", str(path)]
        case _:
            return ["bash", str(path)]


def _how_to_start(description: AnyDescription, path: Path) -> str:
    if isinstance(description, KubernetesDescription):  # which needs a Secret, too
        return "arl launch without --dry-run does it, or the commands at the top of this file"
    return f"this does it: {shlex.join(_command(description, path))}"


def _submit(description: AnyDescription, path: Path) -> None:
    command, say = _command(description, path), sys.stdout.write
    match description:
        case SlurmDescription():
            job = _job_number(_run(command))
            say(f"its log: {description.name}-{job}.log in this directory\n")
            say(f"to end it, with a checkpoint: scancel --batch --signal=USR1 {job}, and then scancel {job}\n")
        case KubernetesDescription():
            _refuse_second(description)
            _write_secret(description)
            _run(command)
            kubectl, run = f"kubectl -n {description.namespace}", f"-l arl/run={description.name}"
            # The job that follows a RayJob's script has its name.
            say(f"its log: {kubectl} logs -f job/{description.name}-trainer\n")
            kinds = "all,configmap,secret,pdb,sa,role,rolebinding" + ",rayjob" * (description.trainer.nodes > 1)
            say(f"to end it, with a checkpoint: {kubectl} delete {kinds} {run}\n")
        case _:
            os.execvp(command[0], command)
    say(f"to look at it, on a machine that sees its directory: arl view {description.run_dir}\n")


def _job_number(said: str) -> str:
    """sbatch says "Submitted batch job 7", and may say more."""
    found = re.search(r"job (\d+)", said)
    return found[1] if found else "JOB"


def _refuse_second(description: KubernetesDescription) -> None:
    """Raises ArlError if the trainer is there: it would not start again, but its servers would."""
    kubectl = ["kubectl", "-n", description.namespace]
    trainer = f"{'rayjob' if description.trainer.nodes > 1 else 'job'}/{description.name}-trainer"
    if _run([*kubectl, "get", trainer, "--ignore-not-found", "-o", "name"]):
        raise ArlError(
            f"a run of this name is there, and trains or has ended; delete its trainer, which writes a checkpoint "
            f"first if it trains, and launch again: {shlex.join([*kubectl, 'delete', trainer])}"
        )


def _write_secret(description: KubernetesDescription) -> None:
    """The keys of servers and mirrors stay if they are there, because pods may use them."""
    kubectl = ["kubectl", "-n", description.namespace]
    name = f"secret/{description.name}-keys"
    if not _run([*kubectl, "get", name, "--ignore-not-found", "-o", "name"]):
        _run([*kubectl, "create", "-f", "-"], stdin=secret(description))
    elif description.key_files:
        patch = ["patch", name, "--type=merge", "--patch-file=/dev/stdin"]
        _run([*kubectl, *patch], stdin=secret(description, new=()))


def _run(command: Sequence[str], stdin: str = "") -> str:
    """Returns what the program says. Raises ConfigError if there is no such program, ArlError if it fails."""
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError(f"this machine has no {command[0]}; run this where it is, or give --dry-run") from None
    if done.returncode:
        raise ArlError(f"{shlex.join(command)} ended with code {done.returncode}: {done.stderr.strip()}")
    sys.stdout.write(done.stdout)
    return done.stdout.strip()
