"""Low-rank adapters (LoRA, Hu et al. 2021) by peft: the model is frozen, and small matrices beside it are trained.

    y = W x + alpha / rank * B A x        W [out, in] frozen, A [rank, in] random at first, B [out, rank] zero

peft puts the adapters into the model's own layers, so packing, sharding and losses do not change. Servers get
W + alpha / rank * B A under W's own name, or the adapters alone as files in peft's format.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from arl.api.errors import ConfigError, ModelError, TransportError
from arl.api.settings.engines import LoRAConfig
from arl.api.version import install_command
from arl.engine.fsdp.model import ModelWriter, whole_directory
from arl.engine.fsdp.parallel import whole_tensor
from arl.engine.fsdp.policy import local_shard
from arl.engine.linear_layers import linear_layers, router_layers
from arl.engine.trial import beside_decoder
from arl.engine.weights.distributed import rows_of

_ADAPTER = "default"
"""peft's name for the one adapter there is. It is in parameters' names, not in files."""
_VALUE_HEAD = "score"
"""The name of a sequence-classification model's head."""


class Adapters:
    def __init__(self, writer: ModelWriter, base: str | Path, config: LoRAConfig, dtype: str, seed: int) -> None:
        """Freeze the writer's model and inject adapters, in place, before it is sharded. A seed fixes them.

        base: the model's directory or name, which adapter files record. dtype: of the computation. Raises ModelError
        for targets that are no linear layers, and ConfigError without peft.
        """
        self.model = model = writer.model
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._layers = _inject(model, config)
        narrow = {spec.name for spec in writer.own_specs if spec.dtype == dtype == "bfloat16"}
        for name, parameter in model.named_parameters():
            # Frozen weights stay as narrow as files have them: they never move, and each use rounds them anyway.
            if name.replace(".base_layer.", ".") in narrow and not parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
        self._rank, self._alpha = config.rank, config.alpha
        self._file_names = _file_names(model)
        source = str(Path(base).absolute() if Path(base).is_dir() else base)
        self._config = _config_file(model, source, config, self._suffixes)

    @cached_property
    def origin(self) -> LoRAOrigin:
        """The model that the adapters belong to; a collective when first asked for."""
        frozen = {name: p.detach() for name, p in self.model.named_parameters() if not p.requires_grad}
        sums = torch.stack([_fingerprint(tensor) for tensor in frozen.values()])
        dist.all_reduce(sums)
        return LoRAOrigin(
            rank=self._rank,
            alpha=self._alpha,
            target_modules=self._suffixes,
            frozen=dict(zip(frozen, sums.tolist(), strict=True)),
        )

    def copy(self, version: int) -> RankAdapter:
        """Copy the whole adapters aside, on the CPU of rank 0; a collective."""
        state = self.model.state_dict()
        whole = {file: whole_tensor(state[name].detach()) for name, file in self._file_names.items()}
        is_kept = dist.get_rank() == 0
        tensors = {file: tensor.to("cpu", copy=True) for file, tensor in whole.items() if is_kept}
        return RankAdapter(version, self._config, tensors)

    def merged(self) -> MergedWeights:
        """The model's tensors by their names before the injection; a collective. Valid until the next step."""
        state = self.model.state_dict()
        a = {layer: whole_tensor(state[f"{layer}.lora_A.{_ADAPTER}.weight"].detach()) for layer in self._layers}
        return MergedWeights(state=state, a=a, scaling=self._alpha / self._rank)

    @property
    def _suffixes(self) -> list[str]:
        """Names by which peft finds the same layers: the last part of each if that is enough."""
        last, beside = {name.rpartition(".")[2] for name in self._layers}, _beside(self.model)
        others = {
            name.rpartition(".")[2]
            for name, _ in self.model.named_modules()
            if name not in self._layers and ".lora_" not in name and not re.fullmatch(beside, name)
        }
        return sorted(self._layers if last & others else last)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAOrigin:
    """The model and the settings that adapters belong to."""

    rank: int
    alpha: int
    target_modules: list[str]
    frozen: Mapping[str, int]
    """Name -> fingerprint of each frozen parameter."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MergedWeights:
    """Merges a tensor when it is looked up, so that few merged ones are held at a time.

    Merged tensors are float32, sharded as the model is: a rank has the same rows of W and B, and all of A.
    """

    state: Mapping[str, torch.Tensor]
    """The model's tensors by their present names."""
    a: Mapping[str, torch.Tensor]
    """A of each adapted layer, whole."""
    scaling: float
    """alpha / rank"""

    @torch.no_grad()
    def __getitem__(self, name: str) -> torch.Tensor:
        layer, _, leaf = name.rpartition(".")
        if layer not in self.a:
            return self.state[name].detach()
        base = self.state[f"{layer}.base_layer.{leaf}"].detach()
        if leaf != "weight":
            return base
        b = self.state[f"{layer}.lora_B.{_ADAPTER}.weight"]
        update = local_shard(b) @ self.a[layer]
        merged = local_shard(base).float().add(update, alpha=self.scaling)
        if not isinstance(base, DTensor):
            return merged
        return DTensor.from_local(
            merged, base.device_mesh, base.placements, run_check=False, shape=base.shape, stride=base.stride()
        )


class RankAdapter:
    """One rank's copy of the adapters: a Snapshot that writes peft's format. Rank 0's has the tensors."""

    def __init__(self, version: int, config: bytes, tensors: Mapping[str, torch.Tensor]) -> None:
        """config: adapter_config.json. tensors: whole, by the names in peft's files."""
        self.version = version
        self._rank = dist.get_rank()
        self._config = config
        self._tensors: Mapping[str, torch.Tensor] | None = tensors

    def write(self, directory: Path) -> int:
        """Write a complete directory in peft's format on rank 0; returns its bytes. Others return 0."""
        if (tensors := self._tensors) is None:
            raise TransportError(f"the snapshot of version {self.version} was released")
        if self._rank:
            return 0
        with whole_directory(directory) as aside:
            save_file(dict(tensors), aside / "adapter_model.safetensors", metadata={"format": "pt"})
            (aside / "adapter_config.json").write_bytes(self._config)
            return sum(file.stat().st_size for file in aside.iterdir())

    def release(self) -> None:
        self._tensors = None


def _inject(model: PreTrainedModel, config: LoRAConfig) -> list[str]:
    """Adapt layers, freeze everything else but a value head, and return the layers' names."""
    peft, kind = _peft(), type(model).__name__
    beside = _beside(model)
    names = [name for name, _ in model.named_modules() if name and not re.fullmatch(beside, name)]
    linear = linear_layers(model, (model.get_output_embeddings(), getattr(model, _VALUE_HEAD, None)))
    if config.target_modules == "all-linear":
        # peft's own "all-linear" includes fused experts, which it merges anew in each forward pass.
        routers = router_layers(model)
        layers = [name for name in names if name in linear and name not in routers]
        if not layers:
            raise ModelError(f"train.lora cannot adapt this {kind}: it has no linear layers")
    else:
        targets = [f".{target}" for target in config.target_modules]
        layers = [name for name in names if f".{name}".endswith(tuple(targets))]
        for target in targets:
            if not any(f".{name}".endswith(target) for name in layers):
                what = f"train.lora.target_modules names {target[1:]}, but no layer of this model"
                where = " outside its vision tower" if beside else ""
                raise ModelError(f"{what}{where} has that name")
        if others := [name for name in layers if name not in linear]:
            raise ModelError(
                f"train.lora.target_modules is {', '.join(config.target_modules)}, which includes {others[0]}: not a "
                f"linear layer within {kind}, or one that shares its weight. Name linear layers, such as q_proj, "
                "k_proj, v_proj, o_proj"
            )
    # peft 0.21 takes `gate_proj` and its like for fused experts if a model's config says that it is a mixture, also
    # where layers have these names. What contains the model has no config.
    settings = _settings(model, config, [f"model.{name}" for name in layers])
    peft.inject_adapter_in_model(settings, nn.ModuleDict({"model": model}), adapter_name=_ADAPTER)
    model.eval()
    for parameter in _value_head(model).values():
        parameter.requires_grad_()
    return layers


def _beside(model: PreTrainedModel) -> str:
    """A pattern of the names within a model's vision tower and the like; empty without one."""
    return "|".join(rf"{re.escape(name)}(\..*)?" for name in beside_decoder(model))


def _fingerprint(parameter: torch.Tensor) -> torch.Tensor:
    """int64: this rank's part of a sum over float32 bit patterns, each times a number that depends on its row.

    Sums of integers modulo 2^64 do not depend on the number of ranks.
    """
    rows = local_shard(parameter).float().view(torch.int32).flatten(start_dim=1 if parameter.ndim > 1 else 0)
    first = 0
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        first = rows_of(parameter.shape[0], mesh.get_local_rank(), mesh.size()).start
    sums = rows.sum(dim=1, dtype=torch.int64) if parameter.ndim > 1 else rows.to(torch.int64)
    factors = 2 * torch.arange(first, first + len(sums), device=sums.device) + 1
    return (sums * factors).sum()


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ConfigError(f"train.lora needs peft: {install_command('lora')}; or unset train.lora") from None
    return peft


def _file_names(model: PreTrainedModel) -> dict[str, str]:
    """For each trained parameter: name in the model -> name in peft's files. A PeftModel wraps the model twice."""
    trained = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
    return {name: f"base_model.model.{name.replace(f'.{_ADAPTER}.', '.')}" for name in trained}


def _value_head(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The parameters of a sequence-classification model's head. It may be new, so all of it is trained."""
    head = getattr(model, _VALUE_HEAD, None)
    return {f"{_VALUE_HEAD}.{name}": p for name, p in head.named_parameters()} if head is not None else {}


def _settings(model: PreTrainedModel, config: LoRAConfig, targets: list[str], **others: Any) -> Any:
    """peft's LoraConfig."""
    task = "SEQ_CLS" if _value_head(model) else "CAUSAL_LM"
    return _peft().LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets, task_type=task, **others)


def _config_file(model: PreTrainedModel, base: str, config: LoRAConfig, suffixes: list[str]) -> bytes:
    """adapter_config.json, the same bytes each time. It lists suffixes, as servers do not know "all-linear"."""
    saved = [_VALUE_HEAD] if _value_head(model) else None
    others = {"modules_to_save": saved, "base_model_name_or_path": base, "inference_mode": True}
    if beside := _beside(model):
        others["exclude_modules"] = beside  # whatever its modules' names end in
    settings = _settings(model, config, suffixes, **others)
    settings.target_modules = suffixes  # peft made it a set, which has no order
    with tempfile.TemporaryDirectory() as scratch:
        settings.save_pretrained(scratch)
        return (Path(scratch) / "adapter_config.json").read_bytes()
