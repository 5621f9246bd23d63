"""The parts of algorithms that compare whole episodes: DPO's pairs, KTO's labels, and their losses.

Formulas and papers are in docs/algorithms.md.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from arl.api.settings import Section


class PairsAdvantage(Section):
    """A = 1 for the better episode of a pair, -1 for the worse, for the dpo loss. Pairs are of one group and role;
    episodes without a pair train nothing. An episode's reward is the sum of all its rewards, process rewards included.
    """

    kind: Literal["pairs"] = "pairs"
    pairing: Literal["extremes", "ranks"] = "extremes"
    """extremes: the best episode with the worst. ranks: this pair, the second best with the second worst, and so on, as
    long as their rewards differ. Of equal rewards the episode that was started first comes first."""


class LabelsAdvantage(Section):
    """A = desirable_weight for desirable episodes, -undesirable_weight for undesirable ones, for the kto loss. Episodes
    without a label train nothing. An episode's reward is the sum of all its rewards, process rewards included."""

    kind: Literal["labels"] = "labels"
    threshold: float | None = None
    """An episode is desirable if its reward is above this, and undesirable otherwise. Unset: the mean of its group;
    episodes at the mean have no label."""
    desirable_weight: PositiveFloat = 1.0
    """KTO's lambda_D."""
    undesirable_weight: PositiveFloat = 1.0
    """KTO's lambda_U."""
    balanced: bool = False
    """Multiply each weight by n / (2 n_label), for n labelled episodes in the batch and n_label with the same label.
    Both labels then have the same sum of weights, whatever the share of successes, if the two weights are equal."""


class DPOLossConfig(Section):
    """-log sigmoid(beta h) of each pair, with h = the sum of c - reference over the better episode's trained tokens
    less that over the worse one's. It takes advantages of kind pairs."""

    kind: Literal["dpo"] = "dpo"
    beta: PositiveFloat = 0.1
    """How strongly the policy is held to the reference."""
    link: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """sigmoid: DPO. ipo: (h - 1 / (2 beta))^2. hinge: max(0, 1 - beta h), SLiC's."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """With sigmoid: the share e of pairs assumed the wrong way round (cDPO)."""

    @model_validator(mode="after")
    def _smooths_labels(self) -> Self:
        if self.label_smoothing and self.link != "sigmoid":
            raise ValueError(
                f"label_smoothing is {self.label_smoothing}, which is for link=sigmoid; link is {self.link}"
            )
        return self


class KTOLossConfig(Section):
    """abs(A) sigmoid(-beta (h - z0)) of a desirable episode, abs(A) sigmoid(beta (h - z0)) of an undesirable one, with
    h the sum of c - reference over its trained tokens. It takes advantages of kind labels."""

    kind: Literal["kto"] = "kto"
    beta: PositiveFloat = 0.1
    """How quickly gains and losses saturate: the smaller, the further the policy may go from the reference."""
