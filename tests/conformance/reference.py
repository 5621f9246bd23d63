"""What plain transformers says of the tokens that a server sampled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache


class Reference:
    """A model directory, run by transformers, one sequence at a time."""

    def __init__(self, directory: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    @torch.no_grad()
    def logits(self, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
        """float32[len(output), vocabulary]: those that each output token was sampled from."""
        tokens = torch.tensor([[*prompt, *output]])
        return self._model(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].float()

    def logprobs(self, prompt: Sequence[int], output: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
        """float32[len(output)] of log-softmax(logits / temperature)."""
        return _chosen(self.logits(prompt, output) / temperature, output)

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(int(self.logits(tokens, [0])[-1].argmax()))
        return tokens[len(prompt) :]

    @torch.no_grad()
    def fill(self, cache: DynamicCache, tokens: Sequence[int]) -> torch.Tensor:
        """Logits float32[len(tokens), vocabulary] of more tokens, whose keys and values go into `cache`."""
        return self._model(torch.tensor([list(tokens)]), past_key_values=cache, use_cache=True).logits[0].float()


def logprobs_across(
    parts: Sequence[tuple[Reference, int]], prompt: Sequence[int], output: Sequence[int]
) -> torch.Tensor:
    """Logprobs of `output` when the weights changed under way and the keys and values stayed.

    parts: the models in turn, each with the number of output tokens that it sampled. A token's keys and values are of
    the weights under which it was computed, that is, with which the token after it was sampled.
    """
    cache = DynamicCache()
    tokens = [*prompt, *output]
    fed, end, logits = 0, len(prompt), []
    for reference, count in parts:
        logits.append(reference.fill(cache, tokens[fed : end + count - 1])[-count:])
        fed, end = end + count - 1, end + count
    return _chosen(torch.cat(logits), output)


def _chosen(logits: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
