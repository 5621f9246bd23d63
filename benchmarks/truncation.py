"""What replaying truncated sampling costs: tokens a second of an embedded server, and bytes of what was kept.

    python benchmarks/truncation.py server
    python benchmarks/truncation.py sizes --text DIRECTORY

server: an untrained Qwen3 (3 layers, hidden size 128, float32, 32,288 tokens) on one thread, 16 requests of 64 tokens
at once, whole and truncated, with and without engine.replay_truncation. All kinds in turn, so that they see the same
machine; of --rounds the best counts. Its logits are large, so that the kept sets are small, as a trained model's are.

sizes: bytes a token of KeptIds along real text, the Python files under DIRECTORY, in 8,192 tokens of their own. A model
of counts says what would be kept at each place: trigrams, interpolated with bigrams, with words near by (a low-rank
factorisation) and with the last 400 tokens, and with noise of 0.3 nats for what a network would know beyond.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import tempfile
import time
from pathlib import Path

import numpy as np
from grammars import serving
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from arl.api.sampling_mask import KeptIds
from arl.api.settings.engines import ClientConfig
from arl.api.types import ModelRequest, SamplingParams
from arl.engine.client.remote_engine import RemoteInferenceEngine
from arl.engine.tiny import TinyShape, write_tiny_model

WORDS, REQUESTS, NEW_TOKENS = 32_000, 16, 64
KINDS = {
    "whole": SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True),
    "top_p 0.95": SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, top_p=0.95),
    "top_k 50": SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, top_k=50),
}
VOCABULARY, TOKENS, HELD_OUT = 8192, 8192, 150_000


async def tokens_per_s(engine: RemoteInferenceEngine, sampling: SamplingParams) -> tuple[float, float]:
    """And the mean number of kept ids."""
    began = time.perf_counter()
    prompts = ([number, *range(30)] for number in range(REQUESTS))
    made = await asyncio.gather(*(engine.agenerate(ModelRequest(input_ids=p, sampling=sampling)) for p in prompts))
    lasted = time.perf_counter() - began
    kept = [int(count) for response in made if response.kept_ids for count in response.kept_ids.sizes]
    return sum(len(response.output_ids) for response in made) / lasted, float(np.mean(kept)) if kept else math.nan


async def server_table(rounds: int) -> None:
    shape = TinyShape(initializer_range=0.35)
    with tempfile.TemporaryDirectory() as directory:
        model = write_tiny_model(Path(directory) / "model", [f"word{i}" for i in range(WORDS)], shape)
        with serving(model) as url:
            async with (
                RemoteInferenceEngine([url], ClientConfig()) as replayed,
                RemoteInferenceEngine([url], ClientConfig(replay_truncation=False)) as plain,
            ):
                best = {kind: [0.0, 0.0, math.nan] for kind in KINDS}
                for _ in range(rounds):
                    for kind, sampling in KINDS.items():
                        best[kind][0] = max(best[kind][0], (await tokens_per_s(plain, sampling))[0])
                        speed, kept = await tokens_per_s(replayed, sampling)
                        best[kind][1:] = max(best[kind][1], speed), kept
    print("| sampling | without, tokens/s | with, tokens/s | ratio | kept ids |\n|---|---|---|---|---|")
    for kind, (without, given, kept) in best.items():
        print(f"| {kind} | {without:,.0f} | {given:,.0f} | {given / without:.3f} | {kept:.1f} |")


def tokens_of(text: Path) -> np.ndarray:
    files = sorted(text.rglob("*.py"))
    np.random.default_rng(0).shuffle(files)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train(list(map(str, files[:300])), trainer)
    ids: list[int] = []
    for file in files:
        ids += tokenizer.encode(file.read_text(errors="replace")).ids
        if len(ids) > 5_000_000:
            break
    print(f"{len(ids):,} tokens of text")
    return np.array(ids)


class Counts:
    """The next token's distribution, from counts over `train`."""

    def __init__(self, train: np.ndarray) -> None:
        v, self.noise = VOCABULARY, np.random.default_rng(0)
        unigrams = np.bincount(train, minlength=v) + 0.5
        self.unigrams = unigrams / unigrams.sum()
        self.bigrams = np.bincount(train[:-1] * v + train[1:], minlength=v * v).astype(np.float32).reshape(v, v)
        near = np.zeros((v, v), np.float32)
        for lag in (1, 2, 3, 5, 8):
            pairs = np.bincount(train[:-lag] * v + train[lag:], minlength=v * v)
            near += pairs.astype(np.float32).reshape(v, v) / lag
        expected = (near.sum(1)[:, None] + 1) * (near.sum(0)[None] + 1) / near.sum()
        pmi = np.log(np.maximum(near / expected, 1))
        basis = np.linalg.qr(pmi @ (pmi.T @ (pmi @ self.noise.standard_normal((v, 72)).astype(np.float32))))[0]
        left, sizes, right = np.linalg.svd(basis.T @ pmi, full_matrices=False)
        self.before = (basis @ left)[:, :64] * np.sqrt(sizes[:64])
        self.after = right[:64].T * np.sqrt(sizes[:64])
        order = np.argsort(train[:-2] * v + train[1:-1], kind="stable")
        self.pairs, self.followers = (train[:-2] * v + train[1:-1])[order], train[2:][order]

    def probs(self, text: np.ndarray) -> np.ndarray:
        """Of what follows the text."""
        near = text[-32:]
        state = (self.before[near] * (0.8 ** np.arange(len(near)))[::-1, None]).sum(0)
        smooth = self.unigrams * np.exp(np.clip(0.5 * self.after @ state, -8, 8))
        probs = _discounted(self.bigrams[text[-1]], smooth / smooth.sum())
        start, end = np.searchsorted(self.pairs, text[-2] * VOCABULARY + text[-1] + np.arange(2))
        if end > start:
            probs = _discounted(np.bincount(self.followers[start:end], minlength=VOCABULARY), probs)
        recent = np.bincount(text[-400:], minlength=VOCABULARY)
        probs = (0.9 * probs + 0.1 * recent / recent.sum()) * np.exp(0.3 * self.noise.standard_normal(VOCABULARY))
        return probs / probs.sum()


def _discounted(counts: np.ndarray, below: np.ndarray) -> np.ndarray:
    if not counts.any():
        return below
    return (np.maximum(counts - 0.75, 0) + 0.75 * (counts > 0).sum() * below) / counts.sum()


def sizes_table(text: Path) -> None:
    ids = tokens_of(text)
    counts, held_out = Counts(ids[:-HELD_OUT]), ids[-HELD_OUT:]
    kept: dict[str, list[np.ndarray]] = {"top_k 50": [], "top_p 0.8": [], "top_p 0.95": []}
    surprise: list[float] = []
    for place in range(2, TOKENS):
        probs = counts.probs(held_out[max(0, place - 400) : place])
        surprise.append(-math.log(probs[held_out[place]]))
        order = np.argsort(-probs)
        before = probs[order].cumsum() - probs[order]
        kept["top_k 50"].append(order[:50])
        for top_p in (0.8, 0.95):
            kept[f"top_p {top_p}"].append(order[before <= top_p])
    print(f"{np.mean(surprise):.2f} nats a token\n")
    print("| kept | ids a token | int32 | packed | by chance | pack, ms | unpack, ms |\n|---|---|---|---|---|---|---|")
    for name, sets in kept.items():
        row(name, sets)


def row(name: str, sets: list[np.ndarray]) -> None:
    made, lengths = KeptIds.of(sets, VOCABULARY), [len(of_token) for of_token in sets]
    began = time.perf_counter()
    data = made.encode()
    packed_s = time.perf_counter() - began
    assert KeptIds.decode(data) == made
    unpacked_s = time.perf_counter() - began - packed_s
    lone = math.lgamma(VOCABULARY + 1)
    by_chance = sum(lone - math.lgamma(n + 1) - math.lgamma(VOCABULARY - n + 1) for n in lengths) / math.log(256)
    count = len(sets)
    print(
        f"| {name} | {np.mean(lengths):.0f} | {4 * np.mean(lengths):.0f} | {len(data) / count:.1f} | "
        f"{by_chance / count:.0f} | {1e3 * packed_s:.0f} | {1e3 * unpacked_s:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["server", "sizes"])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--text", type=Path)
    args = parser.parse_args()
    if args.part == "server":
        asyncio.run(server_table(args.rounds))
    elif args.text is None:
        parser.error("sizes needs --text: a directory with Python files")
    else:
        sizes_table(args.text)


if __name__ == "__main__":
    main()
