"""A batch as one flat record: the tokens of all its trajectories end to end, and columns that name their owners.

    groups          g0                g1
    trajectories    0     1    2      3       4        columns: group, episode, trajectories[i].role
    tokens          .....|....|......|.......|....     one tensor for each field, T tokens long

The algorithm works on these tensors by index. A train engine takes `sequences`: the same tensors.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, repeat

import numpy as np
import numpy.typing as npt
import torch

from arl.algorithm.flat_sequences import TENSORS, FlatSequences, of_each, unless_empty
from arl.api.routed_experts import Routes
from arl.api.sampling_mask import KeptIds
from arl.api.settings.algorithm import Aggregation
from arl.api.settings.objective import (
    ClipCovSelection,
    KLCovSelection,
    OverlongConfig,
    SecondMomentSelection,
    SelectionConfig,
)
from arl.api.train_engine import TrainSequence
from arl.api.types import Group, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """N trajectories with T tokens together. The tensors are TrainSequence's fields, [T] each.

    Never change one in place: fields that are not known yet may share their zeros.
    """

    groups: tuple[Group, ...]
    trajectories: tuple[Trajectory, ...]
    """[N] The trajectories of the groups, in their order."""
    group: tuple[int, ...]
    """[N] The place of each trajectory's group in `groups`."""
    episode: tuple[int, ...]
    """[N] A number for each episode and role. An episode that branched has several trajectories with its number."""
    lengths: tuple[int, ...]
    """[N] Tokens of each trajectory."""
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    behavior_logprobs: torch.Tensor
    proximal_logprobs: torch.Tensor
    """The behavior logprobs, until a forward pass has filled them in."""
    reference_logprobs: torch.Tensor
    advantages: torch.Tensor
    values: torch.Tensor
    returns: torch.Tensor
    selected: torch.Tensor
    turn_starts: torch.Tensor
    loss_weights: torch.Tensor
    versions: torch.Tensor
    units: tuple[int, ...] = ()
    """[N] Trajectories with the same number >= 0 are compared by the loss. Empty: none are."""
    kept_ids: KeptIds | None = None
    """[T] What each token was sampled among; None: all among the whole vocabulary."""
    routes: Routes | None = None
    """[T] Which experts computed each token; None: unknown of all."""
    implicit_rewards: torch.Tensor | None = None
    """float64[T]: the reward model's process rewards, also of masked-out trajectories; None without such a model."""

    @classmethod
    def of(cls, groups: Sequence[Group], overlong: OverlongConfig = OverlongConfig()) -> Batch:  # noqa: B008 - frozen
        """The groups' trajectories, with the sampler's logprobs and versions.

        With overlong.mask_truncated, those that a length limit ended train no token and count in no denominator.
        """
        trajectories = tuple(t for group in groups for t in group.trajectories)
        lengths = tuple(len(t.token_ids) for t in trajectories)
        numbers: dict[tuple[int, int, str], int] = {}
        members = [
            (place, episode, t.role)
            for place, group in enumerate(groups)
            for t, episode in zip(group.trajectories, group.episode_indices, strict=True)
        ]
        behavior = joined((t.behavior_logprobs for t in trajectories), np.float32)
        mask = joined((t.loss_mask for t in trajectories), np.bool_)
        if overlong.mask_truncated:
            is_cut = torch.tensor([t.is_truncated for t in trajectories], dtype=torch.bool)
            mask &= ~is_cut.repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
        unknown = torch.zeros(len(mask))
        nowhere = unknown.bool()
        return cls(
            groups=tuple(groups),
            trajectories=trajectories,
            group=tuple(place for place, _, _ in members),
            episode=tuple(numbers.setdefault(member, len(numbers)) for member in members),
            lengths=lengths,
            token_ids=joined((t.token_ids for t in trajectories), np.int32).long(),
            loss_mask=mask,
            behavior_logprobs=behavior,
            proximal_logprobs=behavior,
            reference_logprobs=unknown,
            advantages=unknown,
            values=unknown,
            returns=unknown,
            selected=nowhere,
            turn_starts=nowhere,
            loss_weights=unknown,
            versions=joined((t.versions for t in trajectories), np.int32).long(),
            kept_ids=KeptIds.joined([len(t.token_ids) if t.kept_ids is None else t.kept_ids for t in trajectories]),
            routes=Routes.joined([len(t.token_ids) if t.routes is None else t.routes for t in trajectories]),
        )

    def __len__(self) -> int:
        return len(self.trajectories)

    @property
    def starts(self) -> list[int]:
        """[N + 1] Where each trajectory's tokens begin, and T."""
        return list(accumulate(self.lengths, initial=0))

    @property
    def owners(self) -> torch.Tensor:
        """int64[T]: the number of each token's trajectory."""
        return self.repeated(torch.arange(len(self)))

    @property
    def counts(self) -> list[int]:
        """[N] Trained tokens of each trajectory."""
        return np.add.reduceat(self.loss_mask.numpy(), self.starts[:-1], dtype=np.int64).tolist() if len(self) else []

    def sums(self, values: torch.Tensor) -> list[float]:
        """[N] The sum of float[T] values over each trajectory's tokens, from its first to its last."""
        return torch.zeros(len(self), dtype=values.dtype).index_add_(0, self.owners, values).tolist()

    def over_tokens(self, values: Sequence[float]) -> torch.Tensor:
        """float64[T]: for each token the value of its trajectory."""
        return self.repeated(torch.tensor(values, dtype=torch.float64))

    def repeated(self, values: torch.Tensor) -> torch.Tensor:
        """[T] For each token its trajectory's one of [N] values."""
        return values.repeat_interleave(torch.tensor(self.lengths, dtype=torch.int64))

    def split(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of [T] values, one for each trajectory."""
        return values.split(self.lengths)

    @property
    def members(self) -> list[list[int]]:
        """The places of each group's trajectories."""
        members: list[list[int]] = [[] for _ in self.groups]
        for i, group in enumerate(self.group):
            members[group].append(i)
        return members

    def take(self, groups: Sequence[int]) -> Batch:
        """A batch of the groups at these places, in this order."""
        if list(groups) == list(range(len(self.groups))):
            return self
        members = self.members
        rows = [i for group in groups for i in members[group]]
        sizes = [sum(self.lengths[i] for i in own) for own in members]

        def of_these(column: torch.Tensor) -> torch.Tensor:
            views = column.split(sizes)
            return torch.cat([views[group] for group in groups]) if groups else column[:0]

        places = of_these(torch.arange(sum(self.lengths))).numpy()
        return Batch(
            groups=tuple(self.groups[group] for group in groups),
            trajectories=tuple(self.trajectories[i] for i in rows),
            group=tuple(chain.from_iterable(repeat(new, len(members[group])) for new, group in enumerate(groups))),
            episode=tuple(self.episode[i] for i in rows),
            lengths=tuple(self.lengths[i] for i in rows),
            **of_each(self._columns, of_these),
            units=tuple(self.units[i] for i in rows) if self.units else (),
            kept_ids=self.kept_ids and self.kept_ids.take(places),
            routes=self.routes and self.routes.take(places),
            implicit_rewards=None if self.implicit_rewards is None else of_these(self.implicit_rewards),
        )

    def sequences(self) -> FlatSequences:
        """[N] The trajectories for a train engine."""
        return FlatSequences(
            lengths=self.lengths,
            columns=self._columns,
            temperatures=tuple(t.temperature for t in self.trajectories),
            units=self.units or (-1,) * len(self),
            kept_ids=self.kept_ids,
            routes=self.routes,
            images=unless_empty(t.images for t in self.trajectories),
            arrays=unless_empty(t.arrays for t in self.trajectories),
        )

    @property
    def _columns(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name) for name in TENSORS}


def joined(rows: Iterable[npt.ArrayLike], dtype: npt.DTypeLike) -> torch.Tensor:
    """One flat tensor of all rows."""
    return torch.from_numpy(np.concatenate((np.zeros(0, dtype), *rows)).astype(dtype, copy=False))


def token_rewards(batch: Batch) -> torch.Tensor:
    """float64[T]: the trajectories' token_rewards; 0 for one that has none."""
    rows = (t.token_rewards for t in batch.trajectories)
    pairs = zip(rows, batch.lengths, strict=True)
    return joined((np.zeros(length) if row is None else row for row, length in pairs), np.float64)


def loss_weights(batch: Batch, aggregation: Aggregation, *, sequence_tokens: int = 1) -> torch.Tensor:
    """float32[T]: each token's share, so that the loss of `batch`, a minibatch, is sum(loss_weights * token loss).

    N, n_i, N_g: trained tokens in the minibatch, in an episode's trajectories of one role, and in group g. S and G:
    episodes (counted once for each role) and groups with trained tokens.

        token_mean (DAPO, 2503.14476, eq. 8):                    1 / N
        sequence_mean (GRPO, 2402.03300, eq. 3):                 1 / (S n_i)
        sequence_sum (Dr.GRPO, 2503.20783, section 3.2):         1 / (S sequence_tokens)
        group_mean (each group a token mean of its own):         1 / (G N_g)

    Call this before any split: the denominators are the whole minibatch's, so no split into microbatches or over ranks
    changes the loss. Untrained tokens weigh 0, and an episode without trained tokens counts nowhere.
    """
    of_episodes, of_groups = Counter[int](), Counter[int]()
    for group, episode, count in zip(batch.group, batch.episode, batch.counts, strict=True):
        of_episodes[episode] += count
        of_groups[group] += count
    num_episodes = sum(count > 0 for count in of_episodes.values())
    num_groups = sum(count > 0 for count in of_groups.values())
    match aggregation:
        case "token_mean":
            shares = [of_groups.total()] * len(batch)
        case "sequence_mean":
            shares = [num_episodes * of_episodes[episode] for episode in batch.episode]
        case "sequence_sum":
            shares = [num_episodes * sequence_tokens] * len(batch)
        case "group_mean":
            shares = [num_groups * of_groups[group] for group in batch.group]
    return batch.loss_mask * batch.repeated(1 / torch.tensor(shares, dtype=torch.float32).clamp(min=1))


def weigh_tokens(sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """The sequences of a minibatch with loss_weights 1 / N on each of their N trained tokens."""
    count = max(sum(int(s.loss_mask.sum()) for s in sequences), 1)
    return [replace(s, loss_weights=s.loss_mask.float() / count) for s in sequences]


# Selections: tokens that a loss treats apart


def selected_tokens(batch: Batch, config: SelectionConfig | None, *, seed: int) -> torch.Tensor:
    """bool[T]: the tokens that `config` chooses among the trained tokens of `batch`, a minibatch, before any split.

    The choice uses numbers from before any update on the batch: proximal_logprobs p, behavior_logprobs b and advantages
    A. The papers use current logprobs; before the first update these are p. The choice depends on the set of
    trajectories, not on their order, and a random one on `seed`.
    """
    if config is None:
        return batch.selected
    mask = batch.loss_mask
    fields = (batch.advantages, batch.proximal_logprobs, batch.behavior_logprobs)
    advantages, proximal, behavior = (values[mask].double() for values in fields)
    if config.kind == "second_moment":
        chosen = largest_moments(proximal - behavior, advantages, config)
    else:
        # fsum is exact, so the means do not depend on the order of the sequences.
        p, a = (values - math.fsum(values.tolist()) / max(len(values), 1) for values in (proximal, advantages))
        chosen = extreme_covariances(p * a, _random_keys(batch, seed)[mask], config)
    return torch.zeros_like(mask).masked_scatter(mask, chosen)


def largest_moments(log_ratio: torch.Tensor, advantages: torch.Tensor, config: SecondMomentSelection) -> torch.Tensor:
    """M2PO's mask (2510.01161), bool[N] over N trained tokens, True for tokens to leave out.

    Only tokens that a clip could affect count: A > 0 with a log-ratio p - b above 0, or A < 0 with one below 0. Of
    these, the tokens with the largest (p - b)^2 are left out until the mean over the rest is at most config.limit.
    Equal values go together. The authors' code differs: it bounds moments at a threshold instead of leaving tokens out,
    ignores ratios near 1, and uses c.
    """
    moments = log_ratio.square()
    is_concerned = advantages * log_ratio > 0
    ascending = moments[is_concerned].sort().values
    means = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1)
    # The last of a run of equal values decides for all of them.
    is_last_of_equals = torch.cat([ascending[1:] > ascending[:-1], torch.ones_like(ascending[:1]).bool()])
    kept = ascending[is_last_of_equals & (means <= config.limit)]
    largest_kept = kept[-1] if len(kept) else torch.tensor(-1.0)
    return is_concerned & (moments > largest_kept)


def extreme_covariances(
    covariances: torch.Tensor, keys: torch.Tensor, config: ClipCovSelection | KLCovSelection
) -> torch.Tensor:
    """Clip-Cov's and KL-Cov's choice (2505.22617, section 4), bool[N]: share * N tokens, rounded down, at least one.

    covariances: each token's (p - mean p) (A - mean A), both means over the N. keys: random numbers that draw tokens
    and order equal ones. clip_cov draws from the tokens with a covariance in [low, high], and takes all of these if
    they are too few. kl_cov takes the tokens with the largest covariance.
    """
    chosen = torch.zeros_like(covariances).bool()
    drawn = keys.argsort()
    if config.kind == "clip_cov":
        is_candidate = (covariances >= config.low) & (covariances <= config.high)
        ranked = drawn[is_candidate[drawn]]
    else:
        ranked = drawn[covariances[drawn].argsort(descending=True, stable=True)]
    chosen[ranked[: max(int(config.share * len(covariances)), 1)]] = True
    return chosen


def _random_keys(batch: Batch, seed: int) -> torch.Tensor:
    """A number in [0, 1) for each token, float64[T]: a function of the seed, its trajectory and its place there.

    The trainer's logprobs play no part, because other packings round them differently. Trajectories with equal samples
    are numbered in the order of their advantages.
    """
    columns = (batch.token_ids, batch.behavior_logprobs, batch.loss_mask, batch.advantages)
    contents: list[tuple[bytes, list[float]]] = []
    for ids, behavior, mask, advantages in zip(*map(batch.split, columns), strict=True):
        content = hashlib.sha256(array("q", ids.tolist()))
        content.update(array("d", behavior.tolist()))
        content.update(array("d", mask.tolist()))
        contents.append((content.digest(), advantages.tolist()))
    keys, seen = [torch.empty(0, dtype=torch.float64)] * len(batch), Counter[bytes]()
    for i in sorted(range(len(batch)), key=contents.__getitem__):
        content, _ = contents[i]
        seen[content] += 1
        origin = hashlib.sha256(content + f"{seed} {seen[content]}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(origin[:8], "little", signed=True))
        keys[i] = torch.rand(batch.lengths[i], dtype=torch.float64, generator=generator)
    return torch.cat([torch.empty(0, dtype=torch.float64), *keys])
