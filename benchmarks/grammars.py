"""What grammars cost: tokens a second of an embedded server with and without them, and the trainer's time.

    python benchmarks/grammars.py

The server: a tiny Qwen3 (3 layers, hidden size 128, float32), on one thread. At 1, 8 and 32 requests at once, each kind
in turn, so that all see the same machine; of --rounds the best counts. Every answer has the same number of tokens: free
text (end of sequence ignored), 26 ids at each place (`[a-z]{n}`), nearly all ids at each place (`[^"]{n}`).

The trainer: forward and backward pass of the logprobs of 2,048 tokens over 32,000 ids: without sets, and with one that
lacks 100 ids, or holds 100, for every token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from arl.api.grammar import Grammar
from arl.api.sampling_mask import KeptIds
from arl.api.settings.engines import ClientConfig
from arl.api.types import ModelRequest, SamplingParams
from arl.engine.client.remote_engine import RemoteInferenceEngine
from arl.engine.fsdp.policy import token_logprobs
from arl.engine.tiny import write_tiny_model

NEW_TOKENS = 128
KINDS = {"free": None, "26 ids": "[a-z]", "nearly all ids": '[^"]'}
TOKENS, HIDDEN, VOCABULARY = 2048, 256, 32_000


def sampling_of(kind: str) -> SamplingParams:
    pattern = KINDS[kind]
    if pattern is None:
        return SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    return SamplingParams(
        max_new_tokens=NEW_TOKENS, grammar=Grammar(kind="regex", text=f"{pattern}{{{20 * NEW_TOKENS}}}")
    )


@contextmanager
def serving(model: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "arl.engine.local", "--model", str(model), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}"
        finally:
            process.terminate()


async def tokens_per_s(engine: RemoteInferenceEngine, kind: str, concurrency: int) -> float:
    sampling = sampling_of(kind)

    async def one_client(number: int) -> int:
        total = 0
        for turn in range(2):
            request = ModelRequest(input_ids=[number % 250, turn, *range(30)], sampling=sampling)
            total += len((await engine.agenerate(request)).output_ids)
        return total

    began = time.perf_counter()
    counts = await asyncio.gather(*map(one_client, range(concurrency)))
    lasted = time.perf_counter() - began
    assert set(counts) == {2 * NEW_TOKENS}, (kind, counts)
    return sum(counts) / lasted


async def server_table(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as directory, serving(write_tiny_model(Path(directory) / "model")) as url:
        async with RemoteInferenceEngine([url], ClientConfig()) as engine:
            for kind in KINDS:
                await tokens_per_s(engine, kind, 1)  # compiles
            print("| requests at once |", *(f"{kind}, tokens/s |" for kind in KINDS))
            print("|---" * (1 + len(KINDS)) + "|")
            for concurrency in (1, 8, 32):
                best = dict.fromkeys(KINDS, 0.0)
                for _ in range(rounds):
                    for kind in KINDS:
                        best[kind] = max(best[kind], await tokens_per_s(engine, kind, concurrency))
                print(f"| {concurrency} |", *(f"{speed:,.0f} |" for speed in best.values()))


def kernel_table(rounds: int) -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, requires_grad=True)
    targets = torch.zeros(TOKENS, dtype=torch.int64)
    sets = {
        "without sets": None,
        "sets that lack 100 ids": KeptIds.of([np.delete(np.arange(VOCABULARY), range(100, 200))] * TOKENS, VOCABULARY),
        "sets of 100 ids": KeptIds.of([range(100)] * TOKENS, VOCABULARY),
    }
    best = dict.fromkeys(sets, float("inf"))
    for _ in range(rounds):
        for name, kept_ids in sets.items():
            began = time.perf_counter()
            logprobs, entropy = token_logprobs(hidden, weight, targets, torch.ones(TOKENS), 256, kept_ids)
            (logprobs.sum() + entropy.sum()).backward()
            best[name] = min(best[name], time.perf_counter() - began)
    for name, seconds in best.items():
        print(f"{name}: {seconds:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    asyncio.run(server_table(rounds))
    kernel_table(rounds)


if __name__ == "__main__":
    main()
