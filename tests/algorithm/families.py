"""Sequences that begin alike, at random, and what is said about them the slow way: as sets of their prefixes."""

import torch
from hypothesis import strategies as st

from arl.api.types import TrainSequence

Family = list[list[int]]


@st.composite
def trees(draw: st.DrawFn, max_size: int = 14) -> Family:
    """Sequences of 1 to 30 tokens, most of which go on from somewhere within an earlier one; some are the same."""
    sequences: Family = []
    for _ in range(draw(st.integers(0, max_size))):
        stem: list[int] = []
        if sequences and draw(st.integers(0, 3)):
            earlier = draw(st.sampled_from(sequences))
            stem = earlier[: draw(st.integers(0, len(earlier)))]
        tail = draw(st.lists(st.integers(0, 2), min_size=0 if stem else 1, max_size=8))
        sequences.append([*stem, *tail])
    return sequences


def prefixes(tokens: list[int]) -> set[tuple[int, ...]]:
    return {tuple(tokens[:stop]) for stop in range(1, len(tokens) + 1)}


def slow_num_tokens(sequences: Family) -> int:
    """How many different prefixes there are: each is one token to forward."""
    return len(set().union(*(prefixes(tokens) for tokens in sequences)))


def train_sequence(tokens: list[int], trained: list[int] | None = None) -> TrainSequence:
    """A sequence trained at the given places, or at its last token alone."""
    mask = torch.zeros(len(tokens), dtype=torch.bool)
    mask[[-1] if trained is None else trained] = True
    return TrainSequence(token_ids=torch.tensor(tokens), loss_mask=mask)
