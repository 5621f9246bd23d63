"""The losses of fine-tuning: imitation, and losses on pairs of a chosen and a rejected sequence.

Each token of a pair carries the pair's whole loss, with weight 1 / (P n): P pairs in the minibatch, n tokens in this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F

from arl.api.train_engine import PackedTokens, TokenLosses, TokenOutputs, TrainSequence

Pair = tuple[TrainSequence, TrainSequence]
"""Chosen, rejected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTLoss:
    """Negative log-likelihood of the trained tokens."""

    def __call__(self, outputs: TokenOutputs, tokens: PackedTokens) -> TokenLosses:
        return TokenLosses(loss=-outputs.logprobs, means={"entropy": outputs.entropy.detach()})


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLoss:
    """DPO's or IPO's loss of a pair, with h = log-ratio of the chosen sequence - log-ratio of the rejected one:

        dpo (Rafailov et al. 2305.18290, eq. 7):   -log sigmoid(beta h)
        ipo (Azar et al. 2310.12036, eq. 17):      (h - 1 / (2 beta))^2

    plus sft times the mean of -c over the chosen sequence's trained tokens (Pang et al. 2404.19733, eq. 1).

    A sequence's log-ratio is the sum of c - reference over its trained tokens. Metrics, means over pairs: margin
    (beta h), accuracy (share of h > 0, ties count half), chosen_logratio, rejected_logratio, chosen_nll (the mean of
    -c).
    """

    kind: Literal["dpo", "ipo"] = "dpo"
    beta: float = 0.1
    """How strongly the model is held to the reference."""
    label_smoothing: float = 0.0
    """With dpo: the share e of labels assumed wrong. The loss is -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)
    (Mitchell 2023, "cDPO")."""
    mean_logprobs: bool = False
    """Use the mean over a sequence's tokens instead of the sum, so that length does not count."""
    sft: float = 0.0
    """The weight of imitating the chosen sequence: it keeps its likelihood from falling along with the rejected one's.
    1 in the paper."""

    def __post_init__(self) -> None:
        if self.kind not in ("dpo", "ipo"):
            raise ValueError(f"kind is {self.kind!r}; it must be dpo or ipo")
        if not self.beta > 0:
            raise ValueError(f"beta is {self.beta}; it must be above 0")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing is {self.label_smoothing}; it must be at least 0 and below 0.5")
        if not self.sft >= 0:
            raise ValueError(f"sft is {self.sft}; it must be at least 0")
        if self.label_smoothing and self.kind == "ipo":
            raise ValueError("label_smoothing is for kind=dpo; ipo has a target for h instead")

    def __call__(self, outputs: TokenOutputs, tokens: PackedTokens) -> TokenLosses:
        log_ratio = outputs.logprobs - tokens.reference_logprobs
        if self.mean_logprobs:
            log_ratio = log_ratio / _counts(tokens.sequence_ids)
        is_chosen = tokens.advantages > 0
        chosen = _per_unit(torch.where(is_chosen, log_ratio, 0), tokens)
        rejected = _per_unit(torch.where(is_chosen, 0, log_ratio), tokens)
        h = chosen - rejected
        if self.kind == "ipo":
            loss = (h - 1 / (2 * self.beta)).square()
        else:
            e = self.label_smoothing
            loss = -(1 - e) * F.logsigmoid(self.beta * h) - e * F.logsigmoid(-self.beta * h)
        nll = _per_unit(torch.where(is_chosen, -outputs.logprobs / _counts(tokens.sequence_ids), 0), tokens)
        loss = loss + self.sft * nll if self.sft else loss
        metrics = {
            "margin": self.beta * h,
            "accuracy": share_won(h),
            "chosen_logratio": chosen,
            "rejected_logratio": rejected,
            "chosen_nll": nll,
        }
        return TokenLosses(
            loss=loss[tokens.unit_ids],
            means={"entropy": outputs.entropy.detach()},
            weighted={name: value.detach()[tokens.unit_ids] for name, value in metrics.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelLoss:
    """Bradley-Terry (Ouyang et al. 2203.02155, eq. 1). The score s is the value of a sequence's one trained token:

        -log sigmoid(s_chosen - s_rejected) + center (s_chosen + s_rejected)^2

    Metrics, means over pairs: margin (the difference), accuracy (share above 0, ties count half), score.
    """

    center: float = 0.0
    """Keeps scores around 0, as pairs determine only differences. 0.01 in Eisenstein et al. 2312.09244."""

    def __call__(self, outputs: TokenOutputs, tokens: PackedTokens) -> TokenLosses:
        margin = _per_unit(outputs.values * tokens.advantages, tokens)
        total = _per_unit(outputs.values, tokens)
        loss = -F.logsigmoid(margin) + self.center * total.square()
        metrics = {"margin": margin, "accuracy": share_won(margin), "score": total / 2}
        return TokenLosses(
            loss=loss[tokens.unit_ids],
            weighted={name: value.detach()[tokens.unit_ids] for name, value in metrics.items()},
        )


def paired(pairs: Sequence[Pair]) -> list[TrainSequence]:
    """A minibatch of pairs: numbered units, advantages 1 and -1, and weights that make the loss a mean over pairs.

    Pairs without a trained token count nowhere.
    """
    counts = [int(chosen.loss_mask.sum() + rejected.loss_mask.sum()) for chosen, rejected in pairs]
    num_pairs = sum(count > 0 for count in counts)
    return [
        replace(
            sequence,
            unit=unit,
            advantages=sign * sequence.loss_mask.to(torch.float32),
            loss_weights=sequence.loss_mask.to(torch.float32) / max(num_pairs * count, 1),
        )
        for unit, (pair, count) in enumerate(zip(pairs, counts, strict=True))
        for sign, sequence in zip((1.0, -1.0), pair, strict=True)
    ]


def _per_unit(values: torch.Tensor, tokens: PackedTokens) -> torch.Tensor:
    """[U]: the sum of [M] values over each unit."""
    num_units = int(tokens.unit_ids.max()) + 1 if len(tokens.unit_ids) else 0
    return values.new_zeros(num_units).index_add(0, tokens.unit_ids, values)


def _counts(sequence_ids: torch.Tensor) -> torch.Tensor:
    """[M]: for each token, the number of trained tokens in its sequence."""
    return torch.bincount(sequence_ids)[sequence_ids] if len(sequence_ids) else sequence_ids


def share_won(differences: torch.Tensor) -> torch.Tensor:
    """1 where a difference is above 0, 0 below, 1/2 at 0: a policy that equals its reference is right by chance."""
    return (differences.sign() + 1) / 2
