"""The model: loaded from a directory, run over a step's tokens, and given new weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from arl.api.errors import ConfigError, ModelError
from arl.engine.local.adapters import Adapters
from arl.engine.local.received_weights import StoredForm
from arl.engine.local.slot_attention import SLOT_ATTENTION, Chunk, DecoderStack, SlotBatch, quicken_norms
from arl.engine.local.slot_cache import CacheShape, SlotCache

_DEFAULT_CONTEXT = 4096
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "tekken.json")

_HEAD_ROWS = 256
"""Rows of logits that are held at a time where logprobs of given tokens are wanted: a vocabulary is long."""

NamedTensors = Callable[[], Iterable[tuple[str, torch.Tensor]]]
"""Yields (parameter name, tensor); called on the model thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Tokens of a step whose successors are given. at: indices into the step's tokens; targets: what follows each."""

    at: list[int] = field(default_factory=list[int])
    targets: list[int] = field(default_factory=list[int])


class ModelRunner:
    """A Hugging Face causal language model over a slot cache. Belongs to one thread at a time.

    Or a reward model, where is_scorer: a sequence classifier, whose "logits" are the scores of its labels.

    Raises ModelError when the directory holds no such model or the model needs what the server cannot do, and
    ConfigError for a device or dtype that there is not.
    """

    def __init__(self, model_dir: str, *, device: str, dtype: str, max_rows: int, context_length: int | None) -> None:
        self.device = _device(device)
        self.config = _read_config(model_dir)
        self.tokenizer = _read_tokenizer(model_dir)
        self.context_length = _context_length(self.config, context_length)
        self.is_scorer = any(name.endswith("ForSequenceClassification") for name in self.config.architectures or ())
        self.model = _read_model(model_dir, _dtype(dtype), self.is_scorer).to(self.device)
        self._head = _head(self.model, self.is_scorer)
        self.stored_form = StoredForm(self.model)
        self.adapters = Adapters(self.model, self._head)
        self.eos_ids = _eos_ids(self.config, self.model, self.tokenizer)
        shape = _cache_shape(self.config, self.model)
        self.cache = SlotCache(shape, max_rows, self.context_length, self.device)
        self._rows = torch.arange(max_rows, device=self.device)
        self._stack: DecoderStack | None = None
        self._try()

    @torch.inference_mode()
    def _try(self) -> None:
        """Compute a few tokens, so that a model that does not fit the slot cache is refused now.

        Takes the short way through the layers if it leads to the same logits.
        """
        if getattr(getattr(self.model.get_decoder(), "rotary_emb", None), "rope_type", None) == "longrope":
            raise ModelError("the model's rotary embedding (longrope) depends on how long its batch is; use another")
        quicken_norms(self.model)
        length = min(4, self.context_length)
        tokens = list(range(min(length, self.vocab_size)))
        whole = [Chunk(row=0, start=0, length=len(tokens))]
        try:
            wanted = self.forward(tokens, tokens, whole, None)
        except (RuntimeError, TypeError, AttributeError) as error:
            name = type(self.model).__name__
            raise ModelError(f"{name} cannot run over the embedded server's cache: {error}") from error
        try:
            self._stack = DecoderStack(self.model, self._head, self.context_length)
            agrees = torch.allclose(self.forward(tokens, tokens, whole, None), wanted, rtol=1e-4, atol=1e-5)
        except (RuntimeError, TypeError, AttributeError, ValueError):
            agrees = False
        if not agrees:
            self._stack = None

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @torch.inference_mode()
    def forward(
        self, token_ids: Sequence[int], positions: Sequence[int], chunks: Sequence[Chunk], keep: Sequence[int] | None
    ) -> torch.Tensor:
        """Compute N tokens, those of `chunks` last; returns logits [len(keep), vocabulary] of the tokens at `keep`.

        keep: indices into the N tokens; None means all.
        """
        states, head = self._run(token_ids, positions, chunks, keep)
        return head(states)

    @torch.inference_mode()
    def forward_given(
        self, token_ids: Sequence[int], positions: Sequence[int], chunks: Sequence[Chunk], keep: list[int], given: Given
    ) -> tuple[torch.Tensor, list[float]]:
        """What `forward` returns, and the logprobs of given.targets; few rows of their logits are held at a time.

        A model whose layers are not the common decoder's holds the logits of the whole step.
        """
        states, head = self._run(token_ids, positions, chunks, [*keep, *given.at])
        targets = torch.tensor(given.targets, dtype=torch.int64, device=self.device)[:, None]
        rows = zip(states[len(keep) :].split(_HEAD_ROWS), targets.split(_HEAD_ROWS), strict=True)
        logprobs = [head(some).float().log_softmax(-1).gather(1, which)[:, 0] for some, which in rows]
        return head(states[: len(keep)]), torch.cat(logprobs).tolist()

    def _run(
        self, token_ids: Sequence[int], positions: Sequence[int], chunks: Sequence[Chunk], keep: Sequence[int] | None
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        """The states of the tokens at `keep`, and what makes logits of them."""
        num_decoding = len(token_ids) - sum(chunk.length for chunk in chunks)
        batch = SlotBatch.of(self.cache, self._rows, positions[:num_decoding], chunks)
        ids, places = torch.tensor([token_ids, positions], device=self.device).unsqueeze(1)
        kept = None if keep is None else torch.tensor(keep, dtype=torch.int64, device=self.device)
        if self._stack is not None:
            return self._stack(ids, places, kept, batch), self._stack.head
        if self.is_scorer:
            decoder = self.model.get_decoder()
            states = decoder(input_ids=ids, position_ids=places, use_cache=False, slot_batch=batch).last_hidden_state[0]
            return (states if kept is None else states[kept]), self._head
        logits = self.model(
            input_ids=ids,
            position_ids=places,
            use_cache=False,
            logits_to_keep=0 if kept is None else kept,
            slot_batch=batch,
        ).logits[0]
        return logits, _as_they_are

    @torch.inference_mode()
    def load(self, tensors: NamedTensors) -> None:
        """Copy tensors into the parameters of their names; all of them, or none when one does not fit.

        Raises ModelError naming what does not fit. Parameters that are not named stay as they are.
        """
        parameters = self.model.state_dict()
        staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, tensor in tensors():
            parameter = parameters.get(name)
            if parameter is None:
                raise ModelError(f"the model has no parameter {name!r}; weights must have the names of its checkpoint")
            if parameter.shape != tensor.shape:
                raise ModelError(
                    f"{name} has shape {list(tensor.shape)}; the model's has {list(parameter.shape)}: "
                    "the weights are of another model"
                )
            staged.append((parameter, tensor))
        for parameter, tensor in staged:
            parameter.copy_(tensor)


def _as_they_are(logits: torch.Tensor) -> torch.Tensor:
    return logits


def _read_config(model_dir: str) -> Any:
    if Path(model_dir).exists() and not Path(model_dir, "config.json").is_file():
        raise ModelError(f"{model_dir} is not a model directory: it has no config.json")
    try:
        return AutoConfig.from_pretrained(model_dir)
    except (OSError, ValueError) as error:
        raise ModelError(f"{model_dir} is no model directory, nor a model to be had from the hub: {error}") from error


def _read_tokenizer(model_dir: str) -> Any | None:
    """None where the directory has none. Raises ModelError where it is broken."""
    directory = Path(model_dir)
    if directory.is_dir() and not any(next(directory.glob(name), None) for name in _TOKENIZER_FILES):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
    except (OSError, ValueError) as error:
        raise ModelError(f"the tokenizer in {model_dir} cannot be read: {error}") from error
    if not tokenizer.encode("a", add_special_tokens=False):  # what transformers makes up of files that hold none
        raise ModelError(f"the tokenizer in {model_dir} knows no letter; save the model's own with save_pretrained")
    return tokenizer


def _read_model(model_dir: str, dtype: torch.dtype, is_scorer: bool) -> Any:
    family = AutoModelForSequenceClassification if is_scorer else AutoModelForCausalLM
    try:
        loaded: Any = family.from_pretrained(
            model_dir, dtype=dtype, attn_implementation=SLOT_ATTENTION, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"the model in {model_dir} cannot be loaded: {error}") from error
    model, loading = loaded
    if missing := sorted(loading["missing_keys"]):
        raise ModelError(f"the weights in {model_dir} lack {len(missing)} parameters, such as {missing[0]}")
    return model.eval()


def _head(model: Any, is_scorer: bool) -> torch.nn.Module:
    head = getattr(model, "score", None) if is_scorer else model.get_output_embeddings()
    if head is None:
        name = type(model).__name__
        raise ModelError(f"{name} has no head named score; reward models are decoders with a linear one on top")
    return head


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch says AssertionError where it was built without CUDA
        raise ConfigError(f"device {name!r} cannot be used on this machine: {error}") from error
    return device


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"dtype is {name!r}; it must be float32, bfloat16 or float16")
    return dtype


def _context_length(config: Any, wanted: int | None) -> int:
    limit = config.max_position_embeddings
    if wanted is None:
        return min(limit, _DEFAULT_CONTEXT)
    if wanted > limit:
        raise ModelError(f"context_length is {wanted}; the model has positions for {limit} tokens at most")
    return wanted


def _eos_ids(config: Any, model: Any, tokenizer: Any) -> frozenset[int]:
    """End-of-sequence tokens by the model's configuration, its generation configuration and the tokenizer if any."""
    found: set[int] = set()
    for source in (config, getattr(model, "generation_config", None), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
    return frozenset(found)


def _cache_shape(config: Any, model: torch.nn.Module) -> CacheShape:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return CacheShape(
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head_dim,
        dtype=next(model.parameters()).dtype,
    )
