"""Tiny models on disk, slow references made of plain transformers calls, and batches of jobs."""

import itertools
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import reference
import torch
from reference import close
from transformers import AutoModelForCausalLM

from arl.api.types import SamplingParams
from arl.engine.local.runner import ModelRunner
from arl.engine.local.scheduler import IterationTimes, RunningBatch
from arl.engine.local.sequences import Job
from arl.engine.tiny import TinyShape, tiny_model, tiny_tokenizer

TOKENIZER: Any = tiny_tokenizer(("ab", "cd", "bc"))
"""One token for each byte, and a few for pairs, so that a string has several tokenizations."""
EOS: int = TOKENIZER.eos_token_id
# Weights so large that logits differ by units and not by thousandths.
SHAPE = TinyShape(
    hidden_size=32, intermediate_size=64, num_layers=2, num_kv_heads=2, head_dim=16, context_length=512,
    initializer_range=0.3,
)  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": 288, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3, "eos_token_id": EOS,
    "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
"""The same size, for configurations of other architectures."""


def build_model(seed: int) -> Any:
    return tiny_model(TOKENIZER, SHAPE, seed).eval()


def random_model(config: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


def with_random_vectors(model: Any, seed: int) -> Any:
    """Norms and biases, which begin as ones and zeros, become random numbers."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def save(model: Any, directory: Path) -> str:
    """Write a model and the tokenizer; returns the directory."""
    model.save_pretrained(directory)
    TOKENIZER.save_pretrained(directory)
    return str(directory)


def make_batch_of(
    model_dir: str,
    *,
    max_rows: int = 8,
    prefill_tokens: int = 64,
    prefix_cache_bytes: int = 1 << 24,
    context_length: int = 256,
    num_threads: int = 1,
) -> RunningBatch:
    runner = ModelRunner(
        model_dir,
        device="cpu",
        dtype="float32",
        max_rows=max_rows,
        context_length=context_length,
        num_threads=num_threads,
    )
    return RunningBatch(
        runner,
        max_rows=max_rows,
        prefill_tokens=prefill_tokens,
        prefix_cache_bytes=prefix_cache_bytes,
        weight_version="0",
        times=IterationTimes(is_alone=True),
    )


class Reference(reference.Reference):
    """What plain transformers says of jobs."""

    def check(self, job: Job) -> None:
        """The job's logprobs, of given and of sampled tokens, are the model's."""
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


def make_job(prompt: Sequence[int], **sampling: Any) -> Job:
    settings: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True, **sampling}
    return Job(f"job-{next(_rid)}", list(prompt), SamplingParams(**settings))


def scored(prompt: list[int], start: int = 0) -> Job:
    """A job that generates nothing: it asks for the logprobs of the prompt's tokens after `start`."""
    return replace(make_job(prompt), logprob_start=start, is_prefill_only=True)


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

    def __call__(self, jobs: Sequence[Job]) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait_done(self, *jobs: Job) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: all(job.is_done for job in jobs), timeout=30):
                raise TimeoutError("the scheduler did not deliver in 30 s")
