"""What plain transformers says of the tokens that a server sampled, one sequence at a time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache


class Reference:
    """A model, or the one in a directory, run by transformers."""

    def __init__(self, model: Any) -> None:
        is_path = isinstance(model, str | Path)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval() if is_path else model

    @torch.no_grad()
    def logits(self, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
        """float32[len(output), vocabulary]: those that each output token was sampled from."""
        tokens = torch.tensor([[*prompt, *output]])
        return self.model(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].float()

    def logprobs(self, prompt: Sequence[int], output: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
        """float32[len(output)] of log-softmax(logits / temperature)."""
        return chosen(self.logits(prompt, output) / temperature, output)

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], num_tokens: int, *, eos: int | None = None) -> list[int]:
        """By `generate`; ends early with the token `eos`."""
        output = self.model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=0,
        )
        return output[0, len(prompt) :].tolist()

    @torch.no_grad()
    def fill(self, cache: DynamicCache, tokens: Sequence[int]) -> torch.Tensor:
        """Logits float32[len(tokens), vocabulary] of more tokens, whose keys and values go into `cache`."""
        return self.model(torch.tensor([list(tokens)]), past_key_values=cache, use_cache=True).logits[0].float()

    def check_answer(self, answer: Any, prompt: Sequence[int], temperature: float = 1.0) -> None:
        """An answer of /generate has the model's logprobs of its tokens."""
        close(logprobs_of(answer), self.logprobs(prompt, answer["output_ids"], temperature))


def logprobs_of(answer: Any) -> list[float]:
    """Those that an answer of /generate has of its output tokens."""
    return [logprob for logprob, _, _ in answer["meta_info"]["output_token_logprobs"]]


def close(logprobs: Sequence[float], wanted: torch.Tensor, atol: float = 1e-4) -> None:
    torch.testing.assert_close(torch.tensor(logprobs), wanted, atol=atol, rtol=0)


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
    return chosen(torch.cat(logits), output)


def chosen(logits: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
