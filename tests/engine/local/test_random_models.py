"""Random small models and requests: each token is what transformers computes, under the weights that it names."""

import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import chosen, close
from tiny_qwen import SIZES, Reference, make_batch_of, make_job, prompt_of, random_model, save, with_random_vectors
from transformers import DynamicCache, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from arl.engine.local import runner, slot_attention
from arl.engine.local.sequences import Job

Part = tuple[Reference, int]
"""A model, and the end of the tokens that it computed."""
ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def random_config(rng: random.Random, family: type[Any]) -> Any:
    kv_heads, head_dim = rng.choice([1, 2, 3]), rng.choice([4, 16, 34])
    heads = kv_heads * rng.choice([1, 2, 3])
    sizes = {
        **SIZES, "vocab_size": rng.choice([288, 301]), "hidden_size": heads * head_dim, "num_attention_heads": heads,
        "intermediate_size": rng.choice([24, 40]), "num_hidden_layers": rng.choice([1, 2, 3]),
        "num_key_value_heads": kv_heads, "tie_word_embeddings": rng.random() < 0.5,
    }  # fmt: skip
    if family is Qwen2Config:
        return Qwen2Config(**sizes)
    sizes |= {"hidden_size": 36, "head_dim": head_dim}
    has_bias = {"attention_bias": rng.random() < 0.5}
    if family is LlamaConfig:
        return LlamaConfig(**sizes, **has_bias, rope_parameters={**ROPE, "original_max_position_embeddings": 32})
    return Qwen3Config(**sizes, **has_bias) if family is Qwen3Config else MistralConfig(**sizes, sliding_window=None)


def check(job: Job, parts: Sequence[Part], versions: Sequence[Reference]) -> None:
    """parts: what computed its tokens. versions: the models by their labels."""
    tokens, n = [*job.input_ids, *job.output_ids], len(job.input_ids)
    cache, start = DynamicCache(), 0
    logits, models = list[torch.Tensor](), list[Reference]()
    for model, end in parts:
        if start < (end := min(end, len(tokens))):
            logits.append(model.fill(cache, tokens[start:end]))
            models += [model] * (end - start)
            start = end
    if job.output_ids:
        sampled_from = torch.cat(logits)[n - 1 : -1] / job.sampling.logprob_temperature
        rounding = 6e-5 * sampled_from.abs().max().item()
        close(job.output_logprobs, chosen(sampled_from, job.output_ids), atol=rounding)
        assert [versions[int(label)] for label in job.versions] == models[n - 1 : -1]
        if job.sampling.temperature == 0:
            highest = sampled_from.amax(-1).tolist()
            assert all(
                row[i] >= most - rounding for row, i, most in zip(sampled_from, job.output_ids, highest, strict=True)
            )


@pytest.mark.parametrize(
    ("family", "num_threads"),
    [(Qwen2Config, 1), (Qwen2Config, 2), (Qwen3Config, 1), (Qwen3Config, 2), (LlamaConfig, 2), (MistralConfig, 2)],
)
def test_requests_that_join_and_leave_while_weights_change_are_computed_as_by_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: type[Any], num_threads: int
) -> None:
    rng = random.Random(f"{family.__name__} {num_threads}")
    monkeypatch.setattr(runner, "TOKENS_FOR_A_THREAD", 2)
    monkeypatch.setattr(slot_attention, "_BLOCK_ROWS", 2)
    monkeypatch.setattr(slot_attention, "_FIRST_ROWS", 2)
    monkeypatch.setattr(slot_attention, "_FIRST_CAPACITY", 8)
    config = random_config(rng, family)
    versions = [Reference(with_random_vectors(random_model(config, seed), seed)) for seed in range(2)]
    directory, most = save(versions[0].model, tmp_path), rng.choice([5, 30, 100])
    batch = make_batch_of(directory, max_rows=9, prefill_tokens=most, context_length=80, num_threads=num_threads)
    assert batch._runner._fused is not None
    prompts = [prompt_of(rng.randrange(1, 60), seed) for seed in range(3)]
    parts: defaultdict[Job, list[Part]] = defaultdict(list)
    num_steps = current = 0
    while num_steps < 25 or not batch.is_idle:
        for _ in range(rng.choice([0, 0, 1, 5]) if num_steps < 25 else 0):
            temperature, top_p = rng.choice([0.0, 1.0, 0.6]), rng.choice([1.0, 0.5])
            batch.add(
                make_job(rng.choice(prompts), max_new_tokens=rng.randrange(1, 9), temperature=temperature, top_p=top_p)
            )
        if rng.random() < 0.15:
            for row in batch._rows:
                parts[row.job].append((versions[current], row.num_computed))
            current = 1 - current
            batch.load(versions[current].model.state_dict(), str(current))
        aborted = batch.abort(rng.choice(batch._rows).job.rid) if batch._rows and rng.random() < 0.1 else []
        for job in [*aborted, *([] if batch.is_idle else batch.step())]:
            check(job, [*parts[job], (versions[current], 1000)], versions)
        num_steps += 1
    batch._runner.close()
