"""Loading a Hugging Face model for training, and reading log-probabilities or values off it.

tokens --decoder--> hidden states --language-model head--> log-probabilities, entropies
                                  --value head [1, H]----> values
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from torch import nn
from torch.utils._pytree import register_dataclass
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from arl.api.engine import Head, ModelLimits, TokenOutputs
from arl.api.errors import ModelError
from arl.engine.fsdp.attention import PACKED_ATTENTION, PackedLayout
from arl.engine.fsdp.logprobs import token_logprobs
from arl.engine.fsdp.minibatch import Microbatch

# Sharding gathers the root's weights for the backward pass when it reaches the outputs, which torch before 2.13 does
# not find in a record that it knows nothing of.
register_dataclass(TokenOutputs)

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_SCORE = "score.weight"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedModel:
    """A model with float32 weights, its tokenizer, and its config as it was stored (with the stored dtype)."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    stored_config: PreTrainedConfig

    def stored_dtype(self, name: str) -> torch.dtype:
        """What files and servers have the floating-point tensor of this name in.

        That is the config's dtype; but some tensors of some models are to be float32 in any case, as the biases that
        choose among experts, which bfloat16 would make equal.
        """
        dtype = self.stored_config.dtype
        is_exempt = any(part in name for part in self.model._keep_in_fp32_modules_strict or ())
        return dtype if isinstance(dtype, torch.dtype) and not is_exempt else torch.float32


class TokenModel(nn.Module):
    """The model as the trainer uses it: a microbatch in, what it says of the trained tokens out.

    Heads' weights are used inside `forward`, so that sharding this module as the root makes them whole when needed.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def predicting(self, batch: Microbatch) -> torch.Tensor:
        """The hidden states [M, H] from which the trained tokens are predicted."""
        return decode(self.model, batch.input_ids, batch.position_ids, batch.layout)[batch.predictors]


class Policy(TokenModel):
    """A causal language model; with a value head beside it, if one is given, which it owns."""

    def __init__(self, model: PreTrainedModel, logprob_chunk_size: int, value_head: nn.Linear | None = None) -> None:
        super().__init__(model)
        self.logprob_chunk_size = logprob_chunk_size
        self.value_head = value_head

    def forward(self, batch: Microbatch, *, with_logprobs: bool = True) -> TokenOutputs:
        """with_logprobs: unset where values alone are asked for; logprobs and entropy are then 0."""
        hidden = self.predicting(batch)
        nothing = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
        logprobs, entropy = nothing, nothing
        if with_logprobs:
            logprobs, entropy = token_logprobs(
                hidden, head_weight(self.model), batch.targets, batch.temperatures, self.logprob_chunk_size
            )
        values = token_values(hidden, self.value_head.weight) if self.value_head is not None else nothing
        return TokenOutputs(logprobs=logprobs, entropy=entropy, values=values)


class Critic(TokenModel):
    """A sequence-classification model of one label, read at every trained token: a critic, or a reward model.

    A token's value is that of the context before it. The score of a whole text, as the model by itself gives it, is
    that of its last token's hidden state: the value of any token that is put behind the text.
    """

    def forward(self, batch: Microbatch, *, with_logprobs: bool = True) -> TokenOutputs:
        """Without logprobs in any case: there is no vocabulary."""
        values = token_values(self.predicting(batch), score_weight(self.model))
        nothing = torch.zeros_like(values, requires_grad=False)
        return TokenOutputs(logprobs=nothing, entropy=nothing, values=values)


def token_values(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden [M, H], weight [1, H] of a value head -> float32[M], summed in float32 whatever they are in."""
    return hidden.float() @ weight.float()[0]


def decode(
    model: PreTrainedModel, input_ids: torch.Tensor, position_ids: torch.Tensor, layout: PackedLayout
) -> torch.Tensor:
    """The last hidden states [T, H] of a packed row [1, T]."""
    output = model.get_decoder()(input_ids=input_ids, position_ids=position_ids, use_cache=False, packed_layout=layout)
    return output.last_hidden_state[0]


def load_model(name: str | Path, head: Head = "policy") -> LoadedModel:
    """Load from a directory or, by name, from the hub. Raises ModelError saying what is missing or cannot be trained.

    head value: a sequence-classification model of one label; where `name` is a causal language model, its value head is
    new, and zero. Otherwise a causal language model. The model is in evaluation mode, and stays so: dropout would make
    the trainer's log-probabilities random.
    """
    if (directory := Path(name)).is_dir() and not (directory / "config.json").is_file():
        raise ModelError(
            f"{name} has no config.json; a model directory needs config.json, *.safetensors and a tokenizer"
        )
    config = _load(AutoConfig, name, "its config")
    tokenizer = load_tokenizer(name)
    options = {"dtype": torch.float32, "attn_implementation": PACKED_ATTENTION, "output_loading_info": True}
    if head == "value":
        with _unreported():
            model, report = _load(AutoModelForSequenceClassification, name, "it", num_labels=1, **options)
    else:
        model, report = _load(AutoModelForCausalLM, name, "it", **options)
    is_new_head = head == "value" and _is_causal(config)
    _check_whole(report, name, head, may_lack={_SCORE} if is_new_head else set())
    model.eval()
    _check_supported(model, name, head)
    if is_new_head:
        nn.init.zeros_(score_weight(model))  # not before the check, which has to see a head that does something
        _describe_classifier(config, model, tokenizer, end_token_ids(name))
    return LoadedModel(model=model, tokenizer=tokenizer, stored_config=config)


def new_value_head(model: PreTrainedModel) -> nn.Linear:
    """A value head for the model's hidden states: zero, so that it begins by saying the same 0 of every context.

    Whatever a random one would say first is noise in the advantages; and its gradient would move a shared backbone in
    random directions until the head has learnt something.
    """
    head = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False)
    nn.init.zeros_(head.weight)
    return head


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


def model_limits(config: PreTrainedConfig) -> ModelLimits:
    """Of a model with this config; rotary positions that are scaled reach as far as they are scaled to."""
    text: Any = config.get_text_config()
    context_length = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    if context_length is not None:
        scaled = (rope.get("factor") or 0) * (rope.get("original_max_position_embeddings") or 0)
        context_length = max(context_length, int(scaled))
    return ModelLimits(vocab_size=text.vocab_size, context_length=context_length)


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


def score_weight(model: PreTrainedModel) -> torch.Tensor:
    """The weight [1, H] of a sequence-classification model's head."""
    return cast("nn.Linear", model.score).weight


def _load(auto_class: Any, name: str | Path, what: str, **options: object) -> Any:
    try:
        return auto_class.from_pretrained(str(name), **options)
    except Exception as error:
        raise ModelError(
            f"cannot load {what} from {name}: {_first_line(error)}. Name a directory written by save_pretrained "
            "(config.json, *.safetensors and the tokenizer's files), or a model's name on the hub"
        ) from error


@contextlib.contextmanager
def _unreported() -> Iterator[None]:
    """Without transformers' own table of what is missing, which here is looked at more closely."""
    logger = logging.getLogger("transformers.modeling_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")


def _is_causal(config: PreTrainedConfig) -> bool:
    """Whether the directory is one of a causal language model."""
    return any(name.endswith("ForCausalLM") for name in config.architectures or ())


def _check_whole(report: Mapping[str, Any], name: str | Path, head: Head, *, may_lack: set[str]) -> None:
    """Nothing may have been made up, and no head that was there left out."""
    if missing := sorted(set(report["missing_keys"]) - may_lack):
        raise ModelError(f"the weights of {name} lack {', '.join(missing)}: the download or copy is incomplete")
    if head != "value" and _SCORE in report["unexpected_keys"]:
        raise ModelError(
            f"{name} has a value head ({_SCORE}): it is a critic or a reward model, and cannot be the policy. A "
            "separate critic begins with it as algorithm.critic.model"
        )
    own = {"lm_head.weight"} if may_lack else set()
    if head == "value" and (others := sorted(set(report["unexpected_keys"]) - own)):
        raise ModelError(
            f"{name} has {', '.join(others)}, which a sequence-classification model of one label has not; if that is "
            f"a value head, save it as {_SCORE}"
        )


def _describe_classifier(
    config: PreTrainedConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, end_tokens: Collection[int]
) -> None:
    """Make a causal language model's config and tokenizer those of the value model that was built from it.

    By itself the model gives a padded text the score of its last token that is not the pad token. That has to be one
    that no text ends in: the tokenizer's own, or one new to it that the embedding has a row for, or the first token of
    every text. Where there is none, it stays unset, and the model by itself takes no padded texts.
    """
    config.architectures = [type(model).__name__]
    config.num_labels = 1
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in end_tokens:
        if len(tokenizer) < config.get_text_config().vocab_size:
            tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
        else:
            tokenizer.pad_token = tokenizer.bos_token if tokenizer.bos_token_id not in end_tokens else None
    config.get_text_config().pad_token_id = tokenizer.pad_token_id


def _check_supported(model: PreTrainedModel, name: str | Path, head: Head) -> None:
    _check_head(model, name, head)
    if not isinstance(getattr(model.get_decoder(), "layers", None), nn.ModuleList):
        raise ModelError(f"{name}: {type(model).__name__} has no list of decoder layers, so it cannot be sharded")
    unknown = set(getattr(model.config, "layer_types", None) or ()) - _LAYER_TYPES
    if unknown:
        raise ModelError(
            f"{name} has layers of type {', '.join(sorted(unknown))}; only {' and '.join(sorted(_LAYER_TYPES))} "
            "can be kept inside each sequence of a packed row"
        )
    _check_logits(model, name, head)


def _check_head(model: PreTrainedModel, name: str | Path, head: Head) -> None:
    if head == "value":
        score = getattr(model, "score", None)
        if not isinstance(score, nn.Linear) or score.bias is not None or score.out_features != 1:
            raise ModelError(f"{name}: {type(model).__name__} needs a head `score` of one label without bias")
    else:
        output = model.get_output_embeddings()
        if output is None or getattr(output, "bias", None) is not None:
            raise ModelError(f"{name}: {type(model).__name__} needs a language-model head without bias to be trained")


@torch.no_grad()
def _check_logits(model: PreTrainedModel, name: str | Path, head: Head) -> None:
    """Compare with the model's own logits, so that a final scaling or soft-capping is refused, not left out.

    Nor are sliding windows: some models mean to have them from the mask alone, which a packed row does without.
    """
    config = model.config.get_text_config()
    # No pad token: a sequence-classification model by itself gives the score before it.
    tokens = [token for token in range(5) if token != config.pad_token_id][:4]
    input_ids = torch.tensor([tokens]) % config.vocab_size
    layout = PackedLayout.of((4,), input_ids.device)
    position_ids = torch.arange(4)[None]
    windows: list[int | None] = []
    theirs = model(
        input_ids=input_ids, position_ids=position_ids, use_cache=False, packed_layout=layout, windows_seen=windows
    ).logits[0]
    hidden = decode(model, input_ids, position_ids, layout)
    ours = token_values(hidden, score_weight(model))[-1:] if head == "value" else hidden @ head_weight(model).T
    if not torch.allclose(theirs.float(), ours, rtol=1e-3, atol=1e-4):
        what = "values" if head == "value" else "log-probabilities"
        raise ModelError(
            f"{name}: {type(model).__name__} transforms its logits after the head (soft-capping or scaling); arl "
            f"computes {what} from the head alone and cannot train it yet"
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
