"""Whatever the preset: loss, gradient and metrics are the same however a minibatch is split into microbatches, and in
whatever order groups and trajectories come."""

import math
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from random_groups import MAX_STALENESS, VERSION, random_groups, reordered, seen_by_the_trainer

from arl.algorithm.advantages import with_advantages
from arl.algorithm.batch import loss_weights
from arl.algorithm.losses.reinforcement import PolicyLoss, ValueLoss
from arl.algorithm.losses.selection import selected_tokens
from arl.api.algorithm import AlgorithmConfig, preset
from arl.api.engine import PackedTokens, TokenLoss, TokenLosses, TokenOutputs
from arl.api.presets import PRESETS
from arl.api.types import TOKEN_FIELDS, Group, TrainSequence, Trajectory

Metrics = dict[str, float]
Gradients = dict[tuple[int, ...], list[torch.Tensor]]
"""By a sequence's tokens: of its logprobs, entropies and values."""


def config_of(name: str) -> AlgorithmConfig:
    """The preset with its clips as they are, in the regime that they are made for: several updates per batch."""
    shares = {"clip_cov": {"selection": {"share": 0.1, "low": 0.0}}, "kl_cov": {"selection": {"share": 0.1}}}
    return preset(name, minibatches=max(preset(name).minibatches, 2), **shares.get(name, {}))


def minibatch_of(groups: Sequence[Group], config: AlgorithmConfig) -> list[TrainSequence]:
    """As a Learner makes it of a batch that is one minibatch."""
    batch = with_advantages(seen_by_the_trainer(groups, config), config)
    weights = loss_weights(batch, config.aggregation, sequence_tokens=config.sequence_tokens)
    chosen = selected_tokens(batch, config.selection, seed=0)
    return replace(batch, selected=chosen, loss_weights=weights).sequences()


def loss_of(config: AlgorithmConfig) -> TokenLoss:
    policy = PolicyLoss.of(config, version=VERSION, max_staleness=MAX_STALENESS)
    if config.critic is None:
        return policy
    return partial(_both, policy, ValueLoss(value_clip=config.critic.value_clip))


def _both(policy: TokenLoss, value: TokenLoss, outputs: TokenOutputs, tokens: PackedTokens) -> TokenLosses:
    """The losses of a policy and its critic at once, as they share no output."""
    ours, critics = policy(outputs, tokens), value(outputs, tokens)
    return replace(ours, loss=ours.loss + critics.loss, means={**ours.means, **critics.means})


def tally(reports: Sequence[tuple[TokenLosses, torch.Tensor]]) -> Metrics:
    """What all metrics are made of: sums over the microbatches' tokens, or maxima."""
    columns: defaultdict[str, list[float]] = defaultdict(list)
    maxima: defaultdict[str, float] = defaultdict(lambda: -math.inf)
    for losses, weights in reports:
        values = {**losses.means, "num_tokens": torch.ones_like(weights)}
        values |= {f"weighted {name}": v * weights for name, v in losses.weighted.items()}
        values |= {f"{name}^{power}": v**power for name, v in losses.sample_sizes.items() for power in (1, 2)}
        values |= {f"{name} {part}": v for name, pair in losses.quotients.items() for part, v in enumerate(pair)}
        for name, v in values.items():
            columns[name] += v.tolist()
        for name, v in losses.maxima.items():
            maxima[name] = max(maxima[name], *v.tolist())
    return {name: math.fsum(column) for name, column in columns.items()} | maxima


def outputs_of(sequence: TrainSequence) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float64[trained tokens] of logprobs, entropies and values: what a model may say, following from the tokens."""
    mask = sequence.loss_mask
    generator = torch.Generator().manual_seed(1 + zlib.crc32(str(sequence.token_ids.tolist()).encode()))
    noise = torch.randn(2, int(mask.sum()), dtype=torch.float64, generator=generator)
    current = sequence.proximal_logprobs[mask].double() + noise[0]
    entropy, values = noise[1].abs(), sequence.values[mask].double() + noise[1]
    return current.requires_grad_(), entropy.requires_grad_(), values.requires_grad_()


def evaluated(microbatches: Sequence[Sequence[TrainSequence]], loss: TokenLoss) -> tuple[float, Gradients, Metrics]:
    total, reports = 0.0, list[tuple[TokenLosses, torch.Tensor]]()
    leaves: dict[tuple[int, ...], tuple[torch.Tensor, ...]] = {}
    for sequences in microbatches:
        outputs = [outputs_of(s) for s in sequences]
        leaves |= {tuple(s.token_ids.tolist()): row for s, row in zip(sequences, outputs, strict=True)}
        tokens = packed(sequences)
        logprobs, entropy, values = (torch.cat(column) for column in zip(*outputs, strict=True))
        losses = loss(TokenOutputs(logprobs=logprobs, entropy=entropy, values=values), tokens)
        weighed = (losses.loss * tokens.loss_weights.double()).sum()
        weighed.backward()
        total += weighed.item()
        reports.append((losses, tokens.loss_weights.double()))
    gradients = {key: [zeros_for_none(leaf) for leaf in row] for key, row in leaves.items()}
    return total, gradients, tally(reports)


def zeros_for_none(leaf: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def packed(sequences: Sequence[TrainSequence]) -> PackedTokens:
    fields = {name: torch.cat([getattr(s, name)[s.loss_mask] for s in sequences]) for name in TOKEN_FIELDS}
    fields = {name: value.double() if value.dtype == torch.float32 else value for name, value in fields.items()}
    numbers = [torch.full((int(s.loss_mask.sum()),), index) for index, s in enumerate(sequences)]
    ids = torch.cat(numbers)
    return PackedTokens(**fields, sequence_ids=ids, unit_ids=ids)


def assert_same(ours: tuple[float, Gradients, Metrics], theirs: tuple[float, Gradients, Metrics]) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=1e-9, abs=1e-12)
    assert ours[1].keys() == theirs[1].keys()
    for key, row in ours[1].items():
        for mine, other in zip(row, theirs[1][key], strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)
    assert ours[2] == pytest.approx(theirs[2], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", PRESETS)
def test_a_minibatch_may_be_split_into_any_microbatches(name: str) -> None:
    config = config_of(name)
    minibatch, loss = minibatch_of(random_groups(seed=1), config), loss_of(config)
    whole = evaluated([minibatch], loss)
    for count in (2, 3, 7):
        assert_same(evaluated(split(minibatch, count), loss), whole)


def split(sequences: Sequence[TrainSequence], count: int) -> list[list[TrainSequence]]:
    """At random, in any order, into parts of which one has a single sequence."""
    order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(count)).tolist()
    parts = [[order[0]], *(order[1 + k :: count - 1] for k in range(count - 1))]
    return [[sequences[i] for i in part] for part in parts]


@pytest.mark.parametrize("name", PRESETS)
def test_groups_and_trajectories_may_come_in_any_order(name: str) -> None:
    config, groups = config_of(name), random_groups(seed=2)
    loss = loss_of(config)
    expected = evaluated([minibatch_of(groups, config)], loss)
    for seed in (1, 2):
        assert_same(evaluated([minibatch_of(reordered(groups, seed), config)], loss), expected)


@pytest.mark.parametrize("name", PRESETS)
def test_the_random_batches_have_gradients_clips_and_several_stalenesses(name: str) -> None:
    """The batch has what the two properties are about: gradients, several stalenesses, and tokens that are clipped."""
    config = config_of(name)
    _, gradients, metrics = evaluated([minibatch_of(random_groups(seed=1), config)], loss_of(config))
    assert max(float(logprobs.abs().max()) for logprobs, _, _ in gradients.values() if len(logprobs)) > 1e-6
    assert all(math.isfinite(value) for value in metrics.values())
    assert all(metrics[f"staleness_{bucket}/tokens 0"] > 0 for bucket in ("0", "1", "2", "3-4"))
    assert config.selection is None or 0 < metrics["selected"] < metrics["num_tokens"]
    assert (metrics["clip_fraction"] > 0) == has_a_trust_region(config)


def has_a_trust_region(config: AlgorithmConfig) -> bool:
    loss = config.loss
    return loss.kind != "reinforce" and not (loss.kind == "ppo" and loss.clip_low is None)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov", "m2po"])
def test_the_selected_tokens_do_not_depend_on_how_logprobs_were_rounded(name: str) -> None:
    config = config_of(name)
    batch = with_advantages(seen_by_the_trainer(random_groups(seed=3), config), config)
    rounded = replace(batch, proximal_logprobs=batch.proximal_logprobs * (1 + 1e-6))
    expected = selected_tokens(batch, config.selection, seed=0)
    assert expected.any()
    assert torch.equal(selected_tokens(rounded, config.selection, seed=0), expected)


def test_trajectories_that_were_sampled_the_same_may_come_in_any_order() -> None:
    """Though their advantages differ, as those of answers to an environment that throws dice."""
    groups = random_groups(seed=3)
    first = groups[0].trajectories[0]
    twins, config = (replace(first, reward=-9.0), replace(first, reward=9.0)), config_of("clip_cov")

    def selected(pair: Sequence[Trajectory]) -> tuple[torch.Tensor, ...]:
        members = (*pair, *groups[0].trajectories[1:])
        together = replace(groups[0], trajectories=members, episode_indices=tuple(range(len(members))))
        batch = with_advantages(seen_by_the_trainer([together, *groups[1:]], config), config)
        return batch.split(selected_tokens(batch, config.selection, seed=0))

    one, other = selected(twins), selected(twins[::-1])
    assert torch.equal(one[0], other[1])
    assert torch.equal(one[1], other[0])
