"""Episodes of several contexts in a group: each counts once, and its oldest token is the oldest of all contexts."""

import math
from statistics import fmean, stdev
from typing import Any

import pytest
from records import grouped
from scripted_answers import TOKENIZER, ended

from arl.algorithm.advantages import with_advantages
from arl.algorithm.batch import Batch, loss_weights
from arl.api.algorithm import preset
from arl.api.scripted import ScriptedEngine
from arl.api.types import Group, ModelRequest, SamplingParams, Trajectory
from arl.workflow.compacting import CompactingConversation, Compaction

COMPACTION = Compaction(context_length=250, summary_tokens=30, instruction="Sum up.", handover="So far: {summary}")
REWARDS, NUM_CONTEXTS = [1.0, 0.0, 0.25, 1.0], [1, 3, 2, 4]


async def episode(reward: float, num_contexts: int, version: int) -> tuple[Trajectory, ...]:
    """Each turn is a version newer than the one before."""
    versions = iter(range(version, version + 100))
    engine = ScriptedEngine(lambda _: ended("a"))

    async def agenerate(request: ModelRequest) -> Any:
        engine._version = next(versions)
        return await engine.agenerate(request)

    sampler: Any = type("Aging", (), {"agenerate": staticmethod(agenerate)})()
    chat = CompactingConversation(TOKENIZER, [{"role": "user", "content": "?"}], COMPACTION)
    await chat.agenerate(sampler, SamplingParams(max_new_tokens=20))
    while len(chat.summaries) < num_contexts - 1:
        chat.add({"role": "user", "content": "x" * 100})
        await chat.agenerate(sampler, SamplingParams(max_new_tokens=20))
    states = ["start", *(None for _ in range(chat.num_turns - 1))]
    made = chat.trajectories(reward, states=states)
    assert len(made) == num_contexts
    return made


@pytest.fixture
async def group() -> Group:
    episodes = [await episode(r, n, version=5 + i) for i, (r, n) in enumerate(zip(REWARDS, NUM_CONTEXTS, strict=True))]
    indices = tuple(i for i, made in enumerate(episodes) for _ in made)
    return grouped(*(t for made in episodes for t in made), episode_indices=indices, stamp=9)


def advantages(group: Group, **advantage: Any) -> list[list[float]]:
    """Of each trajectory's trained tokens."""
    critic = {"critic": {}} if advantage["kind"] == "gae" else {}
    config = preset("decoupled_ppo", advantage=advantage, **critic)
    batch = with_advantages(Batch.of([group], config.overlong), config)
    column = batch.returns if critic else batch.advantages
    rows = zip(batch.split(column), group.trajectories, strict=True)
    return [[value for value, m in zip(row.tolist(), t.loss_mask, strict=True) if m] for row, t in rows]


async def test_advantages_are_those_of_four_episodes_however_many_contexts_they_have(group: Group) -> None:
    mean, total, n = fmean(REWARDS), math.fsum(REWARDS), len(REWARDS)
    plain = {
        ("group_mean", "group_std"): [(r - mean) / (stdev(REWARDS) + 1e-6) for r in REWARDS],
        ("leave_one_out", "none"): [r - (total - r) / (n - 1) for r in REWARDS],
    }
    for (baseline, scale), expected in plain.items():
        found = advantages(group, kind="returns", baseline=baseline, scale=scale)
        for index, row in zip(group.episode_indices, found, strict=True):
            assert row == pytest.approx([expected[index]] * len(row))


async def test_gigpo_compares_turns_and_leaves_summaries_to_the_outcome(group: Group) -> None:
    rows = advantages(group, kind="gigpo", scale="none", turn_discount=1.0)
    mean = fmean(REWARDS)
    firsts = dict(reversed([*zip(group.episode_indices, rows, strict=True)]))
    for index, reward in enumerate(REWARDS):
        assert firsts[index][0] == pytest.approx(2 * (reward - mean))  # as an episode, and as a turn in the same state
    for index, row, t in zip(group.episode_indices, rows, group.trajectories, strict=True):
        last = row[-(t.turns[-1].stop - t.turns[-1].start) :]
        if len(t.turns) > 1:
            assert last == pytest.approx([REWARDS[index] - mean] * len(last))


async def test_with_a_critic_every_context_ends_with_the_outcome(group: Group) -> None:
    rows = advantages(group, kind="gae", discount=1.0, lam=1.0)
    for index, row in zip(group.episode_indices, rows, strict=True):
        assert row == pytest.approx([REWARDS[index]] * len(row))


async def test_with_sequence_mean_each_episode_weighs_the_same(group: Group) -> None:
    batch = Batch.of([group], preset("grpo").overlong)
    weights = [float(row.sum()) for row in batch.split(loss_weights(batch, "sequence_mean"))]
    for i in range(len(REWARDS)):
        of_episode = [w for w, index in zip(weights, group.episode_indices, strict=True) if index == i]
        assert math.fsum(of_episode) == pytest.approx(1 / len(REWARDS))


async def test_the_oldest_token_is_the_first_contexts(group: Group) -> None:
    first, *_, last = [t for t, i in zip(group.trajectories, group.episode_indices, strict=True) if i == 3]
    assert (first.oldest_version, group.oldest_version) == (8, 5)
    assert last.oldest_version is not None
    assert last.oldest_version > 8
