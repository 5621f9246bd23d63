"""How fast one GPU trains, publishes and samples: Qwen3 shapes with random weights, nothing downloaded.

    python benchmarks/gpu.py --shape qwen3-4b --compile
    python benchmarks/gpu.py --shape tiny --device cpu          # the same program, to see that it runs

Parts (--parts, all by default):

    train     optimizer steps on --tokens tokens in sequences of --sequence-length, every token but the first trained
    logprobs  token_logprobs forward and backward on --tokens tokens alone: time, and memory beside its arguments
    publish   an export, and weight updates of an embedded server by disk and by process group
    serve     the embedded server over HTTP: tokens/s at several numbers of concurrent requests

**Model FLOPs.** A matrix product with P weights costs 2 P FLOPs for each token forward and 4 P backward. With N the
weights of all layers' matrices, V H those of the head, T tokens, M of them trained, L layers of h heads of size d, and
sequences of lengths n_s (half of a causal mask is computed: 2 n^2 h d for the scores and the values together):

    6 N T + 6 V H M + 3 L sum_s 2 n_s^2 h d

Operations that are computed a second time, by activation checkpointing or for the logits, do not count. MFU is the sum
divided by the time of a step (optimizer included) and by the device's dense bfloat16 peak (--peak-tflops; known for
A100, H100 and H200).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from arl.algorithm.losses.reinforcement import PolicyLoss
from arl.api.engine import WeightTransport
from arl.api.settings.algorithm import preset
from arl.api.settings.engines import (
    DiskWeightsConfig,
    DistributedWeightsConfig,
    LocalEngineConfig,
    OptimizerConfig,
    TrainConfig,
)
from arl.api.train_engine import TrainSequence
from arl.api.types import ModelRequest, SamplingParams
from arl.engine.client.remote_engine import RemoteInferenceEngine
from arl.engine.fsdp import policy
from arl.engine.fsdp.policy import token_logprobs
from arl.engine.fsdp.train_engine import FSDPTrainEngine
from arl.engine.tiny import tiny_tokenizer
from arl.engine.weights.disk import DiskTransport
from arl.engine.weights.distributed import DistributedTransport
from arl.engine.weights.process_groups import WeightSender

PARTS = ("train", "logprobs", "publish", "serve")
PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0}
"""Dense bfloat16, as the vendor states it, by a part of the device's name."""


@dataclass(frozen=True)
class Shape:
    """A Qwen3 with tied embeddings."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int

    @property
    def layer_weights(self) -> int:
        """Weights in all layers' matrices."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    def step_flops(self, lengths: Sequence[int]) -> int:
        """Operations of a forward and a backward pass over sequences of these lengths; see the formula above."""
        attention = self.layers * sum(2 * length**2 * self.heads * self.head_dim for length in lengths)
        trained = sum(lengths) - len(lengths)
        return 6 * self.layer_weights * sum(lengths) + 6 * self.vocabulary * self.hidden * trained + 3 * attention


SHAPES = {
    "qwen3-0.6b": Shape(1024, 28, 16, 8, 128, 3072, 151936),
    "qwen3-4b": Shape(2560, 36, 32, 8, 128, 9728, 151936),
    "tiny": Shape(64, 2, 4, 2, 16, 128, 512),
}

MICROBATCHES = {"qwen3-4b": 8192}
"""Tokens forwarded at once, for shapes of which a whole step does not fit into 140 GB (the 4B model takes 72)."""

Figures = dict[str, float]


def main(argv: Sequence[str] | None = None) -> dict[str, Figures]:
    args = parse_arguments(argv)
    shape = SHAPES[args.shape]
    print(f"{args.shape} on {device_name(args.device)}, torch {torch.__version__}, {args.tokens} tokens")
    results: dict[str, Figures] = {}

    def measure(part: str, run: Callable[[], Figures]) -> None:
        if part in args.parts and (figures := unless_out_of_memory(part, run)) is not None:
            results[part] = show(part, figures)
        free_memory(args.device)

    with tempfile.TemporaryDirectory(prefix="arl-gpu-") as scratch:
        directory = Path(scratch)
        model = write_model(shape, directory / "model", args.device)
        measure("train", lambda: measure_training(args, shape, model))
        measure("publish", lambda: asyncio.run(measure_publishing(args, model, directory)))
        measure("logprobs", lambda: measure_logprobs(args, shape))
        measure("serve", lambda: asyncio.run(measure_serving(args, model)))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return results


def unless_out_of_memory(part: str, run: Callable[[], Figures]) -> Figures | None:
    """What `run` returns; None, with a message, if the device's memory was too small for it."""
    try:
        return run()
    except torch.OutOfMemoryError as error:
        first_line = str(error).splitlines()[0]
        print(
            f"\n{part}: out of memory. A smaller --microbatch or --checkpointing needs less. {first_line}", flush=True
        )
        return None


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    add("--device", default="cuda")
    add("--parts", type=lambda text: text.split(","), default=list(PARTS), help="comma-separated")
    add("--tokens", type=int, default=16384, help="of a step")
    add("--sequence-length", type=int, default=2048)
    add("--microbatch", type=int, help="tokens forwarded at once; by default as many as an H200 has memory for")
    add("--chunk", type=int, default=2048, help="tokens whose logits are held at once")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    add("--compile", action="store_true")
    add("--checkpointing", action="store_true", help="recompute activations in the backward pass")
    add("--offload", action="store_true", help="weights and optimizer in the CPU's memory")
    add("--steps", type=int, default=5, help="measured, after two that are not")
    add("--concurrency", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 64, 256])
    add("--new-tokens", type=int, default=128)
    add("--peak-tflops", type=float)
    add("--json", type=Path, help="also write all figures there")
    args = parser.parse_args(argv)
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts names {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    args.microbatch = args.microbatch or MICROBATCHES.get(args.shape, 16384)
    return args


def config_of(shape: Shape) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=True,
    )


def write_model(shape: Shape, directory: Path, device: str) -> Path:
    """Random weights in bfloat16, and a tokenizer that is too small for them."""
    with torch.device(device):
        Qwen3ForCausalLM(config_of(shape)).bfloat16().cpu().save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def build_engine(args: argparse.Namespace, model: Path) -> FSDPTrainEngine:
    policy.LOGPROB_CHUNK_SIZE = args.chunk
    config = TrainConfig(
        optimizer=OptimizerConfig(lr=1e-6),
        max_tokens_per_microbatch=args.microbatch,
        dtype=args.dtype,
        device=args.device,
        compile=args.compile,
        activation_checkpointing=args.checkpointing,
        cpu_offload=args.offload,
        num_threads=torch.get_num_threads(),
    )
    return FSDPTrainEngine(model, config)


def measure_training(args: argparse.Namespace, shape: Shape, model: Path) -> Figures:
    sequences = random_sequences(args, shape)
    loss = PolicyLoss.of(preset("decoupled_ppo"))
    with closing(build_engine(args, model)) as engine:
        forward_s = best(lambda: engine.forward(sequences), args)
        reset_peak(args.device)
        step_s = best(lambda: engine.train_batch([sequences], loss), args)
    flops = shape.step_flops([len(sequence) for sequence in sequences])
    figures = {
        "step_s": step_s,
        "tokens_per_s": args.tokens / step_s,
        "forward_tokens_per_s": args.tokens / forward_s,
        "model_tflops": flops / step_s / 1e12,
        "peak_gib": peak_gib(args.device),
    }
    if peak := args.peak_tflops or known_peak(args.device):
        figures["mfu"] = figures["model_tflops"] / peak
    return figures


def random_sequences(args: argparse.Namespace, shape: Shape) -> list[TrainSequence]:
    generator = torch.Generator().manual_seed(0)
    lengths = [args.sequence_length] * (args.tokens // args.sequence_length)
    num_trained = sum(lengths) - len(lengths)
    return [
        TrainSequence(
            token_ids=torch.randint(0, shape.vocabulary, (length,), generator=generator),
            loss_mask=torch.arange(length) > 0,
            behavior_logprobs=torch.full((length,), -12.0),
            proximal_logprobs=torch.full((length,), -12.0),
            advantages=torch.randn(1, generator=generator).expand(length).clone(),
            loss_weights=torch.full((length,), 1 / num_trained),
            versions=torch.zeros(length, dtype=torch.int64),
        )
        for length in lengths
    ]


def measure_logprobs(args: argparse.Namespace, shape: Shape) -> Figures:
    dtype = getattr(torch, args.dtype)
    hidden = torch.randn(args.tokens, shape.hidden, device=args.device, dtype=dtype, requires_grad=True)
    weight = torch.randn(shape.vocabulary, shape.hidden, device=args.device, dtype=dtype, requires_grad=True)
    targets = torch.zeros(args.tokens, dtype=torch.int64, device=args.device)
    temperatures = torch.ones(args.tokens, device=args.device)

    def run() -> None:
        hidden.grad = weight.grad = None
        logprobs, _ = token_logprobs(hidden, weight, targets, temperatures, args.chunk)
        logprobs.sum().backward()

    before = allocated_gib(args.device)
    reset_peak(args.device)
    seconds = best(run, args)
    return {
        "seconds": seconds,
        "memory_gib": max(peak_gib(args.device) - before, 0.0),
        "full_logits_gib": args.tokens * shape.vocabulary * 4 / 2**30,
    }


async def measure_publishing(args: argparse.Namespace, model: Path, scratch: Path) -> Figures:
    with closing(build_engine(args, model)) as engine:
        return await measure_publishing_of(engine, args, model, scratch)


async def measure_publishing_of(
    engine: FSDPTrainEngine, args: argparse.Namespace, model: Path, scratch: Path
) -> Figures:
    began = time.perf_counter()
    num_bytes = engine.export(scratch / "export")
    figures = {"export_s": time.perf_counter() - began, "gigabytes": num_bytes / 1e9}
    # Trainer and server share the GPU here, which NCCL does not allow: the process group is gloo's.
    WeightSender.backend = "gloo"  # type: ignore[assignment]
    transports: dict[str, WeightTransport] = {
        "disk": DiskTransport(DiskWeightsConfig(), scratch / "run"),
        "distributed": DistributedTransport(DistributedWeightsConfig()),
    }
    sequences = random_sequences(args, SHAPES[args.shape])[:1]
    loss = PolicyLoss.of(preset("decoupled_ppo", weights=[{"level": "token"}]))
    with serving(args, model, "--max-running-requests", "4", "--context-length", "256") as url:
        async with RemoteInferenceEngine([url], LocalEngineConfig(), version=engine.version) as client:
            for name, transport in transports.items():
                for _ in range(2):  # the first one of a transport forms its group
                    engine.train_batch([sequences], loss)
                    began = time.perf_counter()
                    update = transport.snapshot(engine)
                    figures[f"{name}_snapshot_s"] = time.perf_counter() - began
                    stats = await transport.deliver(update, client)
                    figures[f"{name}_publish_s"] = time.perf_counter() - began
                    figures[f"{name}_pause_s"] = stats.pause_s
                transport.close()
    return figures


async def measure_serving(args: argparse.Namespace, model: Path) -> Figures:
    figures: Figures = {}
    rng = random.Random(0)
    sampling = SamplingParams(max_new_tokens=args.new_tokens, ignore_eos=True)
    limits = ("--max-running-requests", str(max(args.concurrency)), "--context-length", str(args.new_tokens + 128))
    with serving(args, model, *limits) as url:
        async with RemoteInferenceEngine([url], LocalEngineConfig()) as client:

            def ask() -> Awaitable[object]:
                prompt = [rng.randrange(256) for _ in range(64)]
                return client.agenerate(ModelRequest(input_ids=prompt, sampling=sampling))

            for count in args.concurrency:
                await ask()
                began = time.perf_counter()
                await asyncio.gather(*(ask() for _ in range(count)))
                figures[f"tokens_per_s_at_{count}"] = count * args.new_tokens / (time.perf_counter() - began)
    return figures


@contextmanager
def serving(args: argparse.Namespace, model: Path, *options: str) -> Iterator[str]:
    """An embedded server of the model on the device; gives its base URL."""
    command = [sys.executable, "-m", "arl.engine.local", "--model", str(model), "--parent-pid", str(os.getpid())]
    command += ["--device", args.device, "--dtype", args.dtype, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        ready = process.stdout.readline()
        if not ready:
            raise SystemExit("the embedded server did not start; what it said is above")
        yield f"http://127.0.0.1:{json.loads(ready)['port']}"
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def best(run: Callable[[], object], args: argparse.Namespace) -> float:
    """Seconds of the fastest of args.steps runs, after two that warm up (and compile)."""
    seconds: list[float] = []
    for _ in range(2 + args.steps):
        began = time.perf_counter()
        run()
        if args.device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds[2:])


def device_name(device: str) -> str:
    return "a CPU" if device == "cpu" else torch.cuda.get_device_name(device)


def known_peak(device: str) -> float | None:
    name = device_name(device)
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def reset_peak(device: str) -> None:
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()


def peak_gib(device: str) -> float:
    """The most that torch had allocated since reset_peak; 0 on a CPU, where it does not count."""
    return torch.cuda.max_memory_allocated() / 2**30 if device != "cpu" else 0.0


def allocated_gib(device: str) -> float:
    return torch.cuda.memory_allocated() / 2**30 if device != "cpu" else 0.0


def free_memory(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def show(part: str, figures: Figures) -> Figures:
    print(f"\n{part}")
    for name, value in figures.items():
        print(f"  {name:<24}{value:>14,.4g}")
    sys.stdout.flush()
    return figures


if __name__ == "__main__":
    main()
