"""Tiny models on disk, the same models as transformers runs them by itself, and train engines for them."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from arl.api.settings.engines import OptimizerConfig, TrainConfig
from arl.api.settings.run import Config
from arl.api.train_engine import Head, TrainSequence
from arl.engine.fsdp.train_engine import FSDPTrainEngine
from arl.engine.tiny import tiny_tokenizer
from arl.training.learner import Learner

MakeEngine = Callable[..., FSDPTrainEngine]
MakeLearner = Callable[..., Learner]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
"""The config of a model with experts in each layer, which its files hold apart and transformers fuses."""


def build_model(model_class: type[Any] = Qwen3ForCausalLM, *, tied: bool = False, **config: Any) -> PreTrainedModel:
    """Two layers and some 30,000 parameters with grouped queries, a Qwen3 unless told otherwise."""
    shape = {
        "vocab_size": len(tiny_tokenizer()),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.2,
        "tie_word_embeddings": tied,
    }
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**(shape | config)))
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms begin as ones and biases as zeros, which would hide mistakes
            nn.init.normal_(parameter, mean=parameter[0].item(), std=0.3)
    return model


def save_model(model: PreTrainedModel, directory: Path) -> Path:
    """The model with a tokenizer."""
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def write_model(
    directory: Path, model_class: type[Any] = Qwen3ForCausalLM, *, dtype: torch.dtype = torch.float32, **config: Any
) -> Path:
    """`build_model` on the disk."""
    return save_model(build_model(model_class, **config).to(dtype), directory)


def write_critic(directory: Path) -> Path:
    """A Qwen3 with a head of one label."""
    return write_model(directory, Qwen3ForSequenceClassification, num_labels=1)


def edited(source: Path, target: Path, **tensors: torch.Tensor | None) -> Path:
    """A copy of a model directory with tensors (dots for double underscores) replaced, or left out."""
    shutil.copytree(source, target)
    weights = load_file(target / "model.safetensors")
    for name, tensor in tensors.items():
        weights.pop(name.replace("__", "."), None)
        if tensor is not None:
            weights[name.replace("__", ".")] = tensor
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


@contextmanager
def engines(model_dir: Path, **defaults: Any) -> Iterator[MakeEngine]:
    """make(directory, optimizer=..., head=..., max_tokens_per_microbatch=..., ...) -> a train engine."""
    made: list[FSDPTrainEngine] = []

    def make(directory: Path = model_dir, head: Head = "policy", **options: Any) -> FSDPTrainEngine:
        # A large eps keeps AdamW smooth: it would otherwise blow rounding in tiny gradients up to whole steps.
        optimizer = OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1)
        config = TrainConfig(**{"optimizer": optimizer, **defaults, **options})
        made.append(FSDPTrainEngine(directory, config, head=head))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def learner_config(model_dir: Path, *, train: Mapping[str, Any] | None = None, **sections: Any) -> Config:
    """Of a learner for `random_groups`, with small microbatches."""
    settings = {
        "model": str(model_dir),
        "rollout": {"batch_size": 4, "group_size": 2},
        "train": {"optimizer": {"lr": 1e-3, "eps": 1e-3}, "max_tokens_per_microbatch": 60, **(train or {})},
    }
    return Config.model_validate(settings | sections)


def load_twin(directory: Path) -> PreTrainedModel:
    """The model as transformers runs it by itself, with attention in plain operations."""
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()


def load_critic(directory: Path) -> PreTrainedModel:
    """The model with a head of one label, as transformers runs it by itself."""
    return AutoModelForSequenceClassification.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32, num_labels=1
    ).eval()


@torch.no_grad()
def slow_values(model: PreTrainedModel, sequence: TrainSequence) -> torch.Tensor:
    """For each trained token, one forward pass of the model over the tokens before it."""
    values = torch.zeros(len(sequence))
    for place in sequence.loss_mask.nonzero()[:, 0].tolist():
        values[place] = model(input_ids=sequence.token_ids[None, :place]).logits[0, 0]
    return values


class Memory(TorchDispatchMode):
    """Bytes of the tensors that operations allocate: the most that lived at once between two of them, and the largest.

    Storages are watched through weak references, so that what autograd keeps for the backward pass counts too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.largest = 0
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in before:
                storage = x.untyped_storage()
                self._known[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self.largest = max(self.largest, storage.nbytes())
        self._known = {key: known for key, known in self._known.items() if not known[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._known.values()))
        return result
