"""The flow policy: its steps against the paper's formulas in plain Python, its engines' promises, and a whole run."""

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import flow_engines
import flow_policy
import numpy as np
import pytest
import torch
from flow_engines import FileUpdate, FlowSampler, FlowSnapshot, FlowTrainEngine, outputs_of
from flow_model import NUM_PROMPTS, Velocity, pretrained, step_logprobs, transition
from flow_policy import Draw, FlowConfig, examples
from guides import python_blocks

import arl
from arl import extending
from arl.api.settings.algorithm import preset
from arl.extending import Group, Learner
from arl.training.batch_codec import FlatBatch


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pretrained(tmp_path_factory.mktemp("flow") / "model", num_updates=150)


def engine_of(model: Path, **settings: Any) -> FlowTrainEngine:
    return FlowTrainEngine(str(model), arl.TrainConfig(**settings), seed=0, head="policy")


async def sampler_of(model: Path, version: int = 0) -> FlowSampler:
    sampler = FlowSampler()
    await sampler.load_directory(model, version=version, flush_cache=False)
    return sampler


async def drawn_groups(model: Path, num_groups: int = 3, size: int = 4) -> list[Group]:
    sampler = await sampler_of(model)
    groups: list[Group] = []
    for number, data in enumerate(examples(num_groups, 5, 0.7)):
        drawn = await asyncio.gather(*(Draw().arun_episode(sampler, data) for _ in range(size)))
        group = Group(
            group_id=number, example_id=(0, number), stamp=0, trajectories=tuple(drawn), episode_indices=(*range(size),)
        )
        groups.append(group)
    return groups


def test_the_guide_shows_the_examples_own_lines() -> None:
    shown = python_blocks(Path(__file__).parents[2] / "docs" / "extending.md")
    sources = "".join(Path(module.__file__).read_text() for module in (flow_policy, flow_engines) if module.__file__)
    for block in shown[:2]:
        assert "".join(block.split()) in "".join(sources.split())


# The step -------------------------------------------------------------------------------------------------------------


def slow_step(
    v: tuple[float, ...], x: tuple[float, ...], k: int, num_steps: int, a: float
) -> tuple[list[float], float]:
    """Mean and standard deviation of Flow-GRPO's eq. 9, with its own negative dt."""
    t, dt = 1 - k / num_steps, -1 / num_steps
    sigma = a * math.sqrt(t / (1 - (t if t < 1 else 1 + dt)))
    mean = [xi + (vi + sigma**2 / (2 * t) * (xi + (1 - t) * vi)) * dt for xi, vi in zip(x, v, strict=True)]
    return mean, sigma * math.sqrt(-dt)


def slow_logprob(point: Sequence[float], mean: Sequence[float], std: float) -> float:
    densities = [
        math.exp(-((p - m) ** 2) / (2 * std**2)) / (std * math.sqrt(2 * math.pi))
        for p, m in zip(point, mean, strict=True)
    ]
    return math.log(math.prod(densities))


def test_a_steps_logprob_is_that_of_the_papers_gaussian() -> None:
    chance, velocity = random.Random(0), Velocity()
    for k in range(8):
        x, reached = ((chance.gauss(0, 1), chance.gauss(0, 1)) for _ in range(2))
        prompt, a = chance.randrange(NUM_PROMPTS), chance.uniform(0.3, 1.0)
        columns = torch.tensor([x]), torch.tensor([prompt]), torch.tensor([k]), torch.tensor([8]), torch.tensor([a])
        mean, std = transition(velocity, *columns)
        v = velocity(torch.tensor([x]), torch.tensor([1 - k / 8]), torch.tensor([prompt]))[0].tolist()
        slow_mean, slow_std = slow_step(v, x, k, 8, a)
        assert mean[0].tolist() == pytest.approx(slow_mean, abs=1e-5)
        assert std.item() == pytest.approx(slow_std, rel=1e-5)
        near = [m + std.item() * r for m, r in zip(slow_mean, reached, strict=True)]
        logprob = step_logprobs(torch.tensor([near]), mean, std).item()
        assert logprob == pytest.approx(slow_logprob(near, slow_mean, slow_std), abs=1e-4)


# The engines ----------------------------------------------------------------------------------------------------------


async def test_on_the_weights_that_sampled_the_ratio_is_1_also_after_the_way_to_the_trainer(model: Path) -> None:
    groups = await drawn_groups(model)
    flat = FlatBatch.of(groups)
    here, _ = flat.groups()
    learner = Learner(engine := engine_of(model), preset("grpo", kl={"coefficient": 0}))
    sequences = learner.prepare(here).batch.sequences()
    for sequence, current in zip(sequences, engine.forward(sequences), strict=True):
        # float32 rounds a mean by some 1e-7, which counts |z| / std times: 30 at the last steps, whose std is 0.1.
        assert current.tolist() == pytest.approx(sequence.behavior_logprobs.tolist(), abs=1e-5)
        assert current[0] == 0


def plain_objective(velocity: Velocity, groups: Sequence[Group], clip: float) -> torch.Tensor:
    """Flow-GRPO's eq. 5 without its KL, term by term: the mean over groups, episodes and steps."""
    terms: list[torch.Tensor] = []
    for group in groups:
        rewards = np.array([t.reward for t in group.trajectories])
        for t in group.trajectories:
            advantage = float((t.reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6))
            steps = len(t.token_ids) - 1
            x, prompt = torch.tensor(t.arrays["latents"]), torch.tensor([int(t.token_ids[0])])
            for k in range(steps):
                at = torch.tensor([k]), torch.tensor([steps]), torch.tensor([t.temperature])
                mean, std = transition(velocity, x[k : k + 1], prompt, *at)
                ratio = (step_logprobs(x[k + 1 : k + 2], mean, std) - float(t.behavior_logprobs[k + 1])).exp()
                terms.append(torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage) / steps)
    return torch.cat(terms).sum() / sum(len(group.trajectories) for group in groups)


async def test_a_batchs_gradient_is_that_of_the_papers_objective(model: Path) -> None:
    groups = await drawn_groups(model)
    moved = Velocity().read(model)
    with torch.no_grad():
        for parameter in moved.parameters():  # so that ratios differ from 1, and some are clipped
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad(plain_objective(moved, groups, 0.2), list(moved.parameters()))
    algorithm = preset("grpo", kl={"coefficient": 0}, proximal="bypassed", weights=())
    (minibatch,) = Learner(engine_of(model), algorithm).prepare(groups).minibatches
    tokens = extending.packed_tokens(minibatch)
    losses = extending.PolicyLoss.of(algorithm)(outputs_of(moved, minibatch), tokens)
    assert 0 < losses.means["clip_fraction"].mean() < 1
    found = torch.autograd.grad((losses.loss * tokens.loss_weights).sum(), list(moved.parameters()))
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.allclose(ours, -theirs, atol=1e-6, rtol=1e-4)


async def test_a_weight_update_in_mid_episode_shows_in_the_versions_of_its_steps(model: Path, tmp_path: Path) -> None:
    sampler = await sampler_of(model, version=4)
    (data,) = examples(1, 0, 0.7)
    episode = asyncio.create_task(Draw().arun_episode(sampler, data))
    for _ in range(3):
        await asyncio.sleep(0)
    await sampler.pause()
    for _ in range(9):
        await asyncio.sleep(0)
    assert not episode.done()
    await sampler.update_weights(FileUpdate(FlowSnapshot(5, Velocity()), tmp_path / "new"))
    await sampler.resume()
    versions = (await episode).versions.tolist()
    assert versions[0] == -1
    assert sorted(versions[1:]) == versions[1:]
    assert {*versions[1:]} == {4, 5}
    with pytest.raises(ValueError, match="holds version 5"):
        await sampler.update_weights(FileUpdate(FlowSnapshot(4, Velocity()), tmp_path / "old"))


async def test_requests_share_their_steps_and_a_seed_draws_the_same_points(model: Path) -> None:
    sampler = await sampler_of(model)
    requests = [
        arl.ModelRequest(
            input_ids=[prompt],
            arrays={"latents": np.ones((1, 2))},
            sampling=arl.SamplingParams(max_new_tokens=4, seed=prompt),
        )
        for prompt in (0, 1, 2)
    ]
    together = await asyncio.gather(*map(sampler.agenerate, requests))
    alone = [await sampler.agenerate(request) for request in reversed(requests)]
    for one, other in zip(together, reversed(alone), strict=True):
        assert np.allclose(one.arrays["latents"], other.arrays["latents"], atol=1e-6)


async def test_a_cancelled_request_ends_and_others_go_on(model: Path) -> None:
    sampler = await sampler_of(model)
    (data,) = examples(1, 0, 0.7)
    episode = asyncio.create_task(Draw().arun_episode(sampler, data))
    for _ in range(4):
        await asyncio.sleep(0)
    episode.cancel()
    await asyncio.wait([episode])
    assert (await Draw().arun_episode(sampler, data)).num_trained_tokens == flow_policy.NUM_STEPS


async def test_what_the_engines_cannot_honour_is_refused(model: Path, tmp_path: Path) -> None:
    sampler = await sampler_of(model)
    request = arl.ModelRequest(input_ids=[0], arrays={"latents": np.zeros((1, 2))})
    for sampling, said in ((arl.SamplingParams(top_k=3), "top_k=3"), (arl.SamplingParams(), "at most 64 steps")):
        with pytest.raises(ValueError, match=said):
            await sampler.agenerate(replace(request, sampling=sampling))
    with pytest.raises(extending.ConfigError, match="constant learning rate"):
        engine_of(model, optimizer={"warmup_steps": 5})
    for name, value in (
        ("lora", {}),
        ("dtype", "bfloat16"),
        ("device", "cuda"),
        ("max_tokens_per_microbatch", 64),
        ("compile", True),
        ("freeze_vision_tower", True),
    ):
        with pytest.raises(extending.ConfigError, match=f"train.{name} is set, and a flow policy takes max_recoveries"):
            engine_of(model, **{name: value})
    with pytest.raises(extending.ConfigError, match="no critic"):
        FlowTrainEngine(str(model), arl.TrainConfig(), seed=0, head="value")
    with pytest.raises(extending.ConfigError, match="no values here"):
        engine_of(model).forward([], "values")
    with pytest.raises(extending.CheckpointError, match="holds no flow policy"):
        engine_of(model).load(tmp_path)
    await sampler.aclose()
    with pytest.raises(extending.EngineClosedError):
        await sampler.agenerate(replace(request, sampling=arl.SamplingParams(max_new_tokens=2)))


async def test_a_loaded_engine_continues_to_the_bit_and_another_one_does_not_look_the_same(
    model: Path, tmp_path: Path
) -> None:
    groups = await drawn_groups(model)
    algorithm = preset("grpo", minibatches=3)  # with a reference
    first, other = (Learner(engine_of(model), algorithm) for _ in range(2))
    first.train(first.prepare(groups))
    first.save(tmp_path / "engine").wait()
    other.load(tmp_path / "engine")
    assert other.version == 1
    assert other.fingerprint() == first.fingerprint() != Learner(engine_of(model), algorithm).fingerprint()
    trained = [learner.train(learner.prepare(groups)).metrics for learner in (first, other)]
    assert trained[0] == trained[1]
    assert trained[0]["kl_reference"] > 0
    assert other.fingerprint() == first.fingerprint()


# A run ----------------------------------------------------------------------------------------------------------------


def launched(model: Path, run_dir: Path, **settings: Any) -> Any:
    config = FlowConfig(run_dir=run_dir, log={"console": False}, **settings)
    return arl.launch(
        config.model_copy(update={"model": str(model)}),
        workflow=Draw(),
        dataset=examples(64, 0, 0.7),
        eval_dataset=examples(64, 1, 0.0),
        engines=flow_engines.flow_engines(),
    )


@pytest.mark.runs
@pytest.mark.timeout(120)
async def test_a_run_learns_continues_from_its_checkpoint_and_accounts_for_every_step(
    model: Path, tmp_path: Path
) -> None:
    rollout = {"batch_size": 4, "group_size": 12, "max_staleness": 1, "replay_groups": 1}
    async with launched(model, tmp_path, steps=8, rollout=rollout) as trainer:
        before = await trainer.evaluate()
        first = [step async for step in trainer]
    assert (len(first), max(step.max_staleness_seen for step in first)) == (8, 1)
    async with launched(model, tmp_path, steps=10, rollout=rollout | {"num_workers": 1}) as trainer:
        assert trainer.version == 8
        assert [step.version async for step in trainer] == [9, 10]
        after = await trainer.evaluate()
        await trainer.export(tmp_path / "trained")
        counted = trainer.rollout.tokens.counted()
    assert after.reward > before.reward + 0.05
    assert counted.fates["trained"].tokens == 10 * 4 * 12 * flow_policy.NUM_STEPS
    assert counted.unknown == 0
    settled = sum(tally.tokens for tally in counted.fates.values())
    assert counted.received == settled + counted.open + counted.waiting
    engine_of(tmp_path / "trained")
    run = arl.read_run(tmp_path)
    assert [step["version"] for step in run.steps] == [*range(1, 11)]
