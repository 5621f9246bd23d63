"""Losses of trained tokens, as pure functions of one microbatch. c current, p proximal, b behavior logprobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from arl.api.config import PPOConfig
from arl.api.engine import PackedTokens, TokenLosses

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exp. exp(20) = 5e8 is far beyond any clip, so no ratio that trains sensibly is
touched; but a token that the current policy all but excludes would overflow, and one inf makes the whole step nan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOLoss:
    """Decoupled PPO (Hilton et al. 2110.00641; with truncated weights as AReaL, 2505.24298, eq. 5), per token:

        r = exp(c - p)      w = min(exp(p - b), cap), detached
        loss = w * max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))

    bypassed: p := b, so r = exp(c - b) and w = 1. current: p := c, detached, which is what recomputing gives before
    the first optimizer step of a batch: a batch of one minibatch needs no forward pass for p. With p = b = c the
    gradient is REINFORCE's, -A grad c.

    Metrics (means unless said): ratio r; clip_fraction, the share of tokens that the clip leaves without gradient;
    behavior_weight w (also its maximum, and ratio's); behavior_kl_proximal and behavior_kl_current, estimates of
    KL(b || p) and KL(b || c) by k3 = exp(d) - 1 - d with d = p - b or c - b (Schulman 2020); entropy in nats.
    """

    clip_low: float
    clip_high: float
    proximal: Literal["recomputed", "bypassed", "current"] = "recomputed"
    behavior_weight_cap: float | None = None

    @classmethod
    def of(cls, config: PPOConfig) -> PPOLoss:
        return cls(
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            proximal="current" if config.proximal == "recomputed" and config.minibatches == 1 else config.proximal,
            behavior_weight_cap=config.behavior_weight_cap,
        )

    def __call__(self, current_logprobs: torch.Tensor, entropy: torch.Tensor, tokens: PackedTokens) -> TokenLosses:
        """current_logprobs, entropy float32[M] -> token losses float32[M]; finite for all finite logprobs."""
        behavior = tokens.behavior_logprobs
        choices = {"bypassed": behavior, "recomputed": tokens.proximal_logprobs, "current": current_logprobs.detach()}
        proximal = choices[self.proximal]
        ratio = torch.exp(_clamped(current_logprobs - proximal))
        weight = torch.exp(_clamped(proximal - behavior))
        if self.behavior_weight_cap is not None:
            weight = weight.clamp(max=self.behavior_weight_cap)
        unclipped = -tokens.advantages * ratio
        clipped = -tokens.advantages * ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        detached = ratio.detach()
        return TokenLosses(
            loss=weight * torch.maximum(unclipped, clipped),
            means={
                "ratio": detached,
                "clip_fraction": (clipped > unclipped).detach().float(),
                "behavior_weight": weight,
                "behavior_kl_proximal": _k3(proximal - behavior),
                "behavior_kl_current": _k3(current_logprobs.detach() - behavior),
                "entropy": entropy.detach(),
            },
            maxima={"ratio_max": detached, "behavior_weight_max": weight},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTLoss:
    """Negative log-likelihood of the trained tokens; advantages and behavior logprobs play no part."""

    def __call__(self, current_logprobs: torch.Tensor, entropy: torch.Tensor, tokens: PackedTokens) -> TokenLosses:
        return TokenLosses(loss=-current_logprobs, means={"entropy": entropy.detach()}, maxima={})


def _clamped(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(d) - 1 - d >= 0, whose mean under b estimates KL(b || .) for d = log(. / b), without bias and calmly."""
    d = _clamped(log_ratio)
    return torch.expm1(d) - d
