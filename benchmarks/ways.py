"""What the ways of training and serving cost, on small random models, one thread.

    python benchmarks/ways.py

Training: forward and backward of a packed row, 8 sequences of 384 tokens that share 128, by a Qwen3 (4 layers, hidden
size 256) that is packed, and forced to be computed apart; and by a Qwen3-Next, whose recurrent layers are apart.
Serving: 16 requests of 64 tokens and 64 more, by a Qwen3-Next with states, and forced to use transformers' own caches.
Of five rounds in turns the best counts.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3NextConfig

from arl.api.train_engine import TrainSequence
from arl.api.types import SamplingParams
from arl.engine.fsdp.minibatch import build_microbatch
from arl.engine.fsdp.model import load_model
from arl.engine.fsdp.ways import RowDecoder
from arl.engine.local.runner import ModelRunner
from arl.engine.local.scheduler import IterationTimes, RunningBatch
from arl.engine.local.sequences import Job
from arl.engine.tiny import tiny_tokenizer

SHAPE = {
    "vocab_size": len(tiny_tokenizer()),
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
HYBRID = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}


def write(config: Qwen3Config | Qwen3NextConfig, directory: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def best(works: dict[str, Callable[[], object]], rounds: int = 5) -> dict[str, float]:
    """Seconds of each, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 1):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - began)
    return {name: min(taken[1:]) for name, taken in times.items()}


def training(directory: Path, way: str | None = None) -> tuple[str, Callable[[], object]]:
    loaded = load_model(directory)
    policy = loaded.token_model()
    if way is not None:
        loaded.decoder.close()
        policy.decode = RowDecoder(loaded.model, way)
    generator = torch.Generator().manual_seed(0)
    shared, mask = torch.randint(3, 250, (128,), generator=generator), torch.arange(384) >= 128
    texts = (torch.cat([shared, torch.randint(3, 250, (256,), generator=generator)]) for _ in range(8))
    batch = build_microbatch([TrainSequence(token_ids=t, loss_mask=mask) for t in texts], torch.device("cpu"))
    return policy.decode.way, lambda: policy(batch).logprobs.sum().backward()


def serving(directory: Path, way: str | None = None) -> tuple[str, Callable[[], object]]:
    runner = ModelRunner(str(directory), device="cpu", dtype="float32", max_rows=16, context_length=256)
    if way is not None:
        runner.way = way
        runner._go(way, runner._survey())

    def work() -> None:
        times = IterationTimes(is_alone=True)
        batch = RunningBatch(runner, max_rows=16, prefill_tokens=512, weight_version="0", times=times)
        sampling = SamplingParams(max_new_tokens=64, ignore_eos=True, temperature=1.0, seed=0)
        for i in range(16):
            ids = torch.randint(3, 250, (64,), generator=torch.Generator().manual_seed(i)).tolist()
            batch.add(Job(rid=str(i), input_ids=ids, sampling=sampling, extra_key=""))
        while not batch.is_idle:
            batch.step()

    return runner.way, work


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        dense = write(Qwen3Config(**SHAPE), Path(scratch, "qwen3"))
        hybrid = write(Qwen3NextConfig(**SHAPE, **HYBRID), Path(scratch, "qwen3_next"))
        works = dict([training(dense), training(dense, "apart sdpa")])
        for way, seconds in best(works).items():
            print(f"Qwen3 trained {way}: {seconds:.2f} s", flush=True)
        for way, seconds in best(dict([training(hybrid), training(hybrid, "apart sdpa")])).items():
            print(f"Qwen3-Next trained {way.split()[0]}: {seconds:.2f} s", flush=True)
        for way, seconds in best(dict([serving(hybrid), serving(hybrid, "own many")])).items():
            print(f"Qwen3-Next served by {way}: {16 * 64 / seconds:.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
