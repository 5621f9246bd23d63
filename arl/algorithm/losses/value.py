"""The critic's loss, alone and beside the policy's on a shared backbone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from arl.api.engine import PackedTokens, TokenLoss, TokenLosses, TokenOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """Clipped value loss (PPO's implementation; 2403.17031, section "value clipping"), with V the value now, V0 that
    before any update on the batch, and G the return:

        max((V - G)^2, (clip(V, V0 - value_clip, V0 + value_clip) - G)^2) / 2
    """

    value_clip: float | None

    def __call__(self, outputs: TokenOutputs, tokens: PackedTokens) -> TokenLosses:
        values, returns = outputs.values, tokens.returns
        unclipped = (values - returns).square()
        clipped = unclipped
        if self.value_clip is not None:
            moved = (values - tokens.values).clamp(-self.value_clip, self.value_clip)
            clipped = (tokens.values + moved - returns).square()
        error = (values - returns).detach()
        return TokenLosses(
            loss=torch.maximum(unclipped, clipped) / 2,
            means={
                "value": values.detach(),
                "value_error": error.abs(),
                "value_clip_fraction": (clipped > unclipped).detach().float(),
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorCriticLoss:
    """policy + coefficient * value, for a model with both heads."""

    policy: TokenLoss
    value: ValueLoss
    coefficient: float

    def __call__(self, outputs: TokenOutputs, tokens: PackedTokens) -> TokenLosses:
        policy, value = self.policy(outputs, tokens), self.value(outputs, tokens)
        return TokenLosses(
            loss=policy.loss + self.coefficient * value.loss,
            means={**policy.means, **{f"critic/{name}": v for name, v in value.means.items()}},
            maxima=policy.maxima,
            weighted={**policy.weighted, "critic/loss": value.loss.detach()},
            quotients=policy.quotients,
            sample_sizes=policy.sample_sizes,
        )
