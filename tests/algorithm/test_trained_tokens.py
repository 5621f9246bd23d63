"""What losses are given and what is reported of them: as arl's own engine packs it, and by its definition."""

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
from arl.engine.fsdp.minibatch import build_microbatch

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


def of_minibatch(sequences: Sequence[TrainSequence]) -> tuple[dict[str, float], dict[str, float]]:
    """Means and maxima from one number after another, by TokenLosses' definitions."""
    tokens = packed_tokens(sequences)
    losses, weights = LOSS(outputs(tokens), tokens), tokens.loss_weights.tolist()
    found = {"loss": sum(w * x for w, x in zip(weights, losses.loss.tolist(), strict=True))}
    for name, values in losses.means.items():
        found[name] = sum(values.tolist()) / len(weights)
    for name, values in losses.weighted.items():
        found[name] = sum(w * x for w, x in zip(weights, values.tolist(), strict=True))
    for name, (above, below) in losses.quotients.items():
        if sum(below.tolist()):
            found[name] = sum(above.tolist()) / sum(below.tolist())
    for name, values in losses.sample_sizes.items():
        found[name] = sum(values.tolist()) ** 2 / (len(weights) * sum(v * v for v in values.tolist()))
    return found, {name: max(values.tolist()) for name, values in losses.maxima.items()}


@pytest.mark.parametrize("seed", range(4))
def test_a_report_is_over_all_trained_tokens_of_a_minibatch_however_it_is_split(seed: int) -> None:
    """A minibatch without trained tokens counts in no mean."""
    report, chance = LossReport(), random.Random(seed)
    for minibatch in (SEQUENCES, SEQUENCES[:2], [SEQUENCES[2]]):
        cut = chance.randint(0, len(minibatch))
        for part in (minibatch[:cut], minibatch[cut:]):
            if part:
                tokens = packed_tokens(part)
                report.add(LOSS(outputs(tokens), tokens), tokens, sequences=len(part))
        report.end_minibatch(lr=0.5, grad_norm=float(len(minibatch)))
    parts = [of_minibatch(SEQUENCES), of_minibatch(SEQUENCES[:2])]
    means = [found | {"lr": 0.5, "grad_norm": norm} for (found, _), norm in zip(parts, (6.0, 2.0), strict=True)]
    expected = {name: [found[name] for found in means if name in found] for name in means[0] | means[1]}
    largest = {name: max(found[name] for _, found in parts) for name in parts[0][1]}
    assert report.metrics == pytest.approx({n: sum(v) / len(v) for n, v in expected.items()} | largest, rel=1e-5)
    assert report.counts == {
        "trained_tokens": len(packed_tokens([*SEQUENCES, *SEQUENCES[:2]]).versions),
        "sequences": 9,
    }
