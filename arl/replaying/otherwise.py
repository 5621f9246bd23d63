"""Trains the recorded steps under other settings: the same batch and weights, another loss, reward or learning rate.

                  +--> the run's own settings --> weights of the next step
weights, batch ---+                                  | gradients by layer, say by token
                  +--> the other settings -----------+--> ComparedStep
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from inspect import isfunction
from typing import Any

from arl.api.config import Config
from arl.api.errors import ConfigError, RecordingError
from arl.api.types import Group, Trajectory
from arl.object_process import ObjectProcess
from arl.replaying.compared_process import Comparison, compared_learners
from arl.replaying.recorded_run import RecordedRun, ReplayRange, other_settings
from arl.replaying.trained_steps import trained_steps
from arl.rewards.adapt import RewardLike, as_reward
from arl.rewards.score import Score
from arl.rewards.threads import ThreadReward
from arl.rollout.report import MORE_COLUMNS, is_cut
from arl.training.flat_groups import FlatBatch

_CONTEXT_TOKENS = 6
"""How many tokens before a changed one are shown with it."""

Decode = Callable[[list[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedStep:
    """One step under the run's own settings and under others."""

    version: int
    """The version on which both were trained."""
    comparison: Comparison
    names: tuple[str, ...]
    """For each of the comparison's tokens, its episode's name in the event log."""
    texts: tuple[tuple[str, str], ...]
    """For each of these tokens, the text before it and its own text."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Otherwise:
    """The changes of a replay under other settings."""

    changes: Mapping[str, Any]
    """Settings, section by section."""
    reward: RewardLike | None = None
    """Scores each trajectory's last turn again, with the recorded example; None keeps the rewards."""
    follow: bool = False
    """Whether the other settings continue from their own weights. Otherwise each step begins with the run's."""


def replay_otherwise(
    run: RecordedRun, which: ReplayRange, what: Otherwise, tokenizer: Any, episode_names: Callable[[Group], list[str]]
) -> Iterator[ComparedStep]:
    """tokenizer: of the run's model. episode_names: the name of the episode of each of a group's trajectories.

    Raises RecordingError, ConfigError and a learner's errors.
    """
    decode: Decode = lambda ids: str(tokenizer.decode(ids))  # noqa: E731
    steps = trained_steps(
        run,
        which,
        start=lambda own: _compared_process(own, other_settings(own, what.changes)),
        save=lambda process, directory: process.call("save", directory),
        load=lambda process, directory: process.call("load", directory),
    )
    for step, process, _ in steps:
        if step.version < which.first:
            process.call("pass_over", step.batch)
            continue
        other_batch = step.batch if what.reward is None else rescored(step.batch, what.reward, decode)
        comparison: Comparison = process.call("compare", step.batch, other_batch, what.follow)
        yield _named(step.version, comparison, step.batch, decode, episode_names)


def rescored(batch: FlatBatch, reward: RewardLike, decode: Decode) -> FlatBatch:
    """The same batch with new outcome rewards. Raises ConfigError, RecordingError, and RewardError from the reward."""
    new, replayed = batch.groups()
    for group in (*new, *replayed):
        if group.greedy_rewards:
            raise ConfigError("a greedy baseline was scored by the run's own reward, and cannot be scored again")
        if not group.example:
            raise RecordingError("the recording has no examples, which a reward needs")
    ready = as_reward(ThreadReward(reward) if isfunction(reward) else reward)

    async def score() -> list[list[Group]]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(ready)
            return [[await _with_rewards(group, ready, decode) for group in groups] for groups in (new, replayed)]

    with ThreadPoolExecutor(1) as thread:  # an event loop may run in this one
        new, replayed = thread.submit(asyncio.run, score()).result()
    return FlatBatch.of(new, replayed)


class RecordedExample(dict[str, Any]):
    """The columns of an example that the recording holds whole. Reading one that was cut raises RecordingError."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        super().__init__({name: value for name, value in columns.items() if not is_cut(value)})
        self._lacks = {*columns} - {*self}
        self._is_whole = MORE_COLUMNS not in columns

    def __missing__(self, name: str) -> Any:
        self._check(name)
        raise KeyError(name)

    def get(self, name: str, default: Any = None) -> Any:
        """The column, or the default if the example has none."""
        self._check(name)
        return super().get(name, default)

    def _check(self, name: str) -> None:
        if name in self._lacks or (name not in self and not self._is_whole):
            raise RecordingError(f"the recording does not hold the example's column {name!r} whole: it is too long")


async def _with_rewards(group: Group, reward: Any, decode: Decode) -> Group:
    example = RecordedExample(group.example)
    scores = await asyncio.gather(*(reward(_answer(t, decode), example) for t in group.trajectories))
    return replace(group, trajectories=tuple(map(_rewarded, group.trajectories, scores)))


def _rewarded(trajectory: Trajectory, score: Score) -> Trajectory:
    return replace(trajectory, reward=score.value, rewards=score.parts)


def _answer(trajectory: Trajectory, decode: Decode) -> str:
    """The text of the last turn; for a trajectory without turns, the text of all trained tokens."""
    if trajectory.turns:
        last = trajectory.turns[-1]
        ids = trajectory.token_ids[last.start : last.stop]
    else:
        ids = trajectory.token_ids[trajectory.loss_mask]
    return decode(ids.tolist())


def _compared_process(own: Config, other: Config) -> ObjectProcess:
    if differing := set(own.algorithm.trained_models) ^ set(other.algorithm.trained_models):
        role = min(differing)
        what = role.replace("_", " ")
        raise ConfigError(f"algorithm.{role} cannot be added or left out: a {what} learns over the whole run")
    if own.train.lora != other.train.lora:
        raise ConfigError("train.lora cannot differ: the recorded weights belong to the run's own parameters")
    threads = str(own.train.num_threads)
    return ObjectProcess(
        "the process of the replay",
        compared_learners(own, other),
        own.run_dir / "replay.log",
        {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
    )


def _named(
    version: int,
    comparison: Comparison,
    batch: FlatBatch,
    decode: Decode,
    episode_names: Callable[[Group], list[str]],
) -> ComparedStep:
    groups, _ = batch.groups()
    trajectories = [t for group in groups for t in group.trajectories]
    names = [name for group in groups for name in episode_names(group)]

    def text(trajectory: Trajectory, place: int) -> tuple[str, str]:
        ids = trajectory.token_ids.tolist()
        return decode(ids[max(place - _CONTEXT_TOKENS, 0) : place]), decode([ids[place]])

    return ComparedStep(
        version=version,
        comparison=comparison,
        names=tuple(names[token.trajectory] for token in comparison.tokens),
        texts=tuple(text(trajectories[token.trajectory], token.place) for token in comparison.tokens),
    )
