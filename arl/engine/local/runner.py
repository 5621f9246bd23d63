"""The model: loaded from a directory, run over a step's tokens, and given new weights.

The model's own code runs over the slot cache. The common decoder takes a shorter way, if both agree.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from arl.api.errors import ConfigError, ModelError
from arl.api.settings.engines import DEFAULT_CONTEXT_LENGTH
from arl.data.image_processor import ImageProcessor
from arl.engine.local.adapters import LoadedAdapters
from arl.engine.local.fused_decoder import FusedDecoder
from arl.engine.local.memory import Occupation, with_own_memory
from arl.engine.local.model_threads import TOKENS_FOR_A_THREAD, ModelThreads
from arl.engine.local.slot_attention import SLOT_ATTENTION, CacheShape, Chunk, SlotBatch, SlotCache
from arl.engine.local.vision_tower import PART, ShownImages, Tower, is_sighted
from arl.engine.local.weight_receiver import StoredForm, check_fit
from arl.engine.routers import Routers, find_routers

log = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "tekken.json")

_HEAD_ROWS = 256
"""Rows of logits held at a time to compute logprobs of given tokens; a row is as long as the vocabulary."""

_SHARED_LOGITS = 1 << 20
"""Threads share the head and the sampling from so many logits on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """The N tokens that one step computes: first one of each decoding sequence, then the tokens of `chunks`."""

    token_ids: Sequence[int]
    positions: Sequence[int]
    chunks: Sequence[Chunk] = ()
    keep: Sequence[int] | None = None
    """Indices of the tokens that need logits; None means all N, without logprobs of given tokens."""
    given: Sequence[tuple[int, int]] = ()
    """(index, id of the next token) of each token whose successor is given."""
    rotary: np.ndarray | None = None
    """int64[N] or, where placeholders have a time, a row and a column, [3, N]: where rotary embeddings turn tokens to.
    None: to `positions`."""
    shown: ShownImages | None = None
    """What its placeholders stand for, if it has some."""


class ModelRunner:
    """A Hugging Face model over a slot cache. Belongs to one thread at a time.

    It is a causal language model, or (is_scorer) a sequence classifier, whose "logits" are the scores of its labels.

    Raises ModelError if the directory holds no such model or the server does not support it, and ConfigError for an
    unknown device or dtype.
    """

    def __init__(
        self,
        model_dir: str,
        *,
        device: str,
        dtype: str,
        max_rows: int,
        context_length: int | None,
        num_threads: int = 1,
    ) -> None:
        self.device = _device(device)
        self.config = _read_config(model_dir)
        text_config = self.config.get_text_config()
        self.vocab_size: int = text_config.vocab_size
        self.tokenizer = _read_tokenizer(model_dir)
        self.context_length = _context_length(text_config, context_length)
        self.is_scorer = any(name.endswith("ForSequenceClassification") for name in self.config.architectures or ())
        self.model = _read_model(model_dir, _dtype(dtype), self._kind()).to(self.device)
        with_own_memory(self.model)
        self._head = _head(self.model, self.is_scorer)
        self.stored_form = StoredForm(self.model)
        self.adapters = LoadedAdapters(self.model, self._head)
        self.routers = None if self.is_scorer else _routers(self.model, model_dir)
        """Set for a mixture of experts whose routes it can record."""
        self.experts: np.ndarray | None = None
        """[N, layers, experts per token] The routes of the last step's tokens, if it has routers."""
        self._threads = ModelThreads(num_threads if self.device.type == "cpu" else 1)
        self.tower: Tower | None = None
        """Set for a model that takes images."""
        if is_sighted(self.config) and not self.is_scorer:
            self.tower = Tower(self.model, ImageProcessor(model_dir), self.adapters, self._threads)
        self.eos_ids = _eos_ids(text_config, self.model, self.tokenizer)
        shape = _cache_shape(text_config, self.model)
        self.cache = SlotCache(shape, max_rows, self.context_length, self.device)
        self.occupation = Occupation(self.model, self.cache)
        self._fused: FusedDecoder | None = None
        self._try()

    def _kind(self) -> Any:
        if self.is_scorer:
            return AutoModelForSequenceClassification
        return AutoModelForImageTextToText if is_sighted(self.config) else AutoModelForCausalLM

    def close(self) -> None:
        """End its threads."""
        self._threads.close()

    @torch.inference_mode()
    def _try(self) -> None:
        """Compute a few tokens; refuse a model that does not fit the slot cache. If the shorter way agrees, take it."""
        if getattr(getattr(self.model.get_decoder(), "rotary_emb", None), "rope_type", None) == "longrope":
            raise ModelError("the model's rotary embedding (longrope) depends on how long its batch is; use another")
        tokens = list(range(min(4, self.context_length, self.vocab_size)))
        chunk = Chunk(row=0, start=0, length=len(tokens))
        whole = StepInput(token_ids=tokens, positions=tokens, chunks=[chunk], **self._sample_of_images(len(tokens)))
        try:
            wanted, _ = self.forward(whole)
        except (RuntimeError, TypeError, AttributeError) as error:
            name = type(self.model).__name__
            raise ModelError(f"{name} cannot run over the embedded server's cache: {error}") from error
        try:
            self._fused = FusedDecoder(self.model, self.adapters, self.context_length)
            agrees = _agree(self.forward(whole)[0], wanted)
        except (RuntimeError, TypeError, AttributeError, ValueError):
            agrees = False
        if not agrees:
            self._fused = None

    def _sample_of_images(self, num_tokens: int) -> dict[str, Any]:
        """Something to see at the first of a few tokens, and positions around it."""
        if self.tower is None:
            return {}
        like = self.model.get_input_embeddings().weight
        vectors = torch.linspace(-1, 1, (1 + self.tower.depth) * like.shape[1]).view(-1, 1, like.shape[1]).to(like)
        positions = np.add.outer(np.arange(3), np.arange(num_tokens)) % num_tokens
        return {
            "shown": ShownImages(torch.zeros(1, dtype=torch.int64, device=self.device), vectors),
            "rotary": positions,
        }

    @torch.inference_mode()
    def forward(self, step: StepInput) -> tuple[torch.Tensor, list[float]]:
        """Logits [len(keep), vocabulary] of the tokens at `keep`, and the logprobs of the given successors.

        The logits of the given tokens are computed a few rows at a time. A model outside the common decoder computes
        them for the whole step at once.
        """
        states, head = self._run(step)
        self._threads.share_operations(len(states) * self.vocab_size >= _SHARED_LOGITS)
        if not step.given:
            return head(states), []
        states, scored = states[: -len(step.given)], states[-len(step.given) :]
        targets = torch.tensor([target for _, target in step.given], dtype=torch.int64, device=self.device)[:, None]
        rows = zip(scored.split(_HEAD_ROWS), targets.split(_HEAD_ROWS), strict=True)
        logprobs = [head(some).float().log_softmax(-1).gather(1, which)[:, 0] for some, which in rows]
        return head(states), torch.cat(logprobs).tolist()

    def _run(self, step: StepInput) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        """The states of the tokens at `keep`, then of those in `given`; and the function from states to logits."""
        tokens = np.array([step.token_ids, step.positions])
        ids, places = torch.from_numpy(tokens).to(self.device).unbind()
        if step.rotary is not None:
            places = torch.from_numpy(step.rotary).to(self.device)
        kept = None
        if step.keep is not None:
            wanted = [*step.keep, *(index for index, _ in step.given)]
            kept = torch.tensor(wanted, dtype=torch.int64, device=self.device)
        if self._fused is not None:
            states = self._in_parts(self._fused, step, ids, places, tokens[1])
            return self._fused.final(states if kept is None else states[kept]), self._head
        self._share_operations(len(ids))
        batch = SlotBatch.of(self.cache, tokens[1], step.chunks)
        if self.is_scorer or self.tower is not None:
            states = self._decoded(ids, places, batch, step.shown)
            return (states if kept is None else states[kept]), self._head
        ids, places = ids[None], places[None]
        with nullcontext() if self.routers is None else self.routers.recording() as recorded:
            logits = self.model(
                input_ids=ids,
                position_ids=places,
                use_cache=False,
                logits_to_keep=0 if kept is None else kept,
                slot_batch=batch,
            ).logits[0]
        if self.routers is not None and recorded is not None:
            self.experts = self.routers.experts_of(recorded)
        return logits, lambda logits: logits

    def _decoded(
        self, ids: torch.Tensor, places: torch.Tensor, batch: SlotBatch, shown: ShownImages | None
    ) -> torch.Tensor:
        """The decoder's own output [N, hidden]."""
        decoder = self.model.get_decoder()
        inputs: dict[str, Any] = {"position_ids": places[..., None, :], "use_cache": False, "slot_batch": batch}
        if shown is None:
            return decoder(input_ids=ids[None], **inputs).last_hidden_state[0]
        states = decoder.embed_tokens(ids)
        states[shown.places] = shown.vectors[0]
        if len(shown.vectors) > 1:
            is_shown = torch.zeros(1, len(ids), dtype=torch.bool, device=self.device)
            is_shown[0, shown.places] = True
            inputs |= {"visual_pos_masks": is_shown, "deepstack_visual_embeds": list(shown.vectors[1:])}
        return decoder(inputs_embeds=states[None], **inputs).last_hidden_state[0]

    def _share_operations(self, num_tokens: int) -> None:
        self._threads.share_operations(num_tokens >= 2 * TOKENS_FOR_A_THREAD)

    def _in_parts(
        self, fused: FusedDecoder, step: StepInput, ids: torch.Tensor, places: torch.Tensor, positions: np.ndarray
    ) -> torch.Tensor:
        """The states of a step's tokens: each thread computes those of some rows, if they can be shared out."""
        lengths = [chunk.length for chunk in step.chunks]
        num_decoding = len(ids) - sum(lengths)
        cuts = [] if self.adapters.is_used else self._threads.cuts([1] * num_decoding + lengths)
        if not cuts:
            self._share_operations(len(ids))
        ends = np.cumsum([0] + [1] * num_decoding + lengths)

        def part(first: int, last: int) -> torch.Tensor:
            tokens = slice(ends[first], ends[last])
            chunks = step.chunks[max(first - num_decoding, 0) : max(last - num_decoding, 0)]
            batch = SlotBatch.of(self.cache, positions[tokens], chunks, first)
            shown = None if step.shown is None else step.shown.within(tokens.start, tokens.stop)
            return fused(ids[tokens], places[..., tokens], batch, shown)

        bounds = [0, *cuts, len(ends) - 1]
        parts = self._threads.run([partial(part, first, last) for first, last in pairwise(bounds)])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @torch.inference_mode()
    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors into parameters by name; others stay. Raises WeightsError, copying none, if one does not fit."""
        parameters = self.model.state_dict()
        check_fit(tensors, {name: parameter.shape for name, parameter in parameters.items()})
        self.occupation.check(tensors)
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)
        self.occupation.note_load()
        if self._fused is not None:
            self._fused.refresh()
        if self.tower is not None and any(name.startswith(PART) for name in tensors):
            self.tower.forget()


def _read_config(model_dir: str) -> Any:
    if Path(model_dir).exists() and not Path(model_dir, "config.json").is_file():
        raise ModelError(f"{model_dir} is not a model directory: it has no config.json")
    try:
        return AutoConfig.from_pretrained(model_dir)
    except (OSError, ValueError) as error:
        raise ModelError(f"{model_dir} is neither a model directory nor a model on the hub: {error}") from error


def _read_tokenizer(model_dir: str) -> Any | None:
    """The tokenizer, or None if the directory has none. Raises ModelError if it is broken."""
    directory = Path(model_dir)
    if directory.is_dir() and not any(next(directory.glob(name), None) for name in _TOKENIZER_FILES):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
    except (OSError, ValueError) as error:
        raise ModelError(f"the tokenizer in {model_dir} cannot be read: {error}") from error
    if not tokenizer.encode("a", add_special_tokens=False):  # transformers makes one up from no files
        raise ModelError(
            f"the tokenizer in {model_dir} has no token for any letter; save the model's own with save_pretrained"
        )
    return tokenizer


def _read_model(model_dir: str, dtype: torch.dtype, kind: Any) -> Any:
    """kind: the class of transformers that loads it. Its tower, if any, sees all of an image at once."""
    attention: Any = SLOT_ATTENTION
    if kind is AutoModelForImageTextToText:
        attention = {"": SLOT_ATTENTION, "text_config": SLOT_ATTENTION, "vision_config": "sdpa"}
    try:
        loaded: Any = kind.from_pretrained(
            model_dir, dtype=dtype, attn_implementation=attention, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"the model in {model_dir} cannot be loaded: {error}") from error
    model, loading = loaded
    if missing := sorted(loading["missing_keys"]):
        raise ModelError(f"the weights in {model_dir} lack {len(missing)} parameters, such as {missing[0]}")
    return model.eval()


def _head(model: Any, is_scorer: bool) -> nn.Module:
    head = getattr(model, "score", None) if is_scorer else model.get_output_embeddings()
    if head is None:
        name = type(model).__name__
        raise ModelError(f"{name} has no head named score; reward models are decoders with a linear one on top")
    return head


def _routers(model: Any, model_dir: str) -> Routers | None:
    try:
        return find_routers(model, model_dir)
    except ModelError as error:  # it generates all the same
        log.warning("this server returns no routes: %s", error)
        return None


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # a torch without CUDA raises AssertionError
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
        return min(limit, DEFAULT_CONTEXT_LENGTH)
    if wanted > limit:
        raise ModelError(f"context_length is {wanted}; the model has positions for {limit} tokens at most")
    return wanted


def _eos_ids(config: Any, model: Any, tokenizer: Any) -> frozenset[int]:
    """End-of-sequence tokens of the model's configuration, its generation configuration and the tokenizer, if any."""
    found: set[int] = set()
    for source in (config, getattr(model, "generation_config", None), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
    return frozenset(found)


def _cache_shape(config: Any, model: nn.Module) -> CacheShape:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):  # multi-head latent attention, whose heads the model expands
        head_dim, num_kv_heads = config.qk_nope_head_dim + config.qk_rope_head_dim, config.num_attention_heads
        head_dim = max(head_dim, config.v_head_dim)
    return CacheShape(
        num_layers=config.num_hidden_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=next(model.parameters()).dtype,
    )


def _agree(fused: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether two ways through the model differ by rounding alone."""
    many = 128 if own.dtype == torch.float32 else 8
    roundings = many * torch.finfo(own.dtype).eps * own.abs().max().item()
    return torch.allclose(fused.float(), own.float(), rtol=0.0, atol=roundings)
