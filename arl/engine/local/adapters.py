"""Low-rank adapters beside the model: read from peft's files, and applied to the tokens of requests that name them.

    y = W x + alpha / rank * B A x        for a token whose request names the adapter, else y = W x

A step computes tokens of many requests in one row. Each linear layer runs once over all of them, and then once over
the tokens of each adapter. So requests with and without adapters share a batch.
"""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from arl.engine.linear_layers import linear_layers
from arl.engine.local.weight_receiver import WeightsError, named

_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_UNSUPPORTED = (
    "alpha_pattern", "fan_in_fan_out", "layer_replication", "lora_bias", "modules_to_save", "rank_pattern",
    "target_parameters", "trainable_token_indices", "use_bdlora", "use_dora", "use_qalora",
)  # fmt: skip
"""Settings of peft that ask for more than A and B of one rank and scale; adapters with them are refused."""

_MAX_LOADED = 64
"""Most adapters loaded at once. A run loads a few, and unloads them at its end."""


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """One layer's update, ready to apply: x @ a @ b. a [in, rank]; b [rank, out], scaled."""

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """An adapter that fits the model."""

    name: str
    path: str
    layers: Mapping[str, Factors]
    """Name of the model's module -> its factors."""
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Unique, unlike the name: a later adapter of the same name must not find this one's keys and values."""


class LoadedAdapters:
    """A model's adapters. Any thread may call `read` and `loaded`; the rest belongs to the model's thread."""

    def __init__(self, model: nn.Module, head: nn.Module) -> None:
        """head: makes logits. The head and experts see only some of a step's tokens, so neither is adapted."""
        linear = linear_layers(model, [head])
        self._linears = {name: layer for name, layer in linear.items() if ".experts." not in name}
        self._loaded: dict[str, Adapter] = {}
        self._groups: list[tuple[Adapter, torch.Tensor | None]] = []
        """The adapters of the next step, each with the indices of its tokens; None for all of them."""
        self._is_installed = False

    @property
    def loaded(self) -> dict[str, str]:
        """Name -> directory."""
        return {name: adapter.path for name, adapter in self._loaded.copy().items()}

    def find(self, name: str) -> Adapter | None:
        return self._loaded.get(name)

    def read(self, name: str, directory: str) -> Adapter:
        """Read peft's files. Raises WeightsError if a part is missing, does not fit, or is not supported."""
        if not os.path.isabs(directory) or not Path(directory).is_dir():
            raise WeightsError(f"lora_path is {directory!r}, which is not an absolute path of a directory here")
        scale = _scale(Path(directory, "adapter_config.json"))
        file = Path(directory, "adapter_model.safetensors")
        try:
            tensors = load_file(file)
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"cannot read {file}: {error}") from error
        layers: dict[str, Factors] = {}
        for key in sorted(key for key in tensors if key.endswith(_A)):
            layer = key.removesuffix(_A).removeprefix(_PREFIX)
            if (module := self._linears.get(layer)) is None or not key.startswith(_PREFIX):
                raise WeightsError(f"the served model has no linear layer {layer} to adapt")
            a, b = tensors.pop(key), tensors.pop(key.removesuffix(_A) + _B, None)
            num_in, num_out = module.in_features, module.out_features
            if b is None or a.dim() != 2 or a.shape[1] != num_in or b.shape != (num_out, len(a)):
                told = f"A {list(a.shape)} and B {None if b is None else list(b.shape)}"
                raise WeightsError(f"{layer} has {told}; it must have A [rank, {num_in}] and B [{num_out}, rank]")
            like = module.weight
            layers[layer] = Factors(a.T.to(like).contiguous(), (b.float() * scale).T.to(like).contiguous())
        if unknown := sorted(tensors):
            raise WeightsError(f"{directory} holds {named(unknown)}, which no layer uses")
        return Adapter(name=name, path=directory, layers=layers)

    def add(self, adapter: Adapter) -> None:
        """Let requests name it. Raises WeightsError if another has its name."""
        if adapter.name in self._loaded:
            raise WeightsError(f"Failed to load LoRA adapter {adapter.name} because it is already loaded")
        if len(self._loaded) >= _MAX_LOADED:
            raise WeightsError(
                f"Failed to load LoRA adapter {adapter.name}: {_MAX_LOADED} are loaded; unload one first"
            )
        if not self._is_installed:
            for name, module in self._linears.items():
                module.forward = self._adapted(name, module.forward)  # pyright: ignore[reportAttributeAccessIssue]
            self._is_installed = True
        self._loaded[adapter.name] = adapter

    def remove(self, name: str) -> None:
        """Refuse later requests that name it; earlier ones keep it. Raises WeightsError if it is not loaded."""
        if self._loaded.pop(name, None) is None:
            raise WeightsError(f"LoRA with name {name} does not exist. Loaded LoRAs: {', '.join(self._loaded)}")

    def use(self, tokens: Sequence[tuple[Adapter | None, int]], device: torch.device) -> None:
        """Set the adapters of the next step's tokens: runs of these in order, each with its number of tokens."""
        self._groups = []
        if not any(owner for owner, _ in tokens):
            return
        places: dict[Adapter | None, list[int]] = {}
        start = 0
        for owner, count in tokens:
            places.setdefault(owner, []).extend(range(start, start + count))
            start += count
        for owner, of_owner in places.items():
            if owner is not None:
                is_alone = len(places) == 1
                self._groups.append((owner, None if is_alone else torch.tensor(of_owner, device=device)))

    @contextmanager
    def within(self, tokens: slice) -> Iterator[None]:
        """Layers see only these of the step's tokens meanwhile."""
        whole, self._groups = self._groups, []
        for adapter, places in whole:
            if places is not None:
                places = places[(places >= tokens.start) & (places < tokens.stop)] - tokens.start
            if places is None or len(places):
                is_alone = places is None or len(places) == tokens.stop - tokens.start
                self._groups.append((adapter, None if is_alone else places))
        try:
            yield
        finally:
            self._groups = whole

    @property
    def is_used(self) -> bool:
        """Whether the next step has tokens of an adapter."""
        return bool(self._groups)

    def update(self, name: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add the updates of the step's adapters to y [tokens, out], which the linear layer `name` made of x."""
        for adapter, places in self._groups:
            if (factors := adapter.layers.get(name)) is None:
                continue
            if places is None:
                y.addmm_(x @ factors.a, factors.b)
            else:
                y.index_add_(0, places, x[places] @ factors.a @ factors.b)

    def _adapted(
        self, name: str, own: Callable[[torch.Tensor], torch.Tensor]
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """A layer's forward with the updates of the step's adapters added."""

        def forward(x: torch.Tensor) -> torch.Tensor:
            y = own(x).contiguous()
            self.update(name, x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1]))
            return y

        return forward


def _scale(file: Path) -> float:
    """The adapter's scale. Raises WeightsError for an unreadable or unsupported configuration."""
    try:
        config = json.loads(file.read_text())
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{file} is not a configuration as peft writes it: {error!r}") from error
    if (kind := config.get("peft_type", "LORA")) != "LORA":
        raise WeightsError(f"{file.parent} holds an adapter of type {kind}; this server supports LORA only")
    if asked := [name for name in _UNSUPPORTED if config.get(name)]:
        raise WeightsError(f"{file.parent} needs {named(asked)}, which this server does not support")
    if config.get("bias", "none") != "none":
        raise WeightsError(f"{file.parent} trains biases (bias={config['bias']}), which this server does not support")
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
