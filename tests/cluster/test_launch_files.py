"""What `arl launch` writes: the examples are as it writes them, the scripts are clean, wrong descriptions are named."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from arl.api.errors import ConfigError
from arl.cli import load_config
from arl.cluster.description import KubernetesDescription, OnHosts, read_description
from arl.cluster.host_script import flags_in_bash
from arl.cluster.kubernetes import manifests
from arl.commands.launching import write_launch

EXAMPLES = Path(__file__).parents[2] / "examples" / "cluster"
SHELLCHECK = Path(sys.prefix) / "bin" / "shellcheck"
KINDS = ("slurm", "kubernetes", "ssh")


def example(of: str, tmp_path: Path, **changes: Any) -> Any:
    """The example's description with other fields; a mapping changes only its own fields, None removes a field."""
    content = yaml.safe_load((EXAMPLES / f"{of}.yaml").read_text())
    for name, value in changes.items():
        content[name] = {**content.get(name, {}), **value} if isinstance(value, dict) else value
    file = tmp_path / "description.yaml"
    file.write_text(yaml.safe_dump({name: value for name, value in content.items() if value is not None}))
    return read_description(file)


@pytest.mark.parametrize("kind", KINDS)
def test_the_examples_are_what_launch_makes_of_their_descriptions(kind: str, tmp_path: Path):
    made = write_launch(read_description(EXAMPLES / f"{kind}.yaml"), tmp_path)
    assert made.read_text() == (EXAMPLES / made.name).read_text()


EMBEDDED = {"kind": "embedded", "gpus_per_server": 0, "python": None, "arguments": []}
ONE_TRAINER = {"trainer": {"nodes": 1}, "ray_version": None}


@pytest.mark.parametrize("kind", ["slurm", "ssh"])
def test_the_scripts_are_clean_bash(kind: str, tmp_path: Path):
    hosts = {} if kind == "slurm" else {"hosts": ["a", "b", "c", "d"]}
    secrets = {"key_files": {"WANDB_API_KEY": "/home/me/a key"}, "environment": {"SAID": "it's here"}}
    most = {"trainer": {"nodes": 2}, "servers": {"nodes": 2}, "transport": "delta"}
    least = {"trainer": {"nodes": 1}, "servers": {"nodes": 3, **EMBEDDED}, "transport": "disk"}
    for changes in (most, least):
        check(write_launch(example(kind, tmp_path, **changes, **hosts, **secrets), tmp_path).read_text())


@pytest.mark.parametrize(
    "changes", [{}, {"servers": {**EMBEDDED, "image": None}, **ONE_TRAINER}, {"transport": "delta"}]
)
def test_the_scripts_of_the_pods_are_clean_bash(changes: dict[str, Any], tmp_path: Path):
    scripts = documents(example("kubernetes", tmp_path, **changes))["ConfigMap"]["data"]
    assert {"train.sh", "server.sh"} <= scripts.keys()
    for text in scripts.values():
        check("#!/bin/bash\n" + text)


def check(script: str) -> None:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    done = subprocess.run([SHELLCHECK, "-"], input=script, text=True, capture_output=True, check=False)
    assert done.stdout == ""


def documents(description: KubernetesDescription) -> dict[str, Any]:
    """The manifests by kind; of two of a kind the last."""
    return {document["kind"]: document for document in yaml.safe_load_all(manifests(description))}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transport", ["disk", "distributed"])
def test_the_flags_are_settings(kind: str, transport: str, tmp_path: Path):
    description = example(kind, tmp_path, transport=transport)
    model, run_dir = f"MODEL={description.model}", f"RUN_DIR={description.run_dir}"
    script = f"{model} {run_dir} NOTICE_S=7; {flags_in_bash(description)} printf '%s\\n' \"${{FLAGS[@]}}\""
    flags = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split()
    config = load_config_of([*flags, "--engine.addresses", "http://gpu-2:1"])
    assert (config.run_dir, config.checkpoint.notice_s) == (Path(description.run_dir), 7)
    assert config.train.num_ranks == description.trainer.num_ranks
    assert (config.weights.transport, config.train.device) == (transport, "cuda")


def load_config_of(flags: list[str]) -> Any:
    from arl.api.config import Config

    return load_config(Config, flags)


def test_slurm_gives_notice_long_enough_for_the_checkpoint(tmp_path: Path):
    description = example("slurm", tmp_path, notice_s=300)
    lines = write_launch(description, tmp_path).read_text().splitlines()
    assert "#SBATCH --signal=B:USR1@310" in lines
    assert "NOTICE_S=300" in lines
    assert {"#SBATCH --requeue", "#SBATCH --nodes=6", "#SBATCH --gpus-per-node=8"} <= set(lines)


def test_slurm_is_asked_for_the_cores_and_the_memory_of_the_description(tmp_path: Path):
    servers = {"per_node": 4, "cpus_per_server": 8, "memory_gb": 64}
    for changes, cpus, memory in (({"servers": servers}, 32, 244140), ({"trainer": {"cpus_per_node": 6}}, 6, None)):
        text = write_launch(example("slurm", tmp_path, **changes), tmp_path).read_text()
        assert f"#SBATCH --cpus-per-task={cpus}\n" in text
        assert ("#SBATCH --mem=" in text) is (memory is not None)
        assert memory is None or f"#SBATCH --mem={memory}M\n" in text


def test_ray_lets_a_stopped_script_write_its_checkpoint(tmp_path: Path):
    cluster = documents(example("kubernetes", tmp_path, notice_s=300))["RayJob"]["spec"]["rayClusterSpec"]
    (container,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert {"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": "300"} in container["env"]


def test_servers_stay_for_the_next_try_of_a_ray_job_with_a_wrong_setting(tmp_path: Path):
    """KubeRay cannot be told that another try is of no use."""
    several = documents(example("kubernetes", tmp_path))["ConfigMap"]["data"]["train.sh"]
    one = documents(example("kubernetes", tmp_path, **ONE_TRAINER))["ConfigMap"]["data"]["train.sh"]
    assert ("code == 2" in several, "code == 2" in one) == (False, True)


def test_the_commands_in_the_manifests_make_all_keys_that_pods_need(tmp_path: Path):
    (tmp_path / "wandb.key").write_text("the key\n")
    text = manifests(example("kubernetes", tmp_path))
    lines = [line.removeprefix("#   ") for line in text.splitlines() if line.startswith("#   ")]
    assert lines[-2].endswith("create secret generic gsm8k-keys --from-file=keys")
    script = f'set -e; python() {{ {sys.executable} "$@"; }}\n' + "\n".join(lines[:-2])
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    subprocess.run(["bash", "-c", script], env=environment, cwd=tmp_path, check=True)
    made = {file.name: file.read_text() for file in (tmp_path / "keys").iterdir()}
    needed = {found["key"] for found in named(list(yaml.safe_load_all(text)), "secretKeyRef")}
    assert (made.keys(), made["WANDB_API_KEY"], len(made["server"])) == (needed, "the key", 64)


def test_pods_have_time_for_the_checkpoint_before_they_are_killed(tmp_path: Path):
    several = documents(example("kubernetes", tmp_path, notice_s=300))["RayJob"]["spec"]["rayClusterSpec"]
    one = documents(example("kubernetes", tmp_path, notice_s=300, **ONE_TRAINER))["Job"]["spec"]
    pods = (several["headGroupSpec"], several["workerGroupSpecs"][0], one)
    assert [pod["template"]["spec"]["terminationGracePeriodSeconds"] > 300 for pod in pods] == [True] * 3


def test_no_manifest_has_a_key_but_the_name_of_a_secret(tmp_path: Path):
    text = manifests(example("kubernetes", tmp_path, transport="delta"))
    assert '"Secret"' not in text
    pods = [*documents(example("kubernetes", tmp_path, transport="delta")).values()]
    variables = [found for pod in pods for found in named(pod, "env")]
    keys = [variable for env in variables for variable in env if variable["name"].endswith("_KEY")]
    assert len(keys) > 4
    assert [variable["name"] for variable in keys if "secretKeyRef" not in variable["valueFrom"]] == []


def named(value: Any, name: str) -> list[Any]:
    """Everything of this name within a manifest."""
    if isinstance(value, list):
        return [found for one in value for found in named(one, name)]
    if not isinstance(value, dict):
        return []
    return [one for key, one in value.items() if key == name] + [f for one in value.values() for f in named(one, name)]


# What KubeRay's v1 API documents of the fields that are used here: the type, and whether it has to be there.
POD_TEMPLATE = {"metadata": (dict, False), "spec": (dict, True)}
RAY_JOB = {
    "entrypoint": (str, True),
    "backoffLimit": (int, False),
    "shutdownAfterJobFinishes": (bool, False),
    "ttlSecondsAfterFinished": (int, False),
    "rayClusterSpec": {
        "rayVersion": (str, True),
        "authOptions": {"mode": (str, False)},
        "headGroupSpec": {"rayStartParams": (dict, True), "template": POD_TEMPLATE},
        "workerGroupSpecs": [
            {
                "groupName": (str, True),
                "replicas": (int, False),
                "minReplicas": (int, True),
                "maxReplicas": (int, True),
                "rayStartParams": (dict, True),
                "template": POD_TEMPLATE,
            }
        ],
    },
}


def unlike(value: Any, schema: Any, path: str = "spec") -> list[str]:
    """Where a value differs from a schema of KubeRay's fields."""
    if isinstance(schema, list):
        return [found for one in value for found in unlike(one, schema[0], path)]
    if isinstance(schema, tuple):
        return [] if type(value) is schema[0] else [f"{path} is a {type(value).__name__}"]
    missing = [
        name for name, inner in schema.items() if name not in value and not (type(inner) is tuple and not inner[1])
    ]
    unknown = [f"{path}.{name} is unknown" for name in value if name not in schema]
    inner = [
        found for name in value.keys() & schema.keys() for found in unlike(value[name], schema[name], f"{path}.{name}")
    ]
    return [f"{path}.{name} is missing" for name in missing] + unknown + inner


def test_a_ray_job_has_the_fields_that_kuberay_documents(tmp_path: Path):
    job = documents(example("kubernetes", tmp_path))["RayJob"]
    assert (job["apiVersion"], unlike(job["spec"], RAY_JOB)) == ("ray.io/v1", [])
    for group in (job["spec"]["rayClusterSpec"]["headGroupSpec"], *job["spec"]["rayClusterSpec"]["workerGroupSpecs"]):
        assert {type(value) for value in group["rayStartParams"].values()} == {str}
        assert group["template"]["spec"]["containers"]
    del job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert unlike({**job["spec"], "retries": 1}, RAY_JOB) == [
        "spec.retries is unknown",
        "spec.rayClusterSpec.headGroupSpec.template.spec is missing",
    ]


@pytest.mark.parametrize("changes", [{}, {"transport": "delta", **ONE_TRAINER}, {"volume": {"size": "1Ti"}}])
def test_the_manifests_fit_the_schemas_of_kubernetes(changes: dict[str, Any], tmp_path: Path):
    validate = pytest.importorskip("kubernetes_validate", reason="no kubernetes-validate: make cluster-packages")
    for document in yaml.safe_load_all(manifests(example("kubernetes", tmp_path, **changes))):
        if document["kind"] != "RayJob":
            validate.validate(document, "1.31", strict=True)
            continue
        cluster = document["spec"]["rayClusterSpec"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **group["template"]}
            validate.validate(pod, "1.31", strict=True)


SGLANG = """
import json, os, sys
print(json.dumps([sys.argv[1:], open(sys.argv[2]).read(), os.stat(sys.argv[2]).st_mode & 0o777, dict(os.environ)]))
"""


@pytest.mark.parametrize("kind", ["kubernetes", "ssh"])
def test_sglang_gets_its_key_by_a_file(kind: str, tmp_path: Path):
    package, keys = tmp_path / "sglang", tmp_path / "keys"
    package.mkdir()
    keys.mkdir()
    (package / "launch_server.py").write_text(SGLANG)
    variables = {"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"], "ARL_SERVER_API_KEY": "the key"}
    if kind == "kubernetes":
        script = documents(example(kind, tmp_path))["ConfigMap"]["data"]["server.sh"].replace("/tmp/", f"{tmp_path}/")
    else:
        del variables["ARL_SERVER_API_KEY"]
        script = write_launch(example(kind, tmp_path, python=sys.executable), tmp_path).read_text()
        functions = [
            script[script.index(f"\n{name}() {{") :].partition("\n}\n")[0] + "\n}" for name in ("new_keys", "server")
        ]
        values = (
            f"PYTHON={sys.executable} SERVER_PYTHON=$PYTHON KEYS={keys} MODEL=/m GPUS_PER_SERVER=2 SERVER_ARGUMENTS=()"
        )
        script = "\n".join([values, *functions, "new_keys; server 30000"])
    done = subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True, check=True)
    arguments, config, mode, environment = json.loads(done.stdout)
    key = "the key" if kind == "kubernetes" else (keys / "server").read_text().strip()
    assert (yaml.safe_load(config), mode) == ({"api-key": key}, 0o600)
    assert [word for word in (*arguments, *environment.values()) if key in word] == []
    assert arguments[arguments.index("--tp-size") + 1] == "2"
    assert {"--model-path", "--host", "--port"} <= set(arguments)


WRONG = [
    ("slurm", {"kind": "cloud"}, "kind is 'cloud'; it must be one of slurm, kubernetes, ssh"),
    ("slurm", {"kind": None}, "kind is missing"),
    ("slurm", {"model": None}, "model is missing; add it to this file"),
    ("slurm", {"nmae": "x"}, "nmae is not a setting"),
    ("slurm", {"name": "GSM8K"}, "name: 'GSM8K' is not a name for a run"),
    ("slurm", {"name": "a" * 31}, "is not a name for a run; use up to 30"),
    ("slurm", {"run_dir": "runs/gsm8k"}, "run_dir: 'runs/gsm8k' is not absolute"),
    ("slurm", {"command": "python train.py --run_dir=x"}, "command has --run_dir, which follows"),
    ("slurm", {"command": "python train.py --engine.colocated"}, "--engine.colocated, but arl launch puts servers on"),
    ("slurm", {"command": "python 'train.py"}, "command cannot be split into words"),
    ("slurm", {"command": ""}, "command is empty"),
    ("slurm", {"command": "A=1 python train.py"}, "command begins with 'A=1', which is not a program"),
    ("slurm", {"time": 86400}, "time: YAML reads it as the number 86400; put it in quotes"),
    ("slurm", {"trainer": {"ranks_per_node": 9}}, "ranks_per_node is 9 and gpus_per_node 8; a rank needs a GPU"),
    ("slurm", {"environment": {"A B": "x"}}, "environment: 'A B' is not the name of an environment variable"),
    ("slurm", {"notice_s": 0}, "notice_s is 0"),
    ("slurm", {"trainer": {"nodes": 0}}, "trainer.nodes is 0"),
    ("slurm", {"servers": {"arguments": ["--api-key=x"]}}, "arguments has --api-key, which arl launch sets itself"),
    ("slurm", {"servers": {"gpus_per_server": 0}}, "gpus_per_server is 0: give each server GPUs"),
    ("slurm", {"servers": {"kind": "embedded", "arguments": []}}, "gpus_per_server is 2; an embedded server"),
    ("slurm", {"servers": EMBEDDED, "model": "Qwen/Qwen3-8B"}, "model is 'Qwen/Qwen3-8B'; embedded servers need"),
    ("slurm", {"options": ["partition=gpu"]}, "'partition=gpu' is not an option"),
    ("slurm", {"options": ["--x=1\nrm -rf /"]}, "is not an option"),
    ("ssh", {"hosts": ["a", "b"]}, "hosts has 2 names; trainer.nodes=1 and servers.nodes=2 need 3"),
    ("ssh", {"hosts": ["a", "b", "a"]}, "hosts names a twice"),
    ("ssh", {"hosts": ["a", "b", "-oProxyCommand=x"]}, "hosts has '-oProxyCommand=x', which is not a host"),
    ("kubernetes", {"run_dir": "/runs/gsm8k"}, "run_dir is /runs/gsm8k; it must lie below volume.path, /shared"),
    ("kubernetes", {"ray_version": None}, "ray_version is missing; trainer.nodes is 2"),
    ("kubernetes", {"ray_version": "2.9.0"}, "ray_version is 2.9.0; 2.52.0 and newer"),
    ("kubernetes", {"servers": {"memory_gb": None}}, "servers.memory_gb is missing"),
    ("kubernetes", {"servers": {"python": "/usr/bin/python"}}, "servers.image names the image"),
]


@pytest.mark.parametrize(("kind", "changes", "message"), WRONG)
def test_what_is_wrong_with_a_description_is_named(kind: str, changes: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(ConfigError) as error:
        example(kind, tmp_path, **changes)
    assert message in str(error.value)
    assert "description.yaml" in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"), [("[1]", "holds list"), ("a: [", "is not YAML"), (None, "cannot be read")]
)
def test_a_file_that_is_no_description_is_named(text: str | None, message: str, tmp_path: Path):
    file = tmp_path / "run.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_description(file)


def test_what_a_description_says_cannot_leave_its_place_in_the_script(tmp_path: Path):
    """Quotes and dollars of a value reach the process as they are."""
    value = 'it\'s "$HOME" `id` $(id) \\'
    description = example("ssh", tmp_path, environment={"SAID": value}, command="python 'a $b.py'")
    assert isinstance(description, OnHosts)
    script = write_launch(description, tmp_path).read_text()
    ask = 'PYTHON=/bin/sh WORKDIR=/; environment; printf "%s\\n" "$SAID" "${COMMAND[@]}"; exit; }\n'
    part = script[script.index("# What runs.") : script.index("\nMACHINES=")]
    done = subprocess.run(["bash", "-c", f"{part}\n{{ {ask}"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [value, "python", "a $b.py"]
