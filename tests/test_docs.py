"""The code in docs/workflows.md runs as it stands; metrics, presets and kinds are explained; links lead somewhere."""

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from guides import python_blocks
from scripted_launch import use_fakes

from arl.algorithm.losses import PolicyLoss
from arl.algorithm.losses.value import ValueLoss
from arl.api import (
    Config,
    Example,
    InferenceEngine,
    ModelRequest,
    PackedTokens,
    RolloutWorkflow,
    SamplingParams,
    ScriptedEngine,
    TokenLosses,
    TokenOutputs,
    Trajectory,
)
from arl.api.algorithm import AlgorithmConfig, preset
from arl.api.config import LogConfig, RolloutConfig
from arl.api.presets import PRESETS
from arl.engine.tally import MinibatchTally, mean_of_minibatches
from arl.engine.tiny import tiny_tokenizer
from arl.launch import launch
from arl.metrics import read_jsonl
from arl.workflow.model_server import ModelServer
from arl.workflow.scoring import TeacherClient

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


async def test_the_code_of_the_workflow_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block after block in one namespace; one that begins with `# name.py` is that file instead. The functions that
    need the server of a reward model or a teacher are called at the end."""
    guide = ROOT / "docs" / "workflows.md"
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    use_fakes(monkeypatch, ScriptedEngine(lambda request: [9, 9]))
    namespace: dict[str, Any] = {"__name__": "guide"}
    for block in python_blocks(guide):
        if file := re.match(r"\s*# (\w+\.py)\n", block):
            (tmp_path / file[1]).write_text(block)
            continue
        code = compile(block, guide, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if inspect.isawaitable(done := eval(code, namespace)):
            await done
    assert len(read_jsonl(Path("runs/adder/metrics.jsonl"))) == 2
    monkeypatch.setattr(ModelServer, "ask", answer_of_a_model)
    for name, algorithm in (("train_judged", preset("decoupled_ppo")), ("distil", preset("distillation"))):
        use_fakes(monkeypatch, ScriptedEngine(lambda request: [9, 9]))
        rollout, run_dir = RolloutConfig(batch_size=4, group_size=2), Path("runs") / name
        log = LogConfig(console=False)
        config = Config(model="runs/tiny", run_dir=run_dir, steps=1, rollout=rollout, algorithm=algorithm, log=log)
        await namespace[name](config, [{"a": a, "b": 1, "question": f"{a} + 1 = ?"} for a in range(4)])
        assert len(read_jsonl(run_dir / "metrics.jsonl")) == 1


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
    use_fakes(monkeypatch, ScriptedEngine(lambda request: [9, 9]))
    rollout, log = RolloutConfig(batch_size=2, group_size=2), LogConfig(console=False, trajectories=0)
    config = Config(model="none", run_dir=tmp_path, steps=2, rollout=rollout, log=log)
    async with launch(config, workflow=OneTurn(), dataset=[{}]) as trainer:
        *_, step = [step async for step in trainer]
    of_training = mean_of_minibatches([MinibatchTally(budget=1, trained_tokens=1)])
    of_cutting = {"straggler_episode_s", "overtaken_episode_s"}
    table = (ROOT / "docs" / "algorithms.md").read_text().partition("## Metrics")[2].partition("**To watch.**")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    explained = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert (
        explained - {"episode/NAME", "reward/NAME"}
        == step.metrics.keys() | of_training.keys() | names_of_the_loss() | of_cutting
    )


class OneTurn(RolloutWorkflow):
    async def arun_episode(self, engine: InferenceEngine, data: Example) -> Trajectory:
        response = await engine.agenerate(ModelRequest(input_ids=[1], sampling=SamplingParams(max_new_tokens=2)))
        return Trajectory(
            token_ids=(1, *response.output_ids),
            loss_mask=(0, 1, 1),
            behavior_logprobs=(0.0, *response.output_logprobs),
            versions=(-1, *response.output_versions),
            reward=1.0,
        )


def names_of_the_loss() -> set[str]:
    """What the losses of all presets report, with K for a staleness, and NAME for a critic's other metrics."""
    one, index = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    tokens = PackedTokens(behavior_logprobs=one, versions=index, sequence_ids=index)
    outputs = TokenOutputs(logprobs=one, entropy=one, values=one)
    names = set[str]()
    for config in map(preset, PRESETS):
        names |= reported(PolicyLoss.of(config, max_staleness=2)(outputs, tokens))
        if config.critic is not None:
            value = ValueLoss(value_clip=config.critic.value_clip)
            names |= {f"critic/{name}" for name in reported(value(outputs, tokens))} | {"critic/NAME"}
    return {re.sub(r"^staleness_\d/", "staleness_K/", name) for name in names}


def reported(losses: TokenLosses) -> set[str]:
    kinds = (losses.means, losses.maxima, losses.weighted, losses.quotients, losses.sample_sizes)
    return {name for kind in kinds for name in kind}


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
