"""The loss of imitation."""

from __future__ import annotations

from dataclasses import dataclass

from arl.api.engine import PackedTokens, TokenLosses, TokenOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTLoss:
    """Negative log-likelihood of the trained tokens; advantages and behavior logprobs play no part."""

    def __call__(self, outputs: TokenOutputs, tokens: PackedTokens) -> TokenLosses:
        return TokenLosses(loss=-outputs.logprobs, means={"entropy": outputs.entropy.detach()})
