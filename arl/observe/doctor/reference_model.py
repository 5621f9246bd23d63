"""The model as plain transformers computes it, in float32, under any version of its weights or a mixture of two.

It decides whether the train engine or the server is wrong, and what a server that holds a mixture would answer. It
needs memory for four models in float32: the model itself, and the three versions that it keeps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from arl.observe.doctor.server_probe import Floats

Weights = Mapping[str, torch.Tensor]
Mix = Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]
"""(name, value in the version before, value in the newest version) -> the value to compute with."""

Logits = npt.NDArray[np.float32]


class ReferenceModel:
    """Its methods block, and only one thread at a time may call them. Head and embedding are separate even if the model
    ties them, so that a mixture can contain one of them."""

    def __init__(self, directory: Path) -> None:
        """directory: the first version."""
        self._model = _loaded(directory).eval()
        self.is_tied = bool(getattr(self._model.config, "tie_word_embeddings", False))
        if self.is_tied:
            head = self._model.get_output_embeddings()
            head.weight = nn.Parameter(head.weight.detach().clone())
        self.first: Weights = _values(self._model)
        self.before: Weights = self.first
        self.newest: Weights = self.first

    def add(self, directory: Path) -> None:
        """Add the next version."""
        self.before, self.newest = self.newest, _values(_loaded(directory))

    @torch.no_grad()
    def take(self, mix: Mix | None = None, before: Weights | None = None) -> None:
        """From now on compute with the newest version, or with a mixture of it and `before` (default: the previous
        one)."""
        old = self.before if before is None else before
        for name, parameter in self._model.named_parameters():
            new = self.newest[name]
            parameter.copy_(new if mix is None else mix(name, old[name], new))

    @property
    def parts(self) -> list[str]:
        """The parts of the model that a faulty load may leave out."""
        return list(dict.fromkeys(map(part_of, self.newest)))

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int], first: int = 1) -> Logits:
        """[T - first, V] The logits that predict the tokens from `first` on."""
        ids = torch.tensor([list(token_ids)])
        keep = len(token_ids) - first + 1
        logits = self._model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits
        return logits[0, :-1].float().numpy()

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Floats]:
        """[T - 1] each: the logprob of each token but the first, at temperature 1."""
        return [chosen(self.logits(ids), ids[1:]) for ids in sequences]

    def rounding(self, sequences: Sequence[Sequence[int]]) -> float:
        """How far bfloat16 moves the logprobs of these tokens, on average: the size of a rounding difference."""
        exact, kept = self.score(sequences), self._model
        self._model = copy.deepcopy(kept).to(torch.bfloat16)
        try:
            rounded = self.score(sequences)
        finally:
            self._model = kept
        return float(np.abs(np.concatenate(exact) - np.concatenate(rounded)).mean())


def _loaded(directory: Path) -> Any:
    sees = hasattr(AutoConfig.from_pretrained(directory), "vision_config")
    family = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    return family.from_pretrained(directory, dtype=torch.float32)


def _values(model: nn.Module) -> Weights:
    """All weights; tied ones under each of their names."""
    return {name: value.detach().clone() for name, value in model.named_parameters(remove_duplicate=False)}


def part_of(name: str) -> str:
    """The part of a model to which a weight belongs: embedding, layer N, final norm, head, vision tower."""
    pieces = name.split(".")
    if "visual" in pieces:
        return "vision tower"
    if "layers" in pieces:
        return f"layer {pieces[pieces.index('layers') + 1]}"
    if "lm_head" in pieces:
        return "head"
    return "embedding" if any("embed" in piece for piece in pieces) else "final norm"


BLOCK = 64
"""Rows of logits in float64 at a time; a row is as long as the vocabulary."""


def chosen(logits: Logits, token_ids: Sequence[int], temperature: float = 1.0) -> Floats:
    """The logprob of each token under softmax(logits / temperature)."""
    parts: list[Floats] = []
    for start in range(0, len(logits), BLOCK):
        rows = logits[start : start + BLOCK]
        scaled = rows.astype(np.float64) / temperature
        scaled -= scaled.max(-1, keepdims=True)
        picked = scaled[np.arange(len(rows)), list(token_ids[start : start + BLOCK])]
        parts.append(picked - np.log(np.exp(scaled).sum(-1)))
    return np.concatenate(parts)
