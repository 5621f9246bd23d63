"""The values that training computed for a batch's tokens, for the event log: some trajectories whole, all in
numbers."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from msgspec import structs

from arl.api.events import KeptTokens, TokenFrame
from arl.api.settings.algorithm import AlgorithmConfig
from arl.api.settings.run import NUM_NOTABLE, EventsConfig, is_sampled
from arl.api.train_engine import TensorPrint
from arl.api.types import Group, Trajectory
from arl.rollout.group import episode_name

if TYPE_CHECKING:
    import torch

    from arl.algorithm.batch import Batch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptBatch:
    """Values for a batch's new groups, whose N trajectories are numbered in order."""

    rows: list[int]
    """The numbers of the trajectories whose tokens are kept."""
    columns: dict[str, np.ndarray]
    """Name -> float32: for the trained tokens of these trajectories end to end. nan where training left a token out."""
    numbers: list[tuple[float, float, float, float]]
    """[N] Mean advantage, largest weight, clipped share and mean entropy over the trained tokens; 0.0 without any."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedBatch:
    """The results of training a batch."""

    metrics: dict[str, float]
    kept: KeptBatch | None = None
    """For the event log, if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWeights:
    """The fingerprints of a step's weights."""

    before: str
    """The digest of all tensors (arl.api.train_engine)."""
    after: Mapping[str, TensorPrint]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReportedBatch:
    """A TrainedBatch as the trainer's process tells of it."""

    metrics: dict[str, float]
    numbers: list[tuple[float, float, float, float]] = field(default_factory=list[tuple[float, float, float, float]])
    """KeptBatch's."""
    tokens: list[TokenFrame] = field(default_factory=list[TokenFrame])
    """The tokens of the rows that KeptBatch names."""
    weights: StepWeights | None = None
    """Set if the step is recorded."""
    cpu_s: float = 0.0
    """CPU seconds that the trainer's process used for the batch; 0 if they are unknown."""


Pack = Callable[[Sequence[KeptTokens]], Iterable[TokenFrame]]


def reported(trained: TrainedBatch, groups: Sequence[Group], pack: Pack) -> ReportedBatch:
    """groups: the new ones of the batch. What cannot be packed is left out, with a warning."""
    kept = trained.kept
    if kept is None:
        return ReportedBatch(metrics=trained.metrics)
    names, tokens = [row for group in groups for row in named(group)], list[TokenFrame]()
    if kept.rows:
        try:
            packed = pack([KeptTokens(rows=[names[row] for row in kept.rows], trained=kept.columns)])
            tokens.extend(structs.replace(frame, images=()) for frame in packed)
        except Exception as error:  # noqa: BLE001 (a log must not end the training)
            log.warning("the event log does not get the tokens of %d trajectories: %s", len(kept.rows), error)
    return ReportedBatch(metrics=trained.metrics, numbers=kept.numbers, tokens=tokens)


def named(group: Group) -> Iterator[tuple[str, int, Trajectory]]:
    """Each trajectory's episode, and its number there."""
    numbers = defaultdict[int, int](int)
    for index, trajectory in zip(group.episode_indices, group.trajectories, strict=True):
        yield episode_name(group.group_id, index), numbers[index], trajectory
        numbers[index] += 1


def kept_batch(
    batch: Batch,
    num_groups: int,
    parts: Sequence[tuple[Sequence[int], Mapping[str, torch.Tensor]]],
    config: EventsConfig,
    algorithm: AlgorithmConfig,
) -> KeptBatch:
    """num_groups: how many of the batch's groups are new. parts: for each minibatch, in the order of training, the
    numbers of its trajectories in `batch`, and TrainEngine.kept of it: later ones prevail.
    """
    known = ["advantages"]
    known += ["reference_logprobs"] if algorithm.needs_reference else []
    known += ["values", "returns"] if algorithm.critic else []
    known += ["implicit_rewards"] if algorithm.reward_model else []
    columns = {name: getattr(batch, name).float().numpy() for name in known}
    if algorithm.has_critic_of_turns:  # it says nothing of other tokens
        starts = batch.turn_starts.numpy()
        columns |= {name: np.where(starts, columns[name], np.float32(np.nan)) for name in ("values", "returns")}
    for rows, kept in parts:
        places = _places(batch, rows)
        for name, values in kept.items():
            columns.setdefault(name, np.full(batch.starts[-1], np.nan, np.float32))[places] = values.numpy()
    num_new = sum(len(group.trajectories) for group in batch.groups[:num_groups])
    numbers = _numbers(batch, columns)[:num_new]
    chosen = choose(batch.groups[:num_groups], [weight for _, weight, _, _ in numbers], config)
    masks = [batch.trajectories[row].loss_mask for row in chosen]
    places = _places(batch, chosen)[np.concatenate(masks)] if masks else np.zeros(0, np.int64)
    is_trained = batch.loss_mask.numpy()[places]
    own = {name: np.where(is_trained, column[places], np.float32(np.nan)) for name, column in columns.items()}
    return KeptBatch(rows=chosen, columns=own, numbers=numbers)


def _places(batch: Batch, rows: Sequence[int]) -> np.ndarray:
    """int64: the places of the tokens of these trajectories, end to end."""
    lengths, begins = (np.array(column, np.int64)[[*rows]] for column in (batch.lengths, batch.starts))
    shifts = begins - (lengths.cumsum() - lengths)
    return np.repeat(shifts, lengths) + np.arange(lengths.sum())


def _numbers(batch: Batch, columns: Mapping[str, np.ndarray]) -> list[tuple[float, float, float, float]]:
    """For each trajectory."""
    if not len(batch):
        return []
    mask, owners = batch.loss_mask.numpy(), np.repeat(np.arange(len(batch)), batch.counts)
    counts, zeros = np.maximum(batch.counts, 1), np.zeros(len(mask), np.float32)

    def of_trained(name: str) -> np.ndarray:
        return np.nan_to_num(columns.get(name, zeros)[mask])

    def means(name: str) -> list[float]:
        return (np.bincount(owners, of_trained(name), len(batch)) / counts).tolist()

    largest = np.zeros(len(batch))
    np.maximum.at(largest, owners, of_trained("weights"))
    return [*zip(means("advantages"), largest.tolist(), means("clipped"), means("entropy"), strict=True)]


def choose(groups: Sequence[Group], weights: Sequence[float], config: EventsConfig) -> list[int]:
    """The numbers of the trajectories whose tokens are kept. weights: the largest weight of each."""
    trajectories = [t for group in groups for t in group.trajectories]
    keeps = config.keeps(sum(len(t.token_ids) for t in trajectories))
    if keeps != "sampled":
        return list(range(len(trajectories))) if keeps == "all" else []
    owners = [group for group in groups for _ in group.trajectories]
    chosen = {i for i, group in enumerate(owners) if is_sampled(group.group_id)}
    oldest = [np.inf if t.oldest_version is None else t.oldest_version for t in trajectories]
    ranks = (
        lambda i: trajectories[i].total_reward,
        lambda i: -trajectories[i].total_reward,
        lambda i: len(trajectories[i].token_ids),
        lambda i: -oldest[i],
        lambda i: weights[i],
    )
    for rank in ranks:
        chosen.update(sorted(range(len(trajectories)), key=rank, reverse=True)[:NUM_NOTABLE])
    return sorted(chosen)
