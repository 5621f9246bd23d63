"""A tiny Qwen3 with a byte-level tokenizer, slow references made of plain transformers calls, and batches of jobs."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import reference
import torch
from reference import close
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from arl.api.types import SamplingParams
from arl.engine.local.job import Job
from arl.engine.local.runner import ModelRunner
from arl.engine.local.running_batch import RunningBatch

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
) -> RunningBatch:
    runner = ModelRunner(model_dir, device="cpu", dtype="float32", max_rows=max_rows, context_length=context_length)
    return RunningBatch(
        runner,
        max_rows=max_rows,
        prefill_tokens=prefill_tokens,
        prefix_cache_bytes=prefix_cache_bytes,
        weight_version="0",
    )


class Reference(reference.Reference):
    """What plain transformers says of jobs."""

    def check(self, job: Job) -> None:
        """The model says of the job's tokens, given and sampled, what the job was told."""
        if job.logprob_start is not None:
            first = job.logprob_start + 1
            close(job.input_logprobs, self.logprobs(job.input_ids[:first], job.input_ids[first:]))
        if job.output_ids:
            close(job.output_logprobs, self.logprobs(job.input_ids, job.output_ids))
        assert job.is_done

    def check_greedy(self, *jobs: Job) -> None:
        for job in jobs:
            eos = None if job.sampling.ignore_eos else EOS
            assert job.output_ids == self.greedy(job.input_ids, job.sampling.max_new_tokens, eos=eos)


_rid = itertools.count()


def make_job(prompt: Sequence[int], *, stream: bool = False, **sampling: Any) -> Job:
    settings: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True, **sampling}
    return Job(f"job-{next(_rid)}", list(prompt), SamplingParams(**settings), stream=stream)


def prompt_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


def run_all(batch: RunningBatch, jobs: Sequence[Job] = ()) -> None:
    """Add jobs and step until nothing is left to do."""
    for job in jobs:
        batch.add(job)
    while not batch.is_idle:
        batch.step()


def step_until_sampled(batch: RunningBatch, job: Job, num_tokens: int) -> None:
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
