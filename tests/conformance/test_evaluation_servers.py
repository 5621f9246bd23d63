"""Servers for evaluations alone, of each kind: they get the evaluated weights, and training's servers get the rest."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from conformance.conftest import ON_EACH_KIND, Models
from embedded_server import server_process
from protocol_client import Client
from servers import Server, VLLMWatch, sglang, vllm

from arl.api.config import Config
from arl.api.engine import Sampler
from arl.api.events import TurnEnded
from arl.api.types import Example, SamplingParams, Trajectory
from arl.api.workflow import RolloutWorkflow
from arl.assembly import launch
from arl.eventlog.run_record import read_run
from arl.workflow.conversation import Conversation

EXAMPLES: Any = [{"number": n} for n in range(40)]
STEPS = 4


class FirstTokens(RolloutWorkflow):
    """The reward depends on the first token, so that groups differ and weights move."""

    def __init__(self, models: Models) -> None:
        self._tokenizer = models.tokenizer

    async def arun_episode(self, engine: Sampler, data: Example) -> Sequence[Trajectory]:
        chat = Conversation(self._tokenizer, [{"role": "user", "content": f"{data['number']}"}])
        turn = await chat.agenerate(engine, SamplingParams(max_new_tokens=8, ignore_eos=True))
        return chat.trajectories(float(turn.output_ids[0] % 2))


@pytest.fixture
def beside(server: Server, served: Models, tmp_path: Path) -> Iterator[str]:
    """Another server of the same kind."""
    if server.kind == "embedded":
        with server_process(str(served.directory_a)) as process:
            yield process.address
        return
    kinds: dict[str, AbstractContextManager[Server]] = {
        "sglang": sglang(served.directory_a, tmp_path / "beside.log", "--context-length", "256"),
        "vllm": vllm(served.directory_a, tmp_path / "beside.log", "--max-model-len", "256"),
    }
    with kinds[server.kind] as running:
        yield running.url


@pytest.mark.runs
@ON_EACH_KIND
async def test_an_evaluation_is_of_one_version_on_a_server_that_serves_nothing_else(
    client: Client | VLLMWatch, server: Server, beside: str, served: Models, tmp_path: Path
) -> None:
    config = Config.model_validate(
        {
            "model": str(served.directory_a), "run_dir": tmp_path / "run", "log": {"console": False}, "steps": STEPS,
            "engine": {"kind": "vllm" if server.kind == "vllm" else "sglang", "addresses": [server.url]},
            "evaluation": {"every": 2, "addresses": [beside], "keep_best": "reward"},
            "rollout": {"batch_size": 2, "group_size": 4}, "train": {"optimizer": {"lr": 1e-2}},
        }
    )  # fmt: skip
    workflow, held_out = FirstTokens(served), EXAMPLES[:3]
    async with launch(config, workflow=workflow, dataset=EXAMPLES, eval_dataset=held_out) as trainer:
        async for step in trainer:
            if step.version == 2:
                await trainer.evaluate()
    evaluations = trainer.evaluations
    assert [*evaluations] == [2, STEPS]
    assert [one.metrics["at_version"] for one in evaluations.values()] == [1.0, 1.0]
    run = read_run(tmp_path / "run")
    asked = {
        (call.server == beside, episode.group is None)
        for episode in run.episodes
        for call in run.calls_of(episode)
        if isinstance(call, TurnEnded)
    }
    assert asked == {(True, True), (False, False)}
    assert (tmp_path / "run" / "best" / "config.json").exists()
