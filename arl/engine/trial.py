"""The trial of a model that was loaded: does a fast way compute what the model's own code computes?

    short sequences --the model's own forward, eager attention, one at a time--> right
                    |--the same, with embeddings moved by one rounding---------> how far rounding reaches
                    +--a way (packed rows, slots, ...)-------------------------> within a multiple of that, or refused

So that nothing hides on a short text, the trial makes windows shorter than its sequences, and raises attention scores
to where a soft-cap bends them. It computes in float32 whatever the model's dtype is: then a wrong way is off by orders
of magnitude more than rounding, where bfloat16 could not tell them apart.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from arl.api.errors import ModelError
from arl.engine.model_files import model_digest

_LENGTHS = (14, 11, 40)
"""So uneven that what padding changes shows."""
_SHARED = 9
"""Of the first and the last sequence: their first tokens are the same."""
_WINDOW = 5
"""Below the lengths, and the shared part."""
_REACH = re.compile(r"(?<!max_)(sliding_window|window_size|attention_chunk_size)")
"""Attributes, of modules and configs, that say how many tokens a token sees."""
_RAISED_SCORE = 30.0
"""Caps lie at 20 to 50 (Gemma 2, Grok): there a tanh is off by a tenth, and a softmax still sees many tokens."""
_ROUNDINGS = 64.0
"""A way may differ by this many times what one rounding of the embeddings does. A layer rounds about a dozen times, in
another order each way; errors add up like random steps."""

_scores: dict[nn.Module, float] | None = None


def probe_sequences(config: Any) -> list[torch.Tensor]:
    """int64[14], [11] and [40], the last of which begins as the first does. Without the tokens that a config names."""
    text = config.get_text_config()
    named = {value for c in (config, text) for key, value in c.to_dict().items() if "token" in key and _is_int(value)}
    usable = [token for token in range(min(text.vocab_size, 1000)) if token not in named]
    tokens = [usable[(5 + 37 * i * i + 11 * i) % len(usable)] for i in range(sum(_LENGTHS))]
    first, second, last = (s.clone() for s in torch.tensor(tokens).split(_LENGTHS))
    last[:_SHARED] = first[:_SHARED]
    return [first, second, last]


def refuse_tensors(module: nn.Module, given: Mapping[str, object]) -> None:
    """An attention function calls this with the arguments that it does not compute: masks of the model's own, biases,
    chosen blocks. Raises ModelError if one is a tensor that says which tokens see each other."""
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and name not in ("position_ids", "cache_position"):
            raise ModelError(f"{type(module).__name__} gives its attention {name}, which arl's cannot compute")


def note_scores(module: nn.Module, query: torch.Tensor, key: torch.Tensor, scaling: float | None) -> None:
    """An attention function calls this with [1, H, T, D] and [1, H_kv, T, D], for `watched`."""
    if _scores is not None:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).float()
        scores = query.float() @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        _scores[module] = max(_scores.get(module, 0.0), scores.abs().max().item())


@contextmanager
def watched() -> Iterator[dict[nn.Module, float]]:
    """Collects the modules that call arl's attention functions, with the largest score of each."""
    global _scores  # noqa: PLW0603 - not every model passes arguments on to its attention
    _scores = seen = {}
    try:
        yield seen
    finally:
        _scores = None


@contextmanager
def easily_told(model: Any, scores: Mapping[nn.Module, float]) -> Iterator[None]:
    """Short windows, and attention scores up to _RAISED_SCORE. scores: from `watched`."""
    with ExitStack() as undo:
        configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}.values()
        for owner in (*model.modules(), *configs):
            for name, value in list(vars(owner).items()):
                if _REACH.search(name) and _is_int(value) and value > _WINDOW:
                    undo.callback(setattr, owner, name, value)
                    setattr(owner, name, _WINDOW)
        for module, score in scores.items():
            if isinstance(scaling := getattr(module, "scaling", None), float) and 0 < score < _RAISED_SCORE:
                undo.callback(setattr, module, "scaling", scaling)
                module.scaling = scaling * _RAISED_SCORE / score  # pyright: ignore[reportArgumentType]
        yield


@contextmanager
def attending(model: Any, implementation: str) -> Iterator[None]:
    """Let the decoder use another of transformers' attention functions."""
    config = decoder_of(model).config
    before = config._attn_implementation
    config._attn_implementation_internal = implementation
    try:
        yield
    finally:
        config._attn_implementation_internal = before


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Let it compute in float32, in which it holds one layer at a time, and what is outside of layers."""
    kept: dict[torch.Tensor, torch.Tensor] = {}

    def tensors(part: nn.Module) -> set[torch.Tensor]:
        return {t for t in (*part.parameters(), *part.buffers()) if t.dtype in (torch.bfloat16, torch.float16)}

    def widen(part: nn.Module, *_: Any) -> None:
        for tensor in tensors(part):
            kept[tensor], tensor.data = tensor.data, tensor.data.float()

    def narrow(part: nn.Module, *_: Any) -> None:
        for tensor in (*part.parameters(), *part.buffers()):
            if tensor in kept:
                tensor.data = kept.pop(tensor)

    layers = transformer_layers(model)
    with ExitStack() as undo:
        undo.callback(narrow, model)  # last: a layer that raised is as it was, too
        for tensor in tensors(model).difference(*map(tensors, layers)):
            kept[tensor], tensor.data = tensor.data, tensor.data.float()
        for layer in layers:
            undo.callback(layer.register_forward_pre_hook(widen).remove)
            undo.callback(layer.register_forward_hook(narrow).remove)
        yield


def decoder_of(model: Any) -> Any:
    """The part of a language model, or of a classifier, that makes states of tokens."""
    decoder, embeddings = model.get_decoder(), model.get_input_embeddings()
    if decoder is model or embeddings not in decoder.modules():  # transformers guesses by names
        parts = (child for child in model.children() if isinstance(child, PreTrainedModel))
        decoder = next((part for part in parts if embeddings in part.modules()), decoder)
    if decoder is not model and model.get_output_embeddings() in decoder.modules():  # a whole language model
        return decoder_of(decoder)
    return decoder


def beside_decoder(model: Any) -> dict[str, nn.Module]:
    """The largest parts of a model that are neither of its decoder nor its head, such as a vision tower and what
    projects its output, by name. A model of texts has none."""
    if model.config.get_text_config() is model.config:
        return {}
    used = {*decoder_of(model).modules(), model.get_output_embeddings(), getattr(model, "score", None)}
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_within = any(name.startswith(f"{other}.") for other in found)
        if not is_within and used.isdisjoint(module.modules()) and any(True for _ in module.parameters()):
            found[name] = module
    return found


def transformer_layers(model: Any) -> list[nn.Module]:
    """The decoder's repeated blocks: its longest list of modules, or all the lists in its parts. Raises ModelError."""
    parts = [decoder_of(model)]
    while parts:
        children = [child for part in parts for child in part.children()]
        if lists := [child for child in children if isinstance(child, nn.ModuleList)]:
            return list(max(lists, key=len) if len(parts) == 1 else chain(*lists))
        parts = children
    raise ModelError(f"{type(model).__name__} has no list of decoder layers, so it cannot be sharded")


def rotary_limit(model: Any) -> float:
    """How many tokens a text may have so that rotary embeddings do not depend on the other texts of a batch."""
    limits = [torch.inf]
    for module in decoder_of(model).modules():
        kind = getattr(module, "rope_type", None)
        if kind == "longrope":
            limits.append(module.config.rope_parameters["original_max_position_embeddings"])
        elif kind == "dynamic":
            limits.append(module.original_max_seq_len)
    return min(limits)


def described(model: Any) -> str:
    """A model's class, type and kinds of layers, for messages."""
    text = model.config.get_text_config()
    kinds = getattr(text, "layer_types", None) or [type(layer).__name__ for layer in transformer_layers(model)]
    return f"{type(model).__name__} (model_type {text.model_type}, layers: {', '.join(sorted(set(kinds)))})"


@torch.no_grad()
def own_states(model: Any, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The last hidden states [T_i, H] of each sequence, by the model's own code. Raises ModelError if that fails."""
    device = next(model.parameters()).device
    try:
        with attending(model, "eager"):
            outputs = [decoder_of(model)(input_ids=s[None].to(device), use_cache=False) for s in sequences]
    except Exception as error:
        raise ModelError(f"{described(model)} cannot compute a short text by its own code: {error!r}") from error
    return [output.last_hidden_state[0] for output in outputs]


@contextmanager
def moved(model: Any) -> Iterator[None]:
    """Each number of the embeddings moves by float32's eps of itself, up or down."""

    def move(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        is_up = (torch.arange(output.numel(), device=output.device) * 7919 % 13 < 6).view(output.shape)
        eps = torch.finfo(torch.float32).eps
        return output * torch.where(is_up, 1 + eps, 1 - eps)

    hook = model.get_input_embeddings().register_forward_hook(move)
    try:
        yield
    finally:
        hook.remove()


def moved_states(model: Any, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`own_states`, with the embeddings `moved`."""
    with moved(model):
        return own_states(model, sequences)


def compared(
    own: Sequence[torch.Tensor], moved: Sequence[torch.Tensor], ours: Sequence[torch.Tensor]
) -> tuple[float, float]:
    """(the largest difference of any logit from the model's own, how large it may be). Each [T_i, V] in float32.

    moved: of the last sequences at least.
    """

    def largest(differences: Iterable[torch.Tensor]) -> float:
        return max(x.abs().max().nan_to_num(torch.inf).item() for x in differences)

    noise = largest(y - x for x, y in zip(own[-len(moved) :], moved, strict=True))
    bound = _ROUNDINGS * max(noise, torch.finfo(torch.float32).eps * largest(own))
    return largest(z - x for x, z in zip(own, ours, strict=True)), bound if bound < torch.inf else 0.0


def remembered(name: str | Path, what: Mapping[str, str], choose: Callable[[], str]) -> str:
    """What `choose` found, for this model, arl's code, the libraries, and `what` else it depends on: from the user's
    cache, if it was chosen before. What it raises is not kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "arl", "ways")
    if (digest := model_digest(str(name))) is None or not cache.is_absolute():  # a user without a home
        return choose()
    key = hashlib.sha256(json.dumps([digest, dict(what), *_versions()]).encode()).hexdigest()
    file = cache / key
    with suppress(OSError):
        return file.read_text()
    chosen = choose()
    with suppress(OSError):  # a cache is a convenience
        file.parent.mkdir(parents=True, exist_ok=True)
        aside = file.with_suffix(f".{os.getpid()}")
        aside.write_text(chosen)
        aside.replace(file)
    return chosen


@cache
def _versions() -> tuple[str, ...]:
    """Of the libraries that compute, and of arl's engines, by their code."""
    code = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.rglob("*.py"))))
    return (*(importlib.metadata.version(name) for name in ("torch", "transformers")), code.hexdigest())


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
