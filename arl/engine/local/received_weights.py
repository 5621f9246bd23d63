"""New weights, from a model directory or from a trainer's broadcasts: received aside, checked, then loaded whole.

Nothing is applied until every tensor is here and fits the model, so that a failed update leaves the old weights as
they were. The price is a second copy of the weights in memory while an update is under way.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.core_model_loading import revert_weight_conversion

from arl.api.errors import ArlError

Shapes = Mapping[str, torch.Size]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MAX_NAMED = 5


class WeightsError(ArlError):
    """Weights that are missing, unreadable, or do not fit the model being served."""


class StoredForm:
    """How the weights of a model are called in files and in what trainers send, and how they become its parameters.

    transformers fuses some tensors when it loads them: the experts of a layer, which are stored one by one, are one
    parameter. shapes: by stored name; tied tensors once. is_tied: its output layer is its embedding, so that a file
    may hold `lm_head.weight` once more.
    """

    def __init__(self, model: Any) -> None:
        parameters = dict(model.named_parameters())
        empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in parameters.items()}
        stored = revert_weight_conversion(model, empty)
        self.shapes: Shapes = {name: tensor.shape for name, tensor in stored.items()}
        self.is_tied = bool(getattr(model.config, "tie_word_embeddings", False))
        self._is_own = self.shapes.keys() == parameters.keys()
        self._class, self._config = type(model), model.config

    def parameters(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Stored tensors, which fit, as parameters. Raises WeightsError where a part of what is fused is missing."""
        if self._is_own:
            return tensors
        try:
            model, loading = self._class.from_pretrained(
                None, config=copy.deepcopy(self._config), state_dict=dict(tensors), output_loading_info=True
            )
        except RuntimeError as error:
            raise WeightsError(f"the tensors cannot be put together as the model has them: {error}") from error
        return {name: tensor for name, tensor in model.named_parameters() if name not in loading["missing_keys"]}


def read_directory(directory: str, shapes: Shapes, is_tied: bool) -> dict[str, torch.Tensor]:
    """The weights of a Hugging Face model directory (safetensors, one file or sharded), complete and of fitting shapes.

    shapes and is_tied: the served model's, as StoredForm has them. Raises WeightsError.
    """
    if not os.path.isabs(directory):
        raise WeightsError(f"model_path is {directory!r}; send the absolute path of a directory this server can read")
    tensors: dict[str, torch.Tensor] = {}
    for file in _weight_files(Path(directory)):
        try:
            with safe_open(str(file), framework="pt") as opened:
                # A clone reads the file now, on this thread; what safetensors gives is read page by page when used.
                tensors.update({name: opened.get_tensor(name).clone() for name in opened.keys()})  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"cannot read {file}: {error}") from error
    if is_tied:
        tensors = {name: t for name, t in tensors.items() if name != "lm_head.weight" or name in shapes}
    check_fit(tensors, shapes)
    if missing := sorted(shapes.keys() - tensors.keys()):
        raise WeightsError(f"{directory} lacks {named(missing)}, which the served model has")
    return tensors


def _weight_files(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    if not directory.is_dir():
        raise WeightsError(f"model_path is {str(directory)!r}, which is not a directory this server can see")
    if not index.is_file():
        raise WeightsError(f"{directory} holds neither {_SINGLE} nor {_INDEX}")
    try:
        shards = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index} is not an index of weight files: {error!r}") from error
    return sorted(directory / shard for shard in shards)


def check_fit(tensors: Mapping[str, torch.Tensor], shapes: Shapes) -> None:
    """Raise WeightsError if a tensor is not one of the model's, or has another shape."""
    if unknown := sorted(tensors.keys() - shapes.keys()):
        raise WeightsError(f"the served model has no {named(unknown)}")
    for name, tensor in tensors.items():
        if tensor.shape != shapes[name]:
            raise WeightsError(f"{name} has shape {list(tensor.shape)}; the served model's has {list(shapes[name])}")


def named(names: Iterable[str]) -> str:
    """A few names, and how many more there are."""
    names = list(names)
    rest = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")
