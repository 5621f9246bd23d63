"""The commands of docs/cluster.md: each is run, or what of it one machine without GPUs can run.

Here GPUs are CPUs, SGLang is the embedded server, the model is tiny, and 10.0.0.N is the N-th node in namespaces.
"""

import json
import re
import shlex
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from nodes import REPOSITORY, Cluster
from paced_run import until
from plan.made_log import MadeRun, known_costs

from arl.__main__ import main
from arl.cli import load_config
from arl.engine.tiny import write_tiny_model
from arl.rehearsal import dry_run

PAGE = REPOSITORY / "docs" / "cluster.md"
EXAMPLES = REPOSITORY / "examples"
SCRIPT = "examples/agents/math_agent.py"
BLOCKS = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
COMMANDS = [shlex.split(line) for block in BLOCKS for line in block.replace("\\\n", " ").splitlines() if line]


def begins(*words: str) -> list[list[str]]:
    return [command for command in COMMANDS if command[: len(words)] == list(words)]


TRAININGS = begins("python", SCRIPT)
KINDS = (
    ("python", SCRIPT),
    ("python", "-m", "sglang.launch_server"),
    ("ray", "start"),
    ("arl", "servers"),
    ("arl", "plan"),
)


def test_the_tests_below_know_every_command() -> None:
    known = [command for kind in KINDS for command in begins(*kind)]
    assert [command for command in COMMANDS if command not in known] == []
    assert all(begins(*kind) for kind in KINDS)


def without(command: list[str], *flags: str) -> list[str]:
    """The command without flags and their values."""
    kept = list(command)
    while places := [i for i, word in enumerate(kept) if word in flags]:
        del kept[places[0] : places[0] + 2]
    return kept


@pytest.mark.parametrize("command", TRAININGS, ids=range(len(TRAININGS)))
def test_the_flags_of_a_training_fit_together_and_a_dry_run_finds_what_this_machine_lacks(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "agents"))
    from math_agent import MathAgentConfig

    here = [re.sub(r"\b10\.0\.0\.(\d):\d+", r"127.0.0.1:\1", word) for word in command[2:] if word != "--dry-run"]
    config = load_config(
        MathAgentConfig, [*without(here, "--run_dir", "--dataset"), "--run_dir", str(tmp_path / "run")]
    )
    wanted = [word for flag, word in pairwise(here) if flag == "--engine.addresses"]
    mistakes = "\n".join(dry_run(config).mistakes)
    assert "GPU" in mistakes or "Ray" in mistakes
    assert all(address in mistakes for address in wanted)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", begins("arl", "plan"), ids=lambda command: command[2])
def test_a_plan_is_made(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a smaller range."""
    monkeypatch.chdir(tmp_path)
    small = without(command[1:], "--servers", "--ranks")
    if command[2] == "runs/gsm8k":
        MadeRun(known_costs()).write(tmp_path / "runs" / "gsm8k")
    main([*small, "--servers", "1:2", "--ranks", "4" if "--gpu" in command else "1", "--steps", "2"])
    assert "episodes/s" in capsys.readouterr().out
    if "--plot" in command:
        assert (tmp_path / command[command.index("--plot") + 1]).stat().st_size > 0


SMALLER = {"cuda": "cpu", "bfloat16": "float32", "8": "3", "4": "2", "2": "1"}
"""Of a training's flags: devices, dtypes, numbers of ranks."""


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_a_run_by_hand_over_four_machines_changes_its_servers_and_continues_on_another_size(tmp_path: Path) -> None:
    """Ray on two nodes, servers on three others."""
    model, run_dir, log = write_tiny_model(tmp_path / "model"), tmp_path / "run", tmp_path / "log"
    rows = [json.dumps({"question": f"{a} + {b} = ?", "answer": str(a + b)}) for a in range(8) for b in range(8)]
    (tmp_path / "sums.jsonl").write_text("\n".join(rows))
    (tmp_path / "key").write_text("a key")
    by_hand, on_another_size = [command for command in TRAININGS if "--train.ray_address" in command]
    places = {
        "python": sys.executable,
        "sglang.launch_server": "arl.engine.local",
        "--model-path": "--model",
        SCRIPT: REPOSITORY / SCRIPT,
        "Qwen/Qwen3-0.6B": model,
        "openai/gsm8k": tmp_path / "sums.jsonl",
        "/shared/runs/gsm8k": run_dir,
        "runs/gsm8k": run_dir,
    }

    def here(word: str) -> str:
        return str(places.get(word) or re.sub(r"\b10\.0\.0\.(\d)", r"10.77.0.\1", word))

    def training(command: list[str], steps: int) -> list[str]:
        tiny = "--rollout.batch_size 2 --rollout.group_size 2 --max_new_tokens 8 --num_held_out 2 --checkpoint.every 1"
        words = [here(SMALLER.get(word, word)) for word in command]
        return [*words, *tiny.split(), "--no-log.console", "--steps", str(steps)]

    def rows_of_run() -> int:
        file = run_dir / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0

    with Cluster(5, shared=tmp_path) as cluster:
        for node, command in zip(cluster.nodes, begins("ray", "start"), strict=False):
            where = [f"--node-ip-address={node.address}", "--num-cpus=2", "--object-store-memory=100000000"]
            node.run([sys.executable, "-m", "ray.scripts.scripts", *map(here, command[1:]), *where])
        (serve,) = begins("python", "-m", "sglang.launch_server")
        embedded = [*map(here, without(serve, "--config")), "--api-key-file", str(tmp_path / "key")]
        for node in cluster.nodes[2:]:
            node.start(embedded, log=tmp_path / f"{node.name}.log")
        keys = {"ARL_SERVER_API_KEY": "a key", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
        head = cluster.nodes[0]
        run = head.start(training(by_hand, steps=1000), log=log, env=keys)
        until(lambda: rows_of_run() >= 5 or run.poll() is not None, "five steps were not trained", log)
        assert run.poll() is None, log.read_text()
        said = {words[2]: head.run([sys.executable, "-m", *map(here, words)]) for words in begins("arl", "servers")}
        assert "10.77.0.4:30000" in said["list"]
        told = json.loads((run_dir / "servers.json").read_text())["servers"]
        assert sorted(row["address"] for row in told) == ["http://10.77.0.4:30000", "http://10.77.0.5:30000"], said
        head.run(["pkill", "-TERM", "--oldest", "--full", SCRIPT])
        assert run.wait(60) == 143, log.read_text()
        assert json.loads((run_dir / "END.json").read_text())["version"] >= 5
        trained = rows_of_run()
        again = training(on_another_size, steps=trained + 2)
        head.run(again, timeout_s=120, env=keys)
        assert rows_of_run() == trained + 2
