"""The files of examples/cluster: each by the checks of the program that reads it, and Slurm's script between nodes."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from nodes import REPOSITORY, Cluster
from paced_run import model_of, until
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import start
from ray.scripts.symmetric_run import curate_and_validate_ray_start_args, symmetric_run

from arl.run.script import load_config

EXAMPLES = REPOSITORY / "examples" / "cluster"
SBATCH = (EXAMPLES / "slurm.sbatch").read_text()
RAY_UP = (EXAMPLES / "ray_up.yaml").read_text()
RAY_JOB: dict[str, Any] = yaml.safe_load((EXAMPLES / "rayjob.yaml").read_text())
SCHEMA = Path(__file__).with_name("rayjob_schema.json")
"""Of KubeRay 1.7.0's RayJob (ray-operator/config/crd, Apache License 2.0), without descriptions. Unknown fields are
errors."""


def training_of(file: str) -> list[str]:
    """The flags of the training script."""
    text = {
        "slurm.sbatch": SBATCH[SBATCH.index("train=(") : SBATCH.index("\n)")].replace("$MODEL", "/shared/model"),
        "ray_up.yaml": re.sub(r"^#", "", RAY_UP.partition('" --tmux')[0], flags=re.MULTILINE).replace("\\\n", " "),
        "rayjob.yaml": RAY_JOB["spec"]["entrypoint"],
    }[file]
    return shlex.split(text.partition("math_agent.py")[2])


@pytest.mark.parametrize("file", ["slurm.sbatch", "ray_up.yaml", "rayjob.yaml"])
def test_the_flags_of_a_training_fit_together(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "examples" / "agents"))
    from math_agent import MathAgentConfig

    config = load_config(MathAgentConfig, training_of(file))
    assert config.engine_on_ray
    engine: Any = config.engine
    assert config.train.num_ranks + engine.num_servers * engine.gpus_per_server == 6 * 8, "all GPUs have work"


def test_slurms_script_is_sound_and_ray_takes_its_options() -> None:
    checked = subprocess.run(
        [Path(sys.executable).with_name("shellcheck"), EXAMPLES / "slurm.sbatch"], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout
    (command,) = re.findall(r"ray symmetric-run (.*?) -- ", SBATCH.replace("\\\n", ""))
    options = ["6" if "NODES" in word else word for word in shlex.split(command)]
    parsed = symmetric_run.make_context("symmetric-run", [*options]).params
    assert parsed["address"] == "$head:6379"
    start.make_context("start", ["--head", *curate_and_validate_ray_start_args(options)])


def test_kuberay_takes_the_job() -> None:
    schema = json.loads(SCHEMA.read_text())
    jsonschema.validate(RAY_JOB, schema)
    spec = RAY_JOB["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]
    spec["containers"][0]["imagePullPolice"] = "Always"
    with pytest.raises(jsonschema.ValidationError, match="imagePullPolice"):
        jsonschema.validate(RAY_JOB, schema)


def test_ray_up_takes_the_cluster() -> None:
    config = prepare_config(yaml.safe_load(RAY_UP))
    validate_config(config)
    assert config["max_workers"] == 5
    for command in (config["head_start_ray_commands"][-1], config["worker_start_ray_commands"][-1]):
        start.make_context("start", shlex.split(command.partition("ray start ")[2]))


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_slurms_script_trains_over_two_nodes_and_after_the_notice_the_job_is_requeued(tmp_path: Path) -> None:
    """`srun` and `scontrol` are stand-ins. On each node the script itself is the task of `srun`."""
    tools, log = tmp_path / "tools", tmp_path / "log"
    tools.mkdir()
    for name, lines in {
        "srun": 'while [ "$1" != ray ]; do shift; done\nexec "$@"',
        "scontrol": '[ "$1" = requeue ] && echo "requeued $2" || echo node-1',
        "ray": f'exec {sys.executable} -m ray.scripts.scripts "$@"',
    }.items():
        (tools / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tools / name).chmod(0o755)
    small = "--rollout.batch_size 2 --rollout.group_size 2 --max_new_tokens 8 --num_held_out 2 --no-log.console"
    rows = [json.dumps({"question": f"{a} + {b} = ?", "answer": str(a + b)}) for a in range(8) for b in range(8)]
    (tmp_path / "sums.jsonl").write_text("\n".join(rows))
    with Cluster(2, shared=tmp_path) as cluster:
        script = SBATCH
        for words, ours in {
            "/shared/models/Qwen3-8B": str(model_of(cluster)),
            "/shared/arl/.venv/bin/python": sys.executable,
            "cd /shared/arl": f"cd {REPOSITORY}",
            "/shared/runs": str(tmp_path),
            "openai/gsm8k": str(tmp_path / "sums.jsonl"),
            "cuda --train.dtype bfloat16 --train.num_ranks 16": "cpu --train.num_ranks 2",
            "sglang_processes --engine.on_ray --engine.num_servers 16 --engine.gpus_per_server 2": (
                f"local --engine.on_ray --engine.num_servers 2 {small}"
            ),
            '--engine.python "$SGLANG_PYTHON"': "",
            'PATH="${PYTHON%/*}:$PATH"': f'PATH="{tools}:${{PYTHON%/*}}:$PATH"',
            "ray symmetric-run": "ray symmetric-run --num-cpus=2 --object-store-memory=100000000",
        }.items():
            assert words in script, words
            script = script.replace(words, ours)
        (tmp_path / "job.sbatch").write_text(script)
        slurm = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node-[1-2]", "SLURM_JOB_ID": "7"}
        env = slurm | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
        job, _ = [
            node.start(["bash", tmp_path / "job.sbatch"], log=log.with_name(node.name), env=env)
            for node in cluster.nodes
        ]
        log, metrics = log.with_name("node-1"), tmp_path / "gsm8k" / "metrics.jsonl"
        until(
            lambda: job.poll() is not None or (metrics.exists() and metrics.read_text().count("\n") > 1), "no step", log
        )
        assert job.poll() is None, log.read_text()
        cluster.nodes[0].run(["pkill", "-USR1", "--oldest", "--full", "job.sbatch"])
        assert job.wait(120) == 138, log.read_text()
        assert "requeued 7" in log.read_text()
        assert json.loads((tmp_path / "gsm8k" / "END.json").read_text())["version"] >= 2
