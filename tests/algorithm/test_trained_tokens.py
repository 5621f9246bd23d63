"""The parts of a train engine of one process, against arl's own engine's, which splits and packs."""

import math
import random
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import pytest
import torch

from arl.algorithm.losses.reinforcement import PolicyLoss
from arl.algorithm.trained_tokens import LossReport, packed_tokens, unpacked
from arl.api.settings.algorithm import preset
from arl.api.train_engine import TOKEN_FIELDS, PackedTokens, TokenOutputs, TrainSequence
from arl.engine.fsdp import minibatch as tallies
from arl.engine.fsdp.minibatch import MinibatchTally, build_microbatch, mean_of_minibatches

LOSS = PolicyLoss.of(preset("decoupled_ppo", minibatches=2, loss={"kind": "gspo"}), version=4, max_staleness=4)
"""It reports by all of TokenLosses' ways but weighted."""


def sequence(seed: int, unit: int = -1) -> TrainSequence:
    chance = torch.Generator().manual_seed(seed)
    length = 3 + seed % 4
    columns: dict[str, Any] = {n: torch.randn(length, generator=chance).abs().neg() for n in TOKEN_FIELDS}
    columns |= {"selected": columns["selected"] > -0.5, "versions": torch.full((length,), seed % 5)}
    mask = torch.rand(length, generator=chance) < (0.7 if seed % 5 else 0.0)
    mask[0] = False
    return TrainSequence(token_ids=torch.arange(length), loss_mask=mask, unit=unit, **columns)


SEQUENCES = [sequence(seed, unit) for seed, unit in ((1, 7), (2, -1), (5, -1), (3, 7), (4, 2), (6, -1))]
"""The third has no trained token."""


def outputs(tokens: PackedTokens) -> TokenOutputs:
    c = tokens.behavior_logprobs * 0.9
    return TokenOutputs(logprobs=c, entropy=c.abs() / 2, values=c)


def test_trained_tokens_lie_as_arls_own_engine_packs_them() -> None:
    own = packed_tokens(SEQUENCES)
    packed = build_microbatch(SEQUENCES, torch.device("cpu"), share_prefixes=False).tokens
    for field in fields(PackedTokens):
        ours, theirs = getattr(own, field.name), getattr(packed, field.name)
        assert torch.equal(ours, theirs), field.name
        assert ours.dtype == theirs.dtype, field.name


def test_values_come_back_to_the_tokens_that_are_trained() -> None:
    tokens = packed_tokens(SEQUENCES)
    for fill in (0.0, math.nan):
        rows = unpacked(tokens.advantages, SEQUENCES, fill)
        for row, one in zip(rows, SEQUENCES, strict=True):
            wanted = [a if trained else fill for a, trained in zip(one.advantages.tolist(), one.loss_mask, strict=True)]
            assert row.tolist() == pytest.approx(wanted, nan_ok=True)


def split(sequences: Sequence[TrainSequence], seed: int) -> list[list[TrainSequence]]:
    """A random split in their order, between units, as a loss of trajectories needs it."""
    cut = random.Random(seed).randint(0, len(sequences))
    return [part for part in (list(sequences[:cut]), list(sequences[cut:])) if part]


@pytest.mark.parametrize("seed", range(4))
def test_what_is_reported_is_what_arls_own_engine_reports(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(tallies, "reduce_over", lambda *_: None)  # of one rank
    report, counted = LossReport(), list[MinibatchTally]()
    for minibatch in (SEQUENCES, SEQUENCES[:2], [SEQUENCES[2]]):
        tally = MinibatchTally(budget=100, lr=0.5, grad_norm=float(len(minibatch)))
        for part in split(minibatch, seed):
            tokens = packed_tokens(part)
            losses = LOSS(outputs(tokens), tokens)
            report.add(losses, tokens)
            packed = build_microbatch(part, torch.device("cpu"), share_prefixes=False)
            tally.add(packed, (losses.loss * tokens.loss_weights).sum(), losses)
        tally.reduce(torch.device("cpu"), None)  # pyright: ignore[reportArgumentType]
        counted.append(tally)
        report.end_minibatch(lr=0.5, grad_norm=float(len(minibatch)))
    theirs = mean_of_minibatches(counted)
    assert {
        "loss",
        "lr",
        "ratio",
        "ratio_max",
        "effective_sample_size",
        "staleness_3-4/tokens",
    } <= report.metrics.keys()
    assert report.metrics == pytest.approx({name: theirs[name] for name in report.metrics}, rel=1e-5)
