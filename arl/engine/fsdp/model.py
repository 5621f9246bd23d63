"""Loads a Hugging Face model for training, and computes log-probabilities or values with it.

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

# Sharding gathers the root's weights for the backward pass when it reaches the outputs. torch before 2.13 finds them
# only in registered records.
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
        """The dtype in which files and servers hold the floating-point tensor of this name.

        It is the config's dtype, except for tensors that a model keeps in float32, such as the biases that choose among
        experts: bfloat16 would make them equal.
        """
        dtype = self.stored_config.dtype
        is_exempt = any(part in name for part in self.model._keep_in_fp32_modules_strict or ())
        return dtype if isinstance(dtype, torch.dtype) and not is_exempt else torch.float32


class TokenModel(nn.Module):
    """The model as the trainer uses it: a microbatch goes in, outputs for its trained tokens come out.

    Heads' weights are used inside `forward`, so that sharding this module as the root gathers them when needed.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def predicting(self, batch: Microbatch) -> torch.Tensor:
        """The hidden states [M, H] from which the trained tokens are predicted."""
        return decode(self.model, batch.input_ids, batch.position_ids, batch.layout)[batch.predictors]


class Policy(TokenModel):
    """A causal language model, optionally with a value head of its own."""

    def __init__(self, model: PreTrainedModel, logprob_chunk_size: int, value_head: nn.Linear | None = None) -> None:
        super().__init__(model)
        self.logprob_chunk_size = logprob_chunk_size
        self.value_head = value_head

    def forward(self, batch: Microbatch, *, with_logprobs: bool = True) -> TokenOutputs:
        """Without `with_logprobs` only values are computed; logprobs and entropy are then 0."""
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

    A token's value is that of the context before it. So the score that the model by itself gives a whole text is the
    value of any token appended to the text.
    """

    def forward(self, batch: Microbatch, *, with_logprobs: bool = True) -> TokenOutputs:
        """Logprobs and entropy are always 0, as there is no vocabulary."""
        values = token_values(self.predicting(batch), score_weight(self.model))
        nothing = torch.zeros_like(values, requires_grad=False)
        return TokenOutputs(logprobs=nothing, entropy=nothing, values=values)


def token_values(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden [M, H], weight [1, H] of a value head -> float32[M], summed in float32."""
    return hidden.float() @ weight.float()[0]


def decode(
    model: PreTrainedModel, input_ids: torch.Tensor, position_ids: torch.Tensor, layout: PackedLayout
) -> torch.Tensor:
    """The last hidden states [T, H] of a packed row [1, T]."""
    output = model.get_decoder()(input_ids=input_ids, position_ids=position_ids, use_cache=False, packed_layout=layout)
    return output.last_hidden_state[0]


def load_model(name: str | Path, head: Head = "policy") -> LoadedModel:
    """Load a directory or, by name, a model of the hub. Raises ModelError naming what is missing or cannot be trained.

    head value: a sequence-classification model of one label, with a new head of zeros where `name` is a causal language
    model. Other heads: a causal language model. The model stays in evaluation mode, as dropout would make the trainer's
    log-probabilities random.
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
        nn.init.zeros_(score_weight(model))  # after the check, which needs a head that is not zero
        _describe_classifier(config, model, tokenizer, end_token_ids(name))
    return LoadedModel(model=model, tokenizer=tokenizer, stored_config=config)


def new_value_head(model: PreTrainedModel) -> nn.Linear:
    """A value head for the model's hidden states. It is zero, so every context's first value is 0.

    A random head would add noise to the advantages, and its gradient would move a shared backbone in random directions
    until the head has learnt something.
    """
    head = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False)
    nn.init.zeros_(head.weight)
    return head


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory or of a model on the hub. Raises ModelError."""
    tokenizer = _load(AutoTokenizer, name, "its tokenizer")
    # Without its files, transformers returns an empty tokenizer of the model's kind.
    if len(tokenizer) <= len(tokenizer.get_added_vocab()):
        raise ModelError(f"{name} has no tokenizer: save one there with tokenizer.save_pretrained(directory)")
    return tokenizer


def end_token_ids(name: str | Path) -> frozenset[int]:
    """The tokens at which inference servers end a response: those of the model's config and of its tokenizer."""
    configs: list[Any] = [_load(AutoConfig, name, "its config")]
    with contextlib.suppress(OSError):  # not every model has one
        configs.append(GenerationConfig.from_pretrained(str(name)))
    named = [getattr(config, "eos_token_id", None) for config in configs] + [load_tokenizer(name).eos_token_id]
    return frozenset(i for ids in named if ids is not None for i in (ids if isinstance(ids, list) else [ids]))


def model_limits(config: PreTrainedConfig) -> ModelLimits:
    """The limits of a model with this config. Scaled rotary positions reach as far as they are scaled."""
    text: Any = config.get_text_config()
    context_length = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    if context_length is not None:
        scaled = (rope.get("factor") or 0) * (rope.get("original_max_position_embeddings") or 0)
        context_length = max(context_length, int(scaled))
    return ModelLimits(vocab_size=text.vocab_size, context_length=context_length)


def local_directory(name: str) -> str:
    """`name` if it is a directory; else the local copy of the hub's model of that name, downloaded if necessary."""
    if Path(name).is_dir():
        return name
    try:
        return snapshot_download(name, allow_patterns=["*.json", "*.jinja", "*.safetensors", "*.model", "*.txt"])
    except Exception as error:
        raise ModelError(
            f"{name} is neither a local model directory nor a model that can be downloaded: {_first_line(error)}"
        ) from error


def transformer_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The model's repeated blocks. They are sharded one by one."""
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
    """Silence transformers' own report of missing tensors; _check_whole reports them instead."""
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
    """Whether the config is that of a causal language model."""
    return any(name.endswith("ForCausalLM") for name in config.architectures or ())


def _check_whole(report: Mapping[str, Any], name: str | Path, head: Head, *, may_lack: set[str]) -> None:
    """Raise ModelError if transformers made a tensor up, or left a head out."""
    if missing := sorted(set(report["missing_keys"]) - may_lack):
        raise ModelError(f"the weights of {name} lack {', '.join(missing)}: the download or copy is incomplete")
    if head != "value" and _SCORE in report["unexpected_keys"]:
        raise ModelError(
            f"{name} has a value head ({_SCORE}): it is a critic or a reward model, and cannot be the policy. To "
            "start a separate critic from it, set algorithm.critic.model"
        )
    own = {"lm_head.weight"} if may_lack else set()
    if head == "value" and (others := sorted(set(report["unexpected_keys"]) - own)):
        raise ModelError(
            f"{name} has {', '.join(others)}, which no sequence-classification model of one label has; if it is a "
            f"value head, save it as {_SCORE}"
        )


def _describe_classifier(
    config: PreTrainedConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, end_tokens: Collection[int]
) -> None:
    """Turn a causal language model's config and tokenizer into those of the value model that was built from it.

    The model by itself scores a padded text at its last token that is not the pad token, so no text may end in the pad
    token. Candidates are the tokenizer's own, a new one if the embedding has a row for it, and the first token of every
    text. Without any of them the pad token stays unset, and the model by itself takes no padded texts.
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
            f"{name} has layers of type {', '.join(sorted(unknown))}; in a packed row only "
            f"{' and '.join(sorted(_LAYER_TYPES))} can be kept inside each sequence"
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
    """Compare with the model's own logits, so that a final scaling or soft-capping is refused and not left out.

    Sliding windows that a model applies by its mask alone are refused too, as a packed row has no mask.
    """
    config = model.config.get_text_config()
    # Without the pad token: a sequence-classification model by itself would score the token before it.
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
            f"{name}: its config gives {num_sliding} layers a sliding window, but {type(model).__name__} does not pass "
            "it to its attention function; arl would train the model without it"
        )


def _num_sliding_layers(config: Any) -> int:
    if types := getattr(config, "layer_types", None):
        return list(types).count("sliding_attention")
    return config.num_hidden_layers if getattr(config, "sliding_window", None) else 0
