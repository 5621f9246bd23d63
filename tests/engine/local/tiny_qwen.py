"""A tiny Qwen3 with a byte-level tokenizer, slow references made of plain transformers calls, and batches of jobs."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedTokenizerFast, Qwen3Config

from arl.api.types import SamplingParams
from arl.engine.local.job import Job
from arl.engine.local.runner import ModelRunner
from arl.engine.local.running_batch import Batch

EOS = 256


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and a few for pairs, so that a string has several tokenizations."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate(alphabet)}
    vocab["<|end|>"] = EOS
    merges = [("a", "b"), ("c", "d"), ("b", "c")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "pad_token_id": None,
}
"""Weights so large that logits differ by units and not by thousandths."""


def build_model(seed: int, **changes: Any) -> Any:
    config = Qwen3Config(**(SIZES | {"head_dim": 16, "tie_word_embeddings": True} | changes))
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


def save(model: Any, directory: Path) -> str:
    """Write a model and the tokenizer; returns the directory."""
    model.save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    return str(directory)


def make_batch_of(
    model_dir: str,
    *,
    max_rows: int = 8,
    prefill_tokens: int = 64,
    prefix_cache_bytes: int = 1 << 24,
    context_length: int = 256,
) -> Batch:
    runner = ModelRunner(model_dir, device="cpu", dtype="float32", max_rows=max_rows, context_length=context_length)
    return Batch(
        runner,
        max_rows=max_rows,
        prefill_tokens=prefill_tokens,
        prefix_cache_bytes=prefix_cache_bytes,
        weight_version="0",
    )


class Reference:
    """What plain transformers says, one sequence at a time."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], max_new_tokens: int, *, ignore_eos: bool = False) -> list[int]:
        """By `generate`; ends early with the end-of-sequence token, unless that is ignored."""
        output = self.model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=None if ignore_eos else EOS,
            pad_token_id=0,
        )
        return output[0, len(prompt) :].tolist()

    @torch.no_grad()
    def logprobs(self, prompt: Sequence[int], output: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
        """float32[len(output)]: of each output token, by one forward over everything."""
        tokens = torch.tensor([*prompt, *output])
        logits = self.model(tokens[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        return (logits / temperature).log_softmax(-1).gather(1, tokens[len(prompt) :, None])[:, 0]

    def check(self, job: Job, temperature: float = 1.0) -> None:
        """The model says of the job's tokens, given and sampled, what the job was told."""
        if job.logprob_start is not None:
            first = job.logprob_start + 1
            close(job.input_logprobs, self.logprobs(job.input_ids[:first], job.input_ids[first:]))
        if job.output_ids:
            close(job.output_logprobs, self.logprobs(job.input_ids, job.output_ids, temperature))
        assert job.is_done

    def check_greedy(self, *jobs: Job) -> None:
        for job in jobs:
            wanted = self.greedy(job.input_ids, job.sampling.max_new_tokens, ignore_eos=job.sampling.ignore_eos)
            assert job.output_ids == wanted


def close(logprobs: Sequence[float], wanted: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(logprobs), wanted, atol=1e-4, rtol=0)


@torch.no_grad()
def logprobs_across_swap(
    before: Reference, after: Reference, prompt: Sequence[int], output: Sequence[int], num_before: int
) -> torch.Tensor:
    """Logprobs of output tokens when the weights change after `num_before` of them and the cache is kept.

    A DynamicCache is carried across: the tokens fed before the swap keep the keys and values of the old weights.
    """
    cache = DynamicCache()
    tokens = [*prompt, *output]
    fed, wanted = 0, []
    for index in range(len(output)):
        model = (before if index < num_before else after).model
        end = len(prompt) + index
        logits = model(torch.tensor([tokens[fed:end]]), past_key_values=cache, use_cache=True).logits[0, -1]
        wanted.append(logits.float().log_softmax(-1)[tokens[end]])
        fed = end
    return torch.stack(wanted)


_rid = itertools.count()


def make_job(prompt: Sequence[int], *, stream: bool = False, **sampling: Any) -> Job:
    settings: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True, **sampling}
    return Job(f"job-{next(_rid)}", list(prompt), SamplingParams(**settings), stream=stream)


def prompt_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


def run_all(batch: Batch, jobs: Sequence[Job] = ()) -> None:
    """Add jobs and step until nothing is left to do."""
    for job in jobs:
        batch.add(job)
    while not batch.is_idle:
        batch.step()


def step_until_sampled(batch: Batch, job: Job, num_tokens: int) -> None:
    while len(job.output_ids) < num_tokens:
        batch.step()


class Deliveries:
    """A deliver callback that lets tests wait for jobs."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.jobs: list[Job] = []

    def __call__(self, jobs: Sequence[Job]) -> None:
        with self._changed:
            self.jobs.extend(jobs)
            self._changed.notify_all()

    def wait_for(self, is_enough: Callable[[], bool]) -> None:
        with self._changed:
            if not self._changed.wait_for(is_enough, timeout=30):
                raise TimeoutError("the scheduler did not deliver in 30 s")

    def wait_done(self, *jobs: Job) -> None:
        self.wait_for(lambda: all(job.is_done for job in jobs))
