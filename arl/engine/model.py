"""Loading a Hugging Face causal language model for training, and reading log-probabilities off it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from arl.api.errors import ModelError
from arl.engine.attention import PACKED_ATTENTION, PackedLayout
from arl.engine.logprobs import token_logprobs
from arl.engine.microbatch import Microbatch

_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedModel:
    """A model with float32 weights, its tokenizer, and its config as it was stored (with the stored dtype)."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    stored_config: PreTrainedConfig


class Policy(nn.Module):
    """The model as the trainer uses it: a microbatch in, log-probabilities and entropies out.

    It owns no weights of its own. The head's weight is used inside this forward, so that sharding this module as the
    root makes it whole when it is needed.
    """

    def __init__(self, model: PreTrainedModel, logprob_chunk_size: int) -> None:
        super().__init__()
        self.model = model
        self.logprob_chunk_size = logprob_chunk_size

    def forward(self, batch: Microbatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(logprobs float32[M], entropies float32[M]) of the microbatch's trained tokens."""
        hidden = decode(self.model, batch.input_ids, batch.position_ids, batch.layout)
        return token_logprobs(
            hidden[batch.predictors],
            head_weight(self.model),
            batch.targets,
            batch.temperatures,
            self.logprob_chunk_size,
        )


def decode(
    model: PreTrainedModel, input_ids: torch.Tensor, position_ids: torch.Tensor, layout: PackedLayout
) -> torch.Tensor:
    """The last hidden states [T, H] of a packed row [1, T]."""
    output = model.get_decoder()(input_ids=input_ids, position_ids=position_ids, use_cache=False, packed_layout=layout)
    return output.last_hidden_state[0]


def load_model(name: str | Path) -> LoadedModel:
    """Load from a directory or, by name, from the hub. Raises ModelError saying what is missing or cannot be trained.

    The model is in evaluation mode, and stays so: dropout would make the trainer's log-probabilities random.
    """
    if (directory := Path(name)).is_dir() and not (directory / "config.json").is_file():
        raise ModelError(
            f"{name} has no config.json; a model directory needs config.json, *.safetensors and a tokenizer"
        )
    config = _load(AutoConfig, name, "its config")
    tokenizer = load_tokenizer(name)
    model, report = _load(
        AutoModelForCausalLM,
        name,
        "it",
        dtype=torch.float32,
        attn_implementation=PACKED_ATTENTION,
        output_loading_info=True,
    )
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"the weights of {name} lack {', '.join(missing)}: the download or copy is incomplete")
    model.eval()
    _check_supported(model, name)
    return LoadedModel(model=model, tokenizer=tokenizer, stored_config=config)


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory or of a model on the hub, for workflows. Raises ModelError in a sentence."""
    tokenizer = _load(AutoTokenizer, name, "its tokenizer")
    # Without its files, transformers makes up an empty tokenizer of the model's kind.
    if len(tokenizer) <= len(tokenizer.get_added_vocab()):
        raise ModelError(f"{name} has no tokenizer: save one there with tokenizer.save_pretrained(directory)")
    return tokenizer


def end_token_ids(name: str | Path) -> frozenset[int]:
    """The tokens at which inference servers end a response of this model: its config's and its tokenizer's."""
    configs: list[Any] = [_load(AutoConfig, name, "its config")]
    with contextlib.suppress(OSError):  # not every model has one
        configs.append(GenerationConfig.from_pretrained(str(name)))
    named = [getattr(config, "eos_token_id", None) for config in configs] + [load_tokenizer(name).eos_token_id]
    return frozenset(i for ids in named if ids is not None for i in (ids if isinstance(ids, list) else [ids]))


def local_directory(name: str) -> str:
    """`name` if it is a directory; else where the hub's model of that name is, downloaded if need be."""
    if Path(name).is_dir():
        return name
    try:
        return snapshot_download(name, allow_patterns=["*.json", "*.jinja", "*.safetensors", "*.model", "*.txt"])
    except Exception as error:
        raise ModelError(
            f"{name} is neither a model directory here nor a model that can be downloaded: {_first_line(error)}"
        ) from error


def transformer_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The repeated blocks of the model, which are sharded one by one."""
    return cast("nn.ModuleList", model.get_decoder().layers)


def head_weight(model: PreTrainedModel) -> torch.Tensor:
    """The language-model head's weight [V, H]; the embedding's own when they are tied."""
    return cast("nn.Linear", model.get_output_embeddings()).weight


def _load(auto_class: Any, name: str | Path, what: str, **options: object) -> Any:
    try:
        return auto_class.from_pretrained(str(name), **options)
    except Exception as error:
        raise ModelError(
            f"cannot load {what} from {name}: {_first_line(error)}. Name a directory written by save_pretrained "
            "(config.json, *.safetensors and the tokenizer's files), or a model's name on the hub"
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")


def _check_supported(model: PreTrainedModel, name: str | Path) -> None:
    head = model.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise ModelError(f"{name}: {type(model).__name__} needs a language-model head without bias to be trained")
    if not isinstance(getattr(model.get_decoder(), "layers", None), nn.ModuleList):
        raise ModelError(f"{name}: {type(model).__name__} has no list of decoder layers, so it cannot be sharded")
    unknown = set(getattr(model.config, "layer_types", None) or ()) - _LAYER_TYPES
    if unknown:
        raise ModelError(
            f"{name} has layers of type {', '.join(sorted(unknown))}; only {' and '.join(sorted(_LAYER_TYPES))} "
            "can be kept inside each sequence of a packed row"
        )
    _check_logits(model, name)


@torch.no_grad()
def _check_logits(model: PreTrainedModel, name: str | Path) -> None:
    """Compare with the model's own logits, so that a final scaling or soft-capping is refused, not left out.

    Nor are sliding windows: some models mean to have them from the mask alone, which a packed row does without.
    """
    input_ids = torch.arange(4)[None] % model.config.vocab_size
    layout = PackedLayout.of((4,), input_ids.device)
    position_ids = torch.arange(4)[None]
    windows: list[int | None] = []
    theirs = model(
        input_ids=input_ids, position_ids=position_ids, use_cache=False, packed_layout=layout, windows_seen=windows
    ).logits[0]
    ours = decode(model, input_ids, position_ids, layout) @ head_weight(model).T
    if not torch.allclose(theirs.float(), ours, rtol=1e-3, atol=1e-4):
        raise ModelError(
            f"{name}: {type(model).__name__} transforms its logits after the head (soft-capping or scaling); arl "
            "computes log-probabilities from the head alone and cannot train it yet"
        )
    if sum(window is not None for window in windows) < (num_sliding := _num_sliding_layers(model.config)):
        raise ModelError(
            f"{name}: its config gives {num_sliding} layers a sliding window, which {type(model).__name__} does not "
            "tell its attention function; arl would train it without"
        )


def _num_sliding_layers(config: Any) -> int:
    if types := getattr(config, "layer_types", None):
        return list(types).count("sliding_attention")
    return config.num_hidden_layers if getattr(config, "sliding_window", None) else 0
