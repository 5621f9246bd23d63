"""Random sequences that begin alike, and slow counts of their tokens, by sets of prefixes."""

import random

import torch
from hypothesis import strategies as st

from arl.api.train_engine import TrainSequence

Family = list[list[int]]


def _tree(seed: int) -> Family:
    rng, sequences = random.Random(seed), Family()
    for _ in range(rng.randint(0, 14)):
        earlier = rng.choice(sequences) if sequences and rng.random() < 0.75 else []
        stem = earlier[: rng.randint(0, len(earlier))]
        sequences.append(stem + [rng.randint(0, 2) for _ in range(rng.randint(0 if stem else 1, 8))])
    return sequences


trees = st.builds(_tree, st.integers(0, 2**32))
"""Sequences of 1 to 30 tokens. Most of them continue an earlier one from somewhere within it; some are equal."""


def prefixes(tokens: list[int]) -> set[tuple[int, ...]]:
    return {tuple(tokens[:stop]) for stop in range(1, len(tokens) + 1)}


def slow_num_tokens(sequences: Family) -> int:
    """The number of different prefixes: each is one token to forward."""
    return len(set().union(*(prefixes(tokens) for tokens in sequences)))


def train_sequence(tokens: list[int], trained: list[int] | None = None) -> TrainSequence:
    """A sequence trained at the given places, or at its last token alone."""
    mask = torch.zeros(len(tokens), dtype=torch.bool)
    mask[[-1] if trained is None else trained] = True
    return TrainSequence(token_ids=torch.tensor(tokens), loss_mask=mask)
