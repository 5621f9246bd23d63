"""Losses of demonstrations, pairs and whole episodes: SFT, DPO, IPO, KTO and Bradley-Terry.

A unit is what has one loss: a pair of answers, or one episode, with all their trajectories. It lies in one microbatch.
h is the sum of c - reference over trained tokens. Each token carries its unit's whole loss. Under sequence_mean, where
a token weighs 1 / (S n_i), the sum is the mean over units: S counts both episodes of a pair, and so does the sum. In
fine-tuning a token weighs 1 / (P n): P pairs in the minibatch, n tokens in this.

Online, on episodes that the policy has just sampled, no loss is an expectation under the policy: it asks for the same
order of the same episodes, whatever sampled them. So tokens of older versions need no weight (semi-online DPO,
2506.21495).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F

from arl.algorithm.losses.surrogates import ROUNDING, Surrogate, Trajectories
from arl.api.settings.objective import DPOLossConfig, KTOLossConfig
from arl.api.train_engine import PackedTokens, TokenLosses, TokenOutputs, TrainSequence

Pair = tuple[TrainSequence, TrainSequence]
"""Chosen, rejected."""


def preference(current: torch.Tensor, tokens: PackedTokens, config: DPOLossConfig | KTOLossConfig) -> Surrogate:
    """Online DPO (OAIF, 2402.04792) of a pair, or KTO of an episode."""
    log_ratio = current - tokens.reference_logprobs
    if isinstance(config, KTOLossConfig):
        return kto(log_ratio, tokens, config)
    return dpo(log_ratio, tokens, config.link, config.beta)


def dpo(
    log_ratio: torch.Tensor, tokens: PackedTokens, link: str, beta: float, label_smoothing: float = 0.0
) -> Surrogate:
    """DPO of a pair, with h = h_better - h_worse; A is 1 and -1:

        sigmoid (DPO, 2305.18290, eq. 7):   -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)
        ipo (2310.12036, eq. 17):           (h - 1 / (2 beta))^2
        hinge (SLiC, 2305.10425):           max(0, 1 - beta h)

    e is label_smoothing. Clipped: with hinge, pairs without gradient. Metrics, means over pairs: margin (beta h),
    accuracy (share of h > 0; a tie, up to rounding, counts half), chosen_logratio and rejected_logratio (h of each).
    """
    is_better = tokens.advantages > 0
    chosen = of_units(torch.where(is_better, log_ratio, 0), tokens)
    rejected = of_units(torch.where(is_better, 0, log_ratio), tokens)
    h = chosen - rejected
    is_held = torch.zeros_like(is_better)
    if link == "ipo":
        loss = (h - 1 / (2 * beta)).square()
    elif link == "hinge":
        loss = F.relu(1 - beta * h)
        is_held = (loss == 0).detach()
    else:
        e = label_smoothing
        loss = -(1 - e) * F.logsigmoid(beta * h) - e * F.logsigmoid(-beta * h)
    metrics = {
        "margin": beta * h,
        "accuracy": share_won(torch.where(h.abs() < ROUNDING, 0, h)),
        "chosen_logratio": chosen,
        "rejected_logratio": rejected,
    }
    return Surrogate(loss=loss, is_clipped=is_held, weighted={name: value.detach() for name, value in metrics.items()})


def kto(log_ratio: torch.Tensor, tokens: PackedTokens, config: KTOLossConfig) -> Surrogate:
    """KTO (2402.01306, eq. 8) of an episode, with A = lambda_D or -lambda_U (see LabelsAdvantage.balanced):

        desirable:     lambda_D (1 - sigmoid(beta (h - z0)))
        undesirable:   lambda_U (1 - sigmoid(beta (z0 - h)))

    z0 is in `tokens.values`, without gradient (arl.algorithm.groups.reference_points). Nothing is clipped. Metrics,
    means over episodes: reference_point (z0), desirable_logratio and undesirable_logratio (h of each label).
    """
    h, sign = of_units(log_ratio, tokens), tokens.advantages.sign()
    loss = tokens.advantages.abs() * torch.sigmoid(-sign * config.beta * (h - tokens.values))
    shares = {"desirable": (sign > 0) * tokens.loss_weights, "undesirable": (sign < 0) * tokens.loss_weights}
    return Surrogate(
        loss=loss,
        is_clipped=torch.zeros_like(sign).bool(),
        weighted={"reference_point": tokens.values},
        quotients={f"{label}_logratio": (share * h.detach(), share) for label, share in shares.items()},
    )


def of_units(values: torch.Tensor, tokens: PackedTokens) -> torch.Tensor:
    """float[M]: for each token the sum of `values` over its unit."""
    return Trajectories.of_units(tokens.unit_ids).sums(values)


def share_won(differences: torch.Tensor) -> torch.Tensor:
    """1 where a difference is above 0, 0 below, 1/2 at 0: a policy that equals its reference is right by chance."""
    return (differences.sign() + 1) / 2


# Fine-tuning


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTLoss:
    """Negative log-likelihood of the trained tokens."""

    def __call__(self, outputs: TokenOutputs, tokens: PackedTokens) -> TokenLosses:
        return TokenLosses(loss=-outputs.logprobs, means={"entropy": outputs.entropy.detach()})


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLoss:
    """DPO's (link sigmoid) or IPO's loss of a pair, see `dpo`, plus sft times the mean of -c over the chosen sequence's
    trained tokens (Pang et al. 2404.19733, eq. 1). Reports chosen_nll, the mean of -c, too.
    """

    kind: Literal["dpo", "ipo"] = "dpo"
    beta: float = 0.1
    """How strongly the model is held to the reference."""
    label_smoothing: float = 0.0
    """With dpo: the share e of labels assumed wrong (Mitchell 2023, "cDPO")."""
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
        counts = Trajectories.of(tokens.sequence_ids).counts
        log_ratio = (outputs.logprobs - tokens.reference_logprobs) / (counts if self.mean_logprobs else 1)
        pair = dpo(log_ratio, tokens, self.kind, self.beta, self.label_smoothing)
        nll = of_units(torch.where(tokens.advantages > 0, -outputs.logprobs / counts, 0), tokens)
        return TokenLosses(
            loss=pair.loss + self.sft * nll if self.sft else pair.loss,
            means={"entropy": outputs.entropy.detach()},
            weighted={**pair.weighted, "chosen_nll": nll.detach()},
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
        margin, total = of_units(outputs.values * tokens.advantages, tokens), of_units(outputs.values, tokens)
        metrics = {"margin": margin, "accuracy": share_won(margin), "score": total / 2}
        return TokenLosses(
            loss=-F.logsigmoid(margin) + self.center * total.square(),
            weighted={name: value.detach() for name, value in metrics.items()},
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
