"""The code in docs/workflows.md runs as it stands, each metric is explained, and links lead somewhere."""

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch
from scripted_launch import use_fakes

from arl.algorithm.losses import PPOLoss
from arl.api import (
    Config,
    Example,
    InferenceEngine,
    ModelRequest,
    PackedTokens,
    RolloutWorkflow,
    SamplingParams,
    ScriptedEngine,
    Trajectory,
)
from arl.api.config import LogConfig, PPOConfig, RolloutConfig
from arl.engine.tally import MinibatchTally, mean_of_minibatches
from arl.launch import launch

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def python_blocks(document: Path) -> list[str]:
    """Each with as many empty lines before it as make its line numbers the document's."""
    text = document.read_text()
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return ["\n" * text.count("\n", 0, block.start(1)) + block[1] for block in found]


async def test_the_code_of_the_workflow_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block after block in one namespace; one that begins with `# name.py` is that file instead."""
    guide = ROOT / "docs" / "workflows.md"
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    use_fakes(monkeypatch, ScriptedEngine(lambda request: [9, 9]))
    namespace = {"__name__": "guide"}
    for block in python_blocks(guide):
        if file := re.match(r"\s*# (\w+\.py)\n", block):
            (tmp_path / file[1]).write_text(block)
            continue
        code = compile(block, guide, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if inspect.isawaitable(done := eval(code, namespace)):
            await done
    steps = (tmp_path / "runs" / "adder" / "metrics.jsonl").read_text().splitlines()
    assert len(steps) == 2


async def test_every_metric_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(monkeypatch, ScriptedEngine(lambda request: [9, 9]))
    rollout, log = RolloutConfig(batch_size=2, group_size=2), LogConfig(console=False, trajectories=0)
    config = Config(model="none", run_dir=tmp_path, steps=2, rollout=rollout, log=log)
    async with launch(config, workflow=OneTurn(), dataset=[{}]) as trainer:
        *_, step = [step async for step in trainer]
    of_training = mean_of_minibatches([MinibatchTally(budget=1, trained_tokens=1)])
    of_cutting = {"straggler_episode_s"}
    table = (ROOT / "docs" / "algorithm.md").read_text().partition("## Metrics")[2].partition("**To watch.**")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    explained = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert explained - {"episode/NAME"} == step.metrics.keys() | of_training.keys() | names_of_the_loss() | of_cutting


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
    one, index = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    tokens = PackedTokens(
        behavior_logprobs=one,
        proximal_logprobs=one,
        advantages=one,
        loss_weights=one,
        versions=index,
        sequence_ids=index,
    )
    losses = PPOLoss.of(PPOConfig())(one, one, tokens)
    return losses.means.keys() | losses.maxima.keys()


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
