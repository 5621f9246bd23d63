"""`arl launch` as a command: what it writes, what it submits and to whom, and what it says."""

import base64
import json
import os
from pathlib import Path

import pytest
import yaml

from arl.__main__ import main

EXAMPLES = Path(__file__).parents[2] / "examples" / "cluster"
FAKE = """#!/bin/sh
echo "$(basename "$0")" "$@" >>{calls}
case "$*" in
  *"get secret"*) {secret} ;;
  *"get rayjob"*) {trainer} ;;
  *"create -f -"* | *patch*) cat >{stdin} ;;
esac
{says}
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is all of PATH, but for what fakes themselves need."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for name in ("sh", "cat", "basename"):
        (directory / name).symlink_to(f"/bin/{name}" if name != "basename" else "/usr/bin/basename")
    monkeypatch.setenv("PATH", str(directory))
    return directory


def fake(programs: Path, name: str, says: str = "", secret: str = "", trainer: str = "") -> None:
    home = programs.parent
    answers = {"says": says, "secret": secret, "trainer": trainer}
    (programs / name).write_text(FAKE.format(calls=home / "calls", stdin=home / "stdin", **answers))
    (programs / name).chmod(0o755)


def calls(programs: Path) -> list[str]:
    file = programs.parent / "calls"
    return file.read_text().splitlines() if file.exists() else []


def test_a_dry_run_writes_the_file_says_what_would_start_it_and_starts_nothing(
    programs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    fake(programs, "sbatch")
    main(["launch", str(EXAMPLES / "slurm.yaml"), "--dry-run", "--output", str(tmp_path / "new" / "place")])
    made = tmp_path / "new" / "place" / "gsm8k.sbatch"
    assert made.read_text() == (EXAMPLES / "gsm8k.sbatch").read_text()
    assert f"sbatch {made}" in capsys.readouterr().out
    assert calls(programs) == []


def test_a_job_is_submitted_and_its_log_is_named(programs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    fake(programs, "sbatch", says="echo Submitted batch job 4711 on cluster c")
    main(["launch", str(EXAMPLES / "slurm.yaml"), "--output", str(tmp_path)])
    assert calls(programs) == [f"sbatch {tmp_path}/gsm8k.sbatch"]
    said = capsys.readouterr().out
    assert "gsm8k-4711.log" in said
    assert "scancel --batch --signal=USR1 4711" in said
    assert "arl view /shared/runs/gsm8k" in said


@pytest.mark.parametrize("has_secret", [False, True])
def test_pods_get_new_keys_once_and_by_no_command_line(
    has_secret: bool, programs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    content = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text())
    (tmp_path / "wandb.key").write_text("the key of wandb\n")
    content["key_files"] = {"WANDB_API_KEY": str(tmp_path / "wandb.key")}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    fake(programs, "kubectl", secret="echo secret/gsm8k-keys" if has_secret else "")
    main(["launch", str(tmp_path / "run.yaml")])
    of = "kubectl -n training"
    get = [f"{of} get {one} --ignore-not-found -o name" for one in ("rayjob/gsm8k-trainer", "secret/gsm8k-keys")]
    patch = f"{of} patch secret/gsm8k-keys --type=merge --patch-file=/dev/stdin"
    write = patch if has_secret else f"{of} create -f -"
    assert calls(programs) == [*get, write, f"kubectl apply -f {tmp_path}/gsm8k.manifests.yaml"]
    secret = json.loads((tmp_path / "stdin").read_text())
    assert (secret["kind"], secret["metadata"]["name"]) == ("Secret", "gsm8k-keys")
    keys = {name: base64.b64decode(key).decode() for name, key in secret["data"].items()}
    assert keys.pop("WANDB_API_KEY") == "the key of wandb"
    if has_secret:
        assert keys == {}  # pods may use those of servers
    else:
        assert (len(keys["server"]), keys["server"] != keys["mirror"]) == (64, True)
    said = capsys.readouterr().out
    assert f"{of} logs -f job/gsm8k-trainer" in said  # KubeRay's job, which follows the script
    made = {
        document["kind"].lower() for document in yaml.safe_load_all((tmp_path / "gsm8k.manifests.yaml").read_text())
    }
    short = {"poddisruptionbudget": "pdb", "serviceaccount": "sa", "service": "all", "statefulset": "all"}
    assert {short.get(kind, kind) for kind in made} <= set(said.partition(" delete ")[2].split()[0].split(","))


def test_a_second_run_of_a_name_is_refused_before_it_changes_the_servers_of_the_first(
    programs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    fake(programs, "kubectl", trainer="echo rayjob.ray.io/gsm8k-trainer")
    with pytest.raises(SystemExit, match="1"):
        main(["launch", str(EXAMPLES / "kubernetes.yaml"), "--output", str(tmp_path)])
    assert len(calls(programs)) == 1
    assert "kubectl -n training delete rayjob/gsm8k-trainer" in capsys.readouterr().err


def test_a_dry_run_for_kubernetes_says_how_the_keys_come_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    main(["launch", str(EXAMPLES / "kubernetes.yaml"), "--dry-run", "--output", str(tmp_path)])
    assert "arl launch without --dry-run does it, or the commands at the top of this file" in capsys.readouterr().out


def test_by_ssh_the_script_becomes_this_process(programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execvp", lambda program, argv: became.append([program, *argv]))
    main(["launch", str(EXAMPLES / "ssh.yaml"), "--output", str(tmp_path)])
    assert became == [["bash", "bash", f"{tmp_path}/gsm8k.sh"]]


def test_a_machine_without_the_program_is_told_what_to_do(
    programs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit, match="2"):
        main(["launch", str(EXAMPLES / "slurm.yaml"), "--output", str(tmp_path)])
    assert "this machine has no sbatch; run this where it is, or give --dry-run" in capsys.readouterr().err


def test_what_the_program_says_when_it_fails_is_shown(
    programs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    fake(programs, "sbatch", says="echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1")
    with pytest.raises(SystemExit, match="1"):
        main(["launch", str(EXAMPLES / "slurm.yaml"), "--output", str(tmp_path)])
    assert "ended with code 1: sbatch: error: invalid partition specified: gpu" in capsys.readouterr().err


def test_a_wrong_description_ends_with_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "run.yaml").write_text("kind: slurm\n")
    with pytest.raises(SystemExit, match="2"):
        main(["launch", str(tmp_path / "run.yaml"), "--dry-run"])
    said = capsys.readouterr().err
    assert [f"{field} is missing" in said for field in ("name", "command", "servers", "python")] == [True] * 4
    assert [file.name for file in tmp_path.iterdir()] == ["run.yaml"]


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="2"):
        main(["launch", str(EXAMPLES / "ssh.yaml"), "--dry-run", "--output", str(tmp_path / "file")])
    assert "--output names another directory" in capsys.readouterr().err
