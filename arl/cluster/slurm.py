"""A run as a job of Slurm: one batch script, which starts everything on the job's nodes by srun."""

from __future__ import annotations

from arl.cluster.description import SlurmDescription
from arl.cluster.host_script import assigned, host_script

_MORE_NOTICE_S = 10


def batch_script(description: SlurmDescription) -> str:
    """The script for `sbatch`."""
    trainer, servers = description.trainer, description.servers
    cpus = max(trainer.cpus_per_node or 0, servers.per_node * (servers.cpus_per_server or 0))
    memory_gb = max(trainer.memory_gb or 0, servers.per_node * (servers.memory_gb or 0))
    gpus = max(trainer.gpus_per_node, servers.gpus_per_node)
    options = [
        f"--job-name={description.name}",
        f"--output={description.name}-%j.log",
        "--open-mode=append",
        f"--nodes={trainer.nodes + servers.nodes}",
        "--ntasks-per-node=1",
        *([f"--cpus-per-task={cpus}"] if cpus else []),
        *([f"--mem={memory_gb * 10**9 // 2**20}M"] if memory_gb else []),
        *([f"--gpus-per-node={gpus}"] if gpus else []),
        f"--time={description.time}",
        "--requeue",
        f"--signal=B:USR1@{description.notice_s + _MORE_NOTICE_S}",
        *description.options,
    ]
    top = _TOP.format(name=description.name, options="\n".join(f"#SBATCH {option}" for option in options))
    machines = assigned({"SRUN_OPTIONS": description.srun_options}) + _MACHINES
    return host_script(description, top=top, start="$SLURM_JOB_ID", machines=machines)


_TOP = """\
#!/bin/bash
{options}
#
# A run of arl, made by `arl launch`. Submit it: sbatch {name}.sbatch
#
# The first nodes train, the first of them also runs the script; the other nodes run servers. Slurm sends SIGUSR1 before
# the time limit, and SIGTERM when it preempts, requeues or cancels the job. The run then writes a checkpoint, and a job
# that goes back into the queue continues from it. After SIGTERM, Slurm kills when GraceTime or KillWait (usually 30 s)
# is over, whatever NOTICE_S says: a checkpoint that takes longer is lost, and the run continues from the one before,
# which is five minutes old at most.
# shellcheck disable=SC2329  # functions are called by their names, on other machines
set -euo pipefail
"""

_MACHINES = """\
PLACE=/tmp/arl-$SLURM_JOB_ID
rm -f "$KEYS/train.pid"  # of this job before it was requeued: the process may be another one now
mapfile -t MACHINES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

on() {  # the step gets all of its node's cores and GPUs, beside other steps
  local step=(srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" --cpu-bind=none --input=none "${SRUN_OPTIONS[@]}")
  step+=(bash -c "$(there "${@:2}")")
  if ((BASH_SUBSHELL > 0)); then exec "${step[@]}"; fi  # in the background: a subshell would not outlive SIGTERM
  "${step[@]}"
}

notify() {  # this script runs on the machine of the training script
  if [ -s "$KEYS/train.pid" ]; then kill -s "$1" "$(<"$KEYS/train.pid")" 2>/dev/null || true; fi
}

may_start() { :; }

let_go() {  # the steps end with this script
  rm -rf "$KEYS"
  if [ "$asked" = USR1 ] && [ "${code:-1}" != 0 ]; then
    say "the time limit is near: the job goes back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
  fi
}
"""
