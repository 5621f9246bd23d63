"""How much faster several ranks train than one: RayTrainEngine with N ranks against RayTrainEngine with one.

    python benchmarks/ranks.py --ranks 2 --rounds 5

Both train the same batches, in turns, with one thread a rank: groups of responses of log-normal length to a common
prompt. Times are of whole train_batch calls, so that dividing, Ray's object store, gloo and waiting for the rank with
the longest share are in them; the first round warms up and is left out. The figure is the ratio of the median tokens/s.
The machine needs a core for every rank, and nothing else to do.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from arl.algorithm.batch import weigh_tokens
from arl.algorithm.flat_sequences import FlatSequences
from arl.algorithm.losses.reinforcement import PolicyLoss
from arl.api.settings.algorithm import preset
from arl.api.settings.engines import TrainConfig
from arl.api.train_engine import TrainSequence
from arl.engine.fsdp.minibatch import divide
from arl.engine.fsdp.ray_cluster import RayLease
from arl.engine.fsdp.ray_engine import RayTrainEngine
from arl.engine.tiny import TinyShape, write_tiny_model

LOSS = PolicyLoss.of(preset("decoupled_ppo", minibatches=2))
PROMPT_TOKENS, MEDIAN_RESPONSE_TOKENS, GROUP_SIZE = 64, 120, 4
VOCABULARY = 8000


def main(argv: Sequence[str] | None = None) -> float:
    """Print the table; returns how many times one rank's tokens/s the others reach."""
    args = parse_arguments(argv)
    shape = TinyShape(
        hidden_size=args.hidden, intermediate_size=3 * args.hidden, num_layers=args.layers, num_heads=args.hidden // 64,
        num_kv_heads=args.hidden // 128, head_dim=64, context_length=4096,
    )  # fmt: skip
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        words = [f"word{i}" for i in range(VOCABULARY)]
        model = write_tiny_model(directory / "model", words, shape)
        stack.callback(RayLease(None, num_cpus=args.ranks + 1, num_gpus=0).release)
        engines = {
            count: RayTrainEngine(
                model, TrainConfig(num_ranks=count, max_tokens_per_microbatch=args.max_tokens_per_microbatch)
            )
            for count in (1, args.ranks)
        }
        for engine in engines.values():
            stack.callback(engine.close)
        return measure(engines, args)


def measure(engines: dict[int, RayTrainEngine], args: argparse.Namespace) -> float:
    speeds: dict[int, list[float]] = {count: [] for count in engines}
    for round_index in range(args.rounds + 1):
        batch = random_batch(args.groups, seed=round_index)
        num_tokens = sum(map(len, batch))
        for count, engine in engines.items():
            began = time.perf_counter()
            metrics = engine.train_batch([batch], LOSS)
            seconds = time.perf_counter() - began
            name = f"round {round_index}" if round_index else "warm-up"
            print(
                f"{name}: {count} rank(s) {num_tokens / seconds:.0f} tokens/s, {num_tokens} tokens in {seconds:.2f} s, "
                f"{metrics['microbatches']:.0f} microbatches"
            )
            if round_index:
                speeds[count].append(num_tokens / seconds)
    show_overhead(engines[args.ranks], args)
    medians = {count: statistics.median(values) for count, values in speeds.items()}
    ratio = medians[args.ranks] / medians[1]
    print(f"medians: {', '.join(f'{count} rank(s) {value:.0f} tokens/s' for count, value in medians.items())}")
    print(f"{args.ranks} ranks are {ratio:.2f} times as fast as one (load average {os.getloadavg()[0]:.1f})")
    return ratio


def show_overhead(engine: RayTrainEngine, args: argparse.Namespace) -> None:
    """What of a step is neither computing nor communicating between ranks."""
    batch = random_batch(args.groups, seed=0)
    began = time.perf_counter()
    shares = divide(batch, args.ranks, share_prefixes=True)
    divided = time.perf_counter()
    packed = [FlatSequences.of(batch).take(share) for share in shares]
    ended = time.perf_counter()
    num_bytes = sum(share.num_bytes for share in packed)
    trips: list[float] = []
    for _ in range(5):
        start = time.perf_counter()
        engine.forward([])
        trips.append(time.perf_counter() - start)
    loads = [sum(len(batch[i]) for i in share) for share in shares]
    print(
        f"dividing {1e3 * (divided - began):.1f} ms, packing {1e3 * (ended - divided):.1f} ms, {num_bytes} bytes, an "
        f"empty call {1e3 * statistics.median(trips):.1f} ms; shares of {loads} tokens"
    )


def random_batch(groups: int, seed: int) -> list[TrainSequence]:
    generator = torch.Generator().manual_seed(seed)
    sequences: list[TrainSequence] = []
    for _ in range(groups):
        prompt = torch.randint(0, VOCABULARY, (PROMPT_TOKENS,), generator=generator)
        for _ in range(GROUP_SIZE):
            length = int(MEDIAN_RESPONSE_TOKENS * torch.randn(1, generator=generator).mul(0.6).exp())
            length = min(max(length, 1), 2048)
            sequences.append(random_sequence(prompt, length, generator))
    return weigh_tokens(sequences)


def random_sequence(prompt: torch.Tensor, length: int, generator: torch.Generator) -> TrainSequence:
    """A response of `length` tokens to the prompt, every one of them trained."""
    response = torch.randint(0, VOCABULARY, (length,), generator=generator)
    mask = torch.cat([torch.zeros(len(prompt), dtype=torch.bool), torch.ones(length, dtype=torch.bool)])
    logprobs = -9 * mask.float()
    return TrainSequence(
        token_ids=torch.cat([prompt, response]),
        loss_mask=mask,
        behavior_logprobs=logprobs,
        proximal_logprobs=logprobs,
        advantages=torch.randn(1, generator=generator) * mask,
        loss_weights=torch.zeros(len(mask)),
        versions=torch.where(mask, 0, -1),
    )


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", type=int, default=6, help=f"of {GROUP_SIZE} sequences in each batch")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--max-tokens-per-microbatch", type=int, default=8192)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
