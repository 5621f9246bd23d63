"""Synchronous training with seeded sampling: a run that was killed and resumed has the numbers of one that was not.

So has a run whose trainer's process was killed, and which was not resumed.
"""

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from one_turn import OneTurn
from scripted_launch import small, use_fakes, use_scripted_servers
from transformers import AutoModelForCausalLM, PreTrainedModel

import arl.run.launch
from arl.api.engine import UpdateStats, WeightUpdate
from arl.api.events import TrainerRecovered
from arl.api.fakes import ScriptedEngine
from arl.api.types import ModelRequest, ModelResponse
from arl.engine.tiny import TinyShape, write_tiny_model
from arl.observe.events.run_record import read_run
from arl.run.learner import load_train_engine
from arl.training.metrics_log import read_jsonl

STEPS = 7


class DirectSampler(ScriptedEngine):
    """Samples with the published weights, one request at a time, from the request's seed alone."""

    def __init__(self) -> None:
        super().__init__(self._sample, version=-1)
        torch.set_num_threads(1)
        self._model: PreTrainedModel | None = None

    @torch.no_grad()
    def _sample(self, request: ModelRequest) -> ModelResponse:
        assert self._model is not None
        assert request.sampling.seed is not None
        generator = torch.Generator().manual_seed(request.sampling.seed)
        ids, logprobs = list(request.input_ids), []
        for _ in range(request.sampling.max_new_tokens):
            distribution = self._model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            ids.append(int(torch.multinomial(distribution.exp(), 1, generator=generator)))
            logprobs.append(float(distribution[ids[-1]]))
        new = len(logprobs)
        return ModelResponse(
            output_ids=tuple(ids[-new:]),
            output_logprobs=tuple(logprobs),
            output_versions=(self.version,) * new,
            stop_reason="length",
        )

    async def update_weights(self, update: WeightUpdate) -> UpdateStats:
        server: Any = SimpleNamespace(address="here", load_directory=self._load)
        await update.prepare(server)
        await update.load(server, flush_cache=True)
        return await super().update_weights(update)

    async def _load(self, directory: Path, *, version: int, flush_cache: bool) -> None:
        model = await asyncio.to_thread(AutoModelForCausalLM.from_pretrained, directory, dtype=torch.float32)
        self._model = model.eval()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = TinyShape(hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16)
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", shape=shape)


@contextlib.asynccontextmanager
async def running(
    model: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch, *, is_apart: bool = False
) -> AsyncIterator[Any]:
    """is_apart: it trains in a process of its own, as runs do."""
    with monkeypatch.context() as patch:
        if is_apart:
            use_scripted_servers(patch, DirectSampler)
        else:
            use_fakes(patch, DirectSampler, load=load_train_engine)
        async with launched(model, run_dir) as trainer:
            yield trainer


@contextlib.asynccontextmanager
async def launched(model: Path, run_dir: Path) -> AsyncIterator[Any]:
    config = small(
        run_dir,
        model=str(model),
        steps=STEPS,
        rollout={"group_size": 3, "max_staleness": 0, "seed_requests": True},
        train={"optimizer": {"lr": 1e-2}},
        algorithm={"minibatches": 2, "dynamic_sampling": True},
        checkpoint={"every": 2},
    )
    # Without a seed of its own: each episode of a group gets one, whenever the group runs.
    workflow = OneTurn(lambda first: {"reward": float(first % 2)})
    examples = [{"number": n} for n in range(11)]
    async with arl.run.launch.launch(config, workflow=workflow, dataset=examples) as trainer:
        yield trainer


def numbers(run_dir: Path) -> tuple[list[dict[str, float]], list[tuple[Any, ...]]]:
    """What does not depend on the clock: of each step, and of each trained trajectory, token by token."""
    names = ("version", "loss", "grad_norm", "reward", "entropy", "staleness/max", "episodes_trained")
    metrics = [{name: row[name] for name in names} for row in read_jsonl(run_dir / "metrics.jsonl")]
    run = read_run(run_dir)
    trained = sorted((e for e in run.episodes if e.step and not e.is_undone), key=lambda e: (e.step, e.episode))
    trajectories = [
        (e.step, e.episode, e.reward, {name: column.tobytes() for name, column in tokens.columns.items()})
        for e in trained
        for tokens in run.tokens(e)
    ]
    return metrics, trajectories


async def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with running(model, tmp_path / "whole", monkeypatch) as trainer:
        async for step in trainer:
            if step.version == 5:  # what a kill now leaves on the disk, but for what threads rename or remove
                changing = shutil.ignore_patterns(".writing-*", ".deleting-*", "arl-weights-*")
                shutil.copytree(tmp_path / "whole", tmp_path / "killed", ignore=changing)
    async with running(model, tmp_path / "killed", monkeypatch) as trainer:
        assert trainer.version in (2, 4)
        _ = [step async for step in trainer]
    whole, killed = numbers(tmp_path / "whole"), numbers(tmp_path / "killed")
    assert len({row["loss"] for row in whole[0]}) == STEPS
    assert len(whole[1]) == STEPS * 2 * 3
    assert {"advantages", "proximal_logprobs", "versions"} <= whole[1][0][-1].keys()
    assert killed == whole


@pytest.mark.slow
async def test_a_run_that_loses_its_trainers_process_equals_one_that_does_not_to_the_bit(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with running(model, tmp_path / "whole", monkeypatch) as trainer:
        _ = [step async for step in trainer]
        await trainer.export(tmp_path / "whole" / "model")
    async with running(model, tmp_path / "lost", monkeypatch, is_apart=True) as trainer:
        async for step in trainer:
            if step.version in (1, 5):  # before there is a checkpoint, and after
                os.kill(trainer.learner._learner._process.pid, signal.SIGKILL)
        os.kill(trainer.learner._learner._process.pid, signal.SIGKILL)
        await trainer.export(tmp_path / "lost" / "model")
    whole, lost = numbers(tmp_path / "whole"), numbers(tmp_path / "lost")
    assert len(whole[0]) == STEPS
    assert lost == whole
    name = "model.safetensors"
    assert (tmp_path / "lost" / "model" / name).read_bytes() == (tmp_path / "whole" / "model" / name).read_bytes()
    recovered = [record for _, record in read_run(tmp_path / "lost").system if isinstance(record, TrainerRecovered)]
    known = [(record.version, record.num_batches, "SIGKILL" in record.reason) for record in recovered]
    assert known == [(1, 1, True), (5, 1, True), (7, 0, True)]
    rows = read_jsonl(tmp_path / "lost" / "metrics.jsonl")
    assert [row["trainer/recoveries"] for row in rows] == [0, 1, 1, 1, 1, 2, 2]
