"""The code in the guides runs as it stands; metrics, presets and kinds are explained; links lead somewhere."""

import ast
import importlib
import inspect
import os
import re
import runpy
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from guides import python_blocks
from one_turn import OneTurn
from pyarrow import parquet
from records import grouped, trajectory
from scripted_launch import small, use_fakes

from arl.__main__ import main as arl_main
from arl.algorithm.advantages import arranged
from arl.algorithm.batch import Batch
from arl.algorithm.groups import comparison_metrics
from arl.algorithm.losses.reinforcement import PolicyLoss, ValueLoss
from arl.algorithm.returns import ImplicitRewardLoss
from arl.algorithm.trained_tokens import LossReport
from arl.api.errors import SandboxError
from arl.api.fakes import ScriptedEngine
from arl.api.settings.algorithm import AlgorithmConfig, preset
from arl.api.settings.engines import ClientConfig
from arl.api.settings.presets import PRESETS
from arl.api.settings.run import Config, EventsConfig, LogConfig
from arl.api.settings.sections import settings_of
from arl.api.train_engine import PackedTokens, TokenLosses, TokenOutputs
from arl.api.workflow import Task
from arl.endpoint.anthropic import MessagesRequest
from arl.endpoint.chat import ChatRequest, CompletionRequest
from arl.endpoint.responses import ResponsesRequest
from arl.engine.client.server_pool import ServerPool
from arl.engine.client.server_processes import ServerProcesses
from arl.engine.client.watchdog import ServerWatch
from arl.engine.fsdp.minibatch import batch_metrics
from arl.engine.tiny import TURN_END, tiny_tokenizer, write_tiny_model
from arl.run.launch import launch
from arl.run.script import load_config
from arl.training.metrics_log import read_jsonl
from arl.workflow.teachers import ModelServer, TeacherClient

ROOT = Path(__file__).parents[1]
SOME = [{"number": 1}]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("guide", ["workflows", "endpoint", "running", "serving", "from_trl"])
async def test_the_code_of_a_guide_runs(guide: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(monkeypatch, lambda: ScriptedEngine(lambda request: [9, 9]))
    monkeypatch.setenv("ARL_ENDPOINT_KEY", "a-key-of-the-guide")
    await namespace_of(guide)
    if guide == "running":
        assert len(read_jsonl(Path("runs/adder/metrics.jsonl"))) == 2


async def test_the_code_of_the_guide_to_judges_runs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions that need the server of a reward model or a teacher are called at the end."""
    namespace = await namespace_of("judges")
    write_tiny_model(place / "model")
    monkeypatch.setattr(ModelServer, "ask", answer_of_a_model)
    for name, algorithm in (("train_judged", preset("decoupled_ppo")), ("distil", preset("distillation"))):
        use_fakes(monkeypatch, ScriptedEngine(lambda request: [9, 9]))
        config = small(Path("runs") / name, model="model", steps=1, rollout={"batch_size": 4}, algorithm=algorithm)
        await namespace[name](config, [{"question": f"{a} + 1 = ?", "answer": a + 1} for a in range(4)])
        assert len(read_jsonl(config.run_dir / "metrics.jsonl")) == 1


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory in which a guide may write and import; modules that it imports are gone with it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name, module in sys.modules.items() if str(tmp_path) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]


async def namespace_of(guide: str) -> dict[str, Any]:
    """Runs block after block in one namespace; a block that begins with `# name.py` is that file instead. A block ends
    early if it opens a sandbox and the machine has none."""
    document = ROOT / "docs" / f"{guide}.md"
    namespace: dict[str, Any] = {"__name__": "guide"}
    for block in python_blocks(document):
        if file_name(block):
            write(block)
            continue
        if "curl " in block and shutil.which("curl") is None:
            continue
        code = compile(block, document, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        try:
            if inspect.isawaitable(done := eval(code, namespace)):
                await done
        except SandboxError:  # the next blocks do not use what this one would have left
            if shutil.which("bwrap") or os.environ.get("ARL_NEEDS_SANDBOX"):
                raise
    return namespace


def file_name(block: str) -> str:
    """Of the file that a block is; "" for one to be run."""
    found = re.match(r"\s*# (\w+\.py)\n", block)
    return found[1] if found else ""


def write(block: str) -> None:
    Path(file_name(block)).write_text(block)


def test_the_commands_of_the_workflow_guide_print_what_it_says(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of its script; what is printed is the same but for times, and for the width of lines."""
    guide = ROOT / "docs" / "workflows.md"
    (script,) = [block for block in python_blocks(guide) if file_name(block) == "adder.py"]
    write(script)
    write_tiny_model(place / "model")
    tokenizer = tiny_tokenizer()
    sample = tokenizer.encode(f"It is 0.{TURN_END}")
    flags = ["--model", "model", "--run_dir", "run", "--rollout.batch_size", "4", "--rollout.group_size", "2"]
    printed: dict[str, str] = {}
    for line in re.findall(r"^    ((?:arl|python) .*adder\.py .*)$", guide.read_text(), re.MULTILINE):
        use_fakes(monkeypatch, ScriptedEngine(lambda request: sample))
        command, *rest = shlex.split(line.replace("--model DIR", "").replace("--steps 50", "--steps 1"))
        if command == "arl":
            arl_main([*rest, *flags])
        else:
            monkeypatch.delitem(sys.modules, "adder", raising=False)
            runpy.run_path("adder.py")["experiment"].main([*rest[1:], *flags, "--no-log.console"])
            shutil.copytree("model", "run/trained", dirs_exist_ok=True)
        printed[line] = capsys.readouterr().out
    (tried,) = [out for line, out in printed.items() if line.startswith("arl try")]
    (shown,) = re.findall(r"^```text\n(.*?)^```$", guide.read_text(), re.DOTALL | re.MULTILINE)
    assert without_times(tried) == without_times(shown)
    assert len([line for line in printed if line.startswith("arl eval")]) == 2


def without_times(text: str) -> list[str]:
    lines = [re.sub(r"─+", "─", re.sub(r"[\d.]+ (s|tokens/s)\b", r"N \1", line)) for line in text.splitlines()]
    return [line.rstrip() for line in lines if line.strip()]


def test_every_example_is_in_the_table() -> None:
    page = (ROOT / "docs" / "examples.md").read_text()
    scripts = [path for path in (ROOT / "examples" / "agents").glob("*.py") if "\nexperiment = " in path.read_text()]
    assert len(scripts) > 3
    assert [path.name for path in scripts if f"| `{path.name}` |" not in page] == []


def test_every_field_that_the_endpoint_knows_is_in_its_table() -> None:
    page = (ROOT / "docs" / "endpoint.md").read_text().partition("## What is honoured")[2]
    bodies = (ChatRequest, ResponsesRequest, MessagesRequest, CompletionRequest)
    known: set[str] = {"chat_template_kwargs"}
    for body in bodies:
        rules = body._rules
        known |= {
            *body.model_fields,
            *(name for kind in ("ignored", "only", "refused") for name in rules.get(kind, ())),
        }
    unnamed = {"model", "messages", "input", "tools"}
    assert {name for name in known - unnamed if f"`{name}" not in page} == set()


async def answer_of_a_model(server: ModelServer, path: str, payload: Any = None, **_: object) -> Any:
    """What a server answers that has a teacher or a reward model with the tiny model's tokens."""
    if path == "/model_info":
        return {"is_generation": isinstance(server, TeacherClient)}
    if path == "/tokenize":
        return {"tokens": tiny_tokenizer().encode(payload["prompt"], add_special_tokens=False)}
    if path == "/classify":
        return {"embedding": [1.0]}
    tokens = payload["input_ids"][payload["logprob_start_len"] :]
    return {"meta_info": {"input_token_logprobs": [[-0.5, token, None] for token in tokens]}}


async def test_every_metric_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(monkeypatch, lambda: ScriptedEngine(lambda request: [9, 9]))
    async with launch(small(tmp_path), workflow=OneTurn(), dataset=SOME) as trainer:
        *_, step = [step async for step in trainer]
    of_training = batch_metrics(LossReport(), 1)
    of_some_batches = {"straggler_episode_s", "overtaken_episode_s", "length/winning_tokens", "length/losing_tokens"}
    tasks = [Task(name="NAME", workflow=OneTurn(), dataset=SOME)]
    async with launch(small(tmp_path / "tasks"), tasks=tasks) as trainer:
        of_tasks = {name async for step in trainer for name in step.metrics if name.startswith("task/")}
    of_some_batches |= {f"turns/{part}_s" for part in ("release", "onload", "offload", "resume")}
    of_servers = {
        *ServerWatch(ServerPool(0), ClientConfig(), ServerProcesses([])).counters(),
        "servers/generated_tokens",
    }
    table = (ROOT / "docs" / "algorithms.md").read_text().partition("## Metrics")[2].partition("**To watch.**")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    explained = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert (
        explained - {"episode/NAME", "reward/NAME", "policies/NAME/METRIC", "policies/NAME/reward"}
        == step.metrics.keys() | of_training.keys() | names_of_the_loss() | of_some_batches | of_servers | of_tasks
    )


def names_of_the_loss() -> set[str]:
    """What the losses of all presets report, with K for a staleness, and NAME for the other metrics of a critic or a
    reward model."""
    one, index = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    tokens = PackedTokens(behavior_logprobs=one, versions=index, sequence_ids=index)
    outputs = TokenOutputs(logprobs=one, entropy=one, values=one)
    names = set[str]()
    group = grouped(trajectory(reward=0.0), trajectory(reward=1.0))
    for config in map(preset, PRESETS):
        names |= comparison_metrics(arranged(Batch.of([group]), config), config).keys()
        names |= reported(PolicyLoss.of(config, max_staleness=2)(outputs, tokens))
        if config.critic is not None:
            value = ValueLoss(value_clip=config.critic.value_clip)
            names |= {f"critic/{name}" for name in reported(value(outputs, tokens))} | {"critic/NAME"}
        if config.reward_model is not None:
            found = reported(ImplicitRewardLoss(beta=config.reward_model.beta)(outputs, tokens))
            names |= {f"reward_model/{name}" for name in found} | {"reward_model/NAME"}
    return {re.sub(r"^staleness_\d/", "staleness_K/", name) for name in names}


def reported(losses: TokenLosses) -> set[str]:
    kinds = (losses.means, losses.maxima, losses.weighted, losses.quotients, losses.sample_sizes)
    return {name for kind in kinds for name in kind}


def test_every_setting_under_log_has_its_row() -> None:
    page = (ROOT / "docs" / "running.md").read_text()
    rows = re.findall(r"^\| `(log\.[\w.]+)` \|", page, re.MULTILINE)
    names = {f"log.{name}" for name in LogConfig.model_fields} - {"log.events"}
    assert sorted(rows) == sorted(names | {f"log.events.{name}" for name in EventsConfig.model_fields})


def test_every_preset_has_its_row() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text()
    table = page.partition("## Presets")[2].partition("\n\nThree choices")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert rows == [f"| `{name}` | {about.paper} | {about.about} |" for name, about in PRESETS.items()]


def test_every_kind_of_every_part_is_explained() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text()
    schema = AlgorithmConfig.model_json_schema()
    fields = [field for part in (schema, *schema["$defs"].values()) for field in part["properties"].values()]
    choices = {choice for field in fields for choice in (field.get("enum") or [field.get("const")])}
    assert {choice for choice in choices if choice and f"`{choice}`" not in page} == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(document: Path) -> None:
    broken: list[str] = []
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        path, _, heading = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if "://" not in link and not (target.exists() and (not heading or heading in headings(target))):
            broken.append(link)
    assert broken == []


def headings(document: Path) -> set[str]:
    """The anchors that a renderer makes of headings."""
    lines = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def test_the_script_for_those_who_know_verl_trains_on_its_files_and_takes_the_flags_of_its_command(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = ROOT / "docs" / "from_verl.md"
    (script,) = python_blocks(guide)
    write(script)
    write_tiny_model(place / "model")
    rows = [
        {"data_source": "gsm8k", "prompt": [{"role": "user", "content": "1 + 1 = ?"}], "reward_model": truth}
        for truth in [{"style": "rule", "ground_truth": "2"}] * 4
    ]
    for name in ("train", "test"):
        parquet.write_table(pyarrow.Table.from_pylist(rows), f"{name}.parquet")
    (command,) = re.findall(r"^    (python gsm8k\.py (?:.*\\\n)+.*)$", guide.read_text(), re.MULTILINE)
    flags = shlex.split(command.replace("\\\n", " "))[2:]
    names: Any = importlib.import_module("gsm8k")
    config = load_config(names.Settings, flags)
    assert config.engine.arguments == ("--tp-size", "2")
    assert config.algorithm.minibatches * 256 == config.rollout.batch_size
    use_fakes(monkeypatch, ScriptedEngine(lambda request: tiny_tokenizer().encode(f"#### 2{TURN_END}")))
    small_flags = "--model model --run_dir run --steps 1 --rollout.batch_size 2 --rollout.group_size 2 --no-log.console"
    names.experiment.main([*flags[:6], *small_flags.split()])
    (row,) = read_jsonl(place / "run" / "metrics.jsonl")
    assert row["reward"] == 1.0


@pytest.mark.parametrize("guide", ["from_trl", "from_verl", "reward"])
def test_settings_that_a_guide_names_exist(guide: str) -> None:
    text = (ROOT / "docs" / f"{guide}.md").read_text()
    known = {setting.name for setting in settings_of(Config)}
    sections = {name.partition(".")[0] for name in known if "." in name} - {"model"}
    named = {name.partition("=")[0] for name in re.findall(r"`((?:[a-z_]+\.)+[a-z_]+)(?:=[^`]*)?`", text)}
    ours = {name for name in named if name.partition(".")[0] in sections and not name.startswith(THEIRS)}
    assert len(ours) > 5
    assert not ours - known


THEIRS = (
    *("algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo", "algorithm.gamma", "algorithm.lam"),
    *("algorithm.filter_groups", "algorithm.rollout_correction", "algorithm.use_kl_in_reward", "algorithm.kl_ctrl"),
)
"""Settings of verl that begin as arl's do."""


def test_the_extras_of_servers_ask_for_the_versions_that_the_guide_names() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"stock (SGLang|vLLM) ([\d.]+) or newer", (ROOT / "docs" / "servers.md").read_text())
    assert {name for name, _ in named} == {"SGLang", "vLLM"}
    assert all(extras[name.lower()] == [f"{name.lower()}>={version}"] for name, version in named)
