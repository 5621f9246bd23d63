"""The model: loaded from a directory, run over a step's tokens, given new weights, and released from memory.

The model's own code computes all tokens of a step together, over the slot cache ("slots"). The common decoder takes a
shorter way. Models with recurrent modules have states beside the slots ("states"). The rest computes one sequence after
another, each with a cache of transformers' own ("own"). The first of these ways that agrees with the model's own full
forward pass on a few tokens is taken.
"""

from __future__ import annotations

import ctypes
import inspect
import logging
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from arl.api.errors import ConfigError, ModelError
from arl.api.settings.engines import DEFAULT_CONTEXT_LENGTH
from arl.data.image_processor import FAMILIES, ImageProcessor
from arl.engine.local.adapters import LoadedAdapters
from arl.engine.local.fused_decoder import FusedDecoder
from arl.engine.local.slot_attention import SLOT_ATTENTION, Chunk, SlotBatch, SlotCache, computing
from arl.engine.local.states import OwnCache, StateCache, Survey
from arl.engine.local.vision import PART, ShownImages, Tower
from arl.engine.local.weight_receiver import StoredForm, WeightsError, check_fit, named
from arl.engine.model_files import file_dtypes, whole_class
from arl.engine.routers import Routers, find_routers
from arl.engine.trial import (
    attending,
    compared,
    decoder_of,
    described,
    easily_told,
    in_float32,
    moved,
    probe_sequences,
    remembered,
    watched,
)

log = logging.getLogger(__name__)

MemoryPart = Literal["kv_cache", "weights"]
"""What can be released by itself, as SGLang names it."""
PARTS: tuple[MemoryPart, ...] = get_args(MemoryPart)

TOKENS_FOR_A_THREAD = 24
"""With fewer tokens for each, another thread costs more than it gains."""

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "tekken.json")

_HEAD_ROWS = 256
"""Rows of logits held at a time to compute logprobs of given tokens; a row is as long as the vocabulary."""

_CACHE_NAMES = ("past_key_values", "cache_params", "state")
"""What transformers' models call the cache that they take and return."""

WAYS = ("slots", "states many", "states one", "own many", "own one", "own many eager", "own never eager")
"""How the server computes, the fastest first. many, one: with so many tokens of a prompt at a time the model's code
goes on from a state, or from a cache. never: it computes all tokens again. eager: transformers' attention function."""
_TRIAL = (((0, 0, 8), (1, 0, 3)), ((0, 8, 9), (1, 3, 9)), ((0, 9, 10), (1, 9, 10)))
"""Its steps, as (row, start, end): row 0 decodes from the second one on, and row 1 from the third."""

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
    unknown device.
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
        """dtype: float32, bfloat16 or float16. context_length: None for the model's own, up to a default."""
        try:
            self.device = torch.device(device)
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:  # a torch without CUDA raises AssertionError
            raise ConfigError(f"device {device!r} cannot be used on this machine: {error}") from error
        try:
            self.config: Any = AutoConfig.from_pretrained(model_dir)
        except (OSError, ValueError) as error:
            raise ModelError(f"{model_dir} is not a model directory: {error}") from error
        text_config = self.config.get_text_config()
        self.vocab_size: int = text_config.vocab_size
        self.tokenizer = _read_tokenizer(model_dir)
        limit: int = getattr(text_config, "max_position_embeddings", None) or sys.maxsize
        rope = getattr(text_config, "rope_parameters", None) or {}
        if is_longrope := rope.get("rope_type") == "longrope":
            limit = rope["original_max_position_embeddings"]
        self.context_length = context_length or min(limit, DEFAULT_CONTEXT_LENGTH)
        if self.context_length > limit:
            why = "longrope turns longer sequences otherwise than" if is_longrope else "the model has positions for"
            raise ModelError(f"context_length is {context_length}; {why} {limit} tokens at most")
        self.is_scorer = any(name.endswith("ForSequenceClassification") for name in self.config.architectures or ())
        takes_images = self.config.model_type in FAMILIES and not self.is_scorer
        kind = AutoModelForSequenceClassification if self.is_scorer else whole_class(self.config)
        self.model = _read_model(model_dir, kind, getattr(torch, dtype)).to(self.device)
        for parameter in self.model.parameters():
            if not parameter.untyped_storage().resizable():  # mapped from a file: it could not be released
                parameter.data = parameter.data.clone()
        self._head: Any = getattr(self.model, "score", None) if self.is_scorer else self.model.get_output_embeddings()
        if self._head is None:
            name = type(self.model).__name__
            raise ModelError(f"{name} has no head named score; reward models are decoders with a linear one on top")
        self.stored_form = StoredForm(self.model, file_dtypes(model_dir))
        self.adapters = LoadedAdapters(self.model, self._head)
        self.routers: Routers | None = None
        """Set for a mixture of experts whose routes it can record."""
        try:
            self.routers = None if self.is_scorer else find_routers(self.model, model_dir)
        except ModelError as error:  # it generates all the same
            log.warning("this server returns no routes: %s", error)
        self.experts: np.ndarray | None = None
        """[N, layers, experts per token] The routes of the last step's tokens, if it has routers."""
        self._threads = ModelThreads(num_threads if self.device.type == "cpu" else 1)
        self.tower: Tower | None = None
        """Set for a model that takes images."""
        if takes_images:
            self.tower = Tower(self.model, ImageProcessor(model_dir), self.adapters, self._threads.share_operations)
        self.eos_ids = _eos_ids(text_config, self.model, self.tokenizer)
        self.released: frozenset[MemoryPart] = frozenset()
        """The parts whose memory is released now."""
        self._lacks_weights = False
        """The weights are released, or not loaded again since."""
        self._sizes: dict[torch.UntypedStorage, int] = {}
        """The storages that were released, and how many bytes each had."""
        self._called = decoder_of(self.model) if self.is_scorer else self.model
        self._takes = inspect.signature(self._called.forward).parameters
        self._max_rows = max_rows
        self._own_attention: str = decoder_of(self.model).config._attn_implementation
        self.cache: Any = None
        """The SlotCache, StateCache or OwnCache of its way."""
        self._fused: FusedDecoder | None = None
        what = {"serves": type(self.model).__name__, "dtype": dtype, "device": self.device.type}
        self.way = remembered(model_dir, what, self._find_way)
        """One of WAYS."""
        survey = self._survey()
        self._go(self.way, survey)
        if self.way == "slots" and not any(window and window < self.context_length for *_, window in survey.shapes):
            self._try_fused()

    def close(self) -> None:
        """End its threads."""
        self._threads.close()

    # ---- its way ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _find_way(self) -> str:
        """The first of WAYS that computes what the model's own code computes. Raises ModelError if none does."""
        model, refused = self.model, list[str]()
        rows = [sequence.tolist()[: _TRIAL[-1][0][2]] for sequence in probe_sequences(self.config)[:2]]
        with watched() as scores:
            survey = self._survey()
        with in_float32(model), easily_told(model, scores):
            own = self._own_logits(rows)
            with moved(model):
                others = self._own_logits(rows[-1:])
        for way in WAYS:
            try:
                with in_float32(model), easily_told(model, scores):
                    self._go(way, survey, torch.empty(0, device=self.device))
                    difference, bound = compared(own, others, self._computed(rows))
                if difference <= bound:
                    if next(model.parameters()).dtype != torch.float32:  # it must not raise in this dtype either
                        self._go(way, survey)
                        self._computed(rows)
                    log.info("%s is served by %s. %s", type(model).__name__, way, "; ".join(refused))
                    return way
                refused.append(f"{way}: logits differ by {difference:.2g}, and rounding explains {bound:.1g}")
            except Exception as error:  # noqa: BLE001 - the model's code, used as it was not meant to be
                refused.append(f"{way}: {type(error).__name__}: {error}".splitlines()[0])
        raise ModelError(
            f"{described(model)} cannot be served: in none of its ways does the embedded server compute what the "
            f"model's own code does ({'; '.join(refused)})"
        )

    @torch.inference_mode()
    def _survey(self) -> Survey:
        with attending(self.model, SLOT_ATTENTION):
            return Survey(decoder_of(self.model), probe_sequences(self.config)[0][None].to(self.device))

    def _go(self, way: str, survey: Survey, like: torch.Tensor | None = None) -> None:
        """Compute this way from now on, over an empty cache. like: has the dtype of keys and values, if not the
        model's. Raises what the model's code has raised, and ModelError for states that it does not have."""
        for module in survey.recurrent:
            vars(module).pop("forward", None)  # a former cache's
        config: Any = decoder_of(self.model).config
        config._attn_implementation_internal = SLOT_ATTENTION
        if way.startswith("own"):
            config._attn_implementation_internal = "eager" if "eager" in way else self._own_attention
            self.cache = OwnCache(way)
            return
        if survey.error is not None:
            raise survey.error
        if (way == "slots") == bool(survey.recurrent):
            raise ModelError(f"the model has {len(survey.recurrent)} recurrent modules")
        sizes: Any = {
            "num_layers": len(survey.shapes),
            "num_kv_heads": max((heads for heads, *_ in survey.shapes), default=1),
            "head_dim": max((size for _, size, _ in survey.shapes), default=1),
            "max_rows": self._max_rows,
            "max_length": max(self.context_length, _TRIAL[-1][0][2]),
            "like": next(self.model.parameters()) if like is None else like,
        }
        if way == "slots":
            self.cache = SlotCache(**sizes)
            return
        self.cache = StateCache(way, survey, self.adapters, **sizes)
        chunk = Chunk(row=0, start=0, length=1)
        self.forward(StepInput(token_ids=[0], positions=[0], chunks=[chunk]))  # it shows what states there are

    def _own_logits(self, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """[T, vocabulary] of each row, by the model's own code with all tokens at once."""
        with attending(self.model, "eager"):
            ids = [torch.tensor([tokens], device=self.device) for tokens in rows]
            return [self._output(None, input_ids=row, use_cache=False).logits[0].float() for row in ids]

    def _computed(self, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """The same, by steps as the server makes them: in chunks, and then token after token, together."""
        logits: list[list[torch.Tensor]] = [[] for _ in rows]
        for number, spans in enumerate(_TRIAL):
            chunks = [Chunk(row=row, start=start, length=end - start) for row, start, end in spans if number <= row]
            step = StepInput(
                token_ids=[token for row, start, end in spans for token in rows[row][start:end]],
                positions=[i for _, start, end in spans for i in range(start, end)],
                chunks=chunks,
            )
            self.cache.reserve(len(rows), max(step.positions) + 1)
            parts = self.forward(step)[0].split([end - start for _, start, end in spans])
            for (row, *_), part in zip(spans, parts, strict=True):
                logits[row].append(part.float())
        return [torch.cat(parts) for parts in logits]

    @torch.inference_mode()
    def _try_fused(self) -> None:
        """Take the shorter way if it agrees with the model's own code on a few tokens."""
        tokens = list(range(min(4, self.context_length, self.vocab_size)))
        rotary, shown = None, None
        if self.tower is not None:  # an image at the first token, and positions around it
            like = self.model.get_input_embeddings().weight
            vectors = torch.linspace(-1, 1, (1 + self.tower.depth) * like.shape[1]).view(-1, 1, like.shape[1]).to(like)
            shown = ShownImages(torch.zeros(1, dtype=torch.int64, device=self.device), vectors)
            rotary = np.add.outer(np.arange(3), np.arange(len(tokens))) % len(tokens)
        chunk = Chunk(row=0, start=0, length=len(tokens))
        whole = StepInput(token_ids=tokens, positions=tokens, chunks=[chunk], rotary=rotary, shown=shown)
        own, _ = self.forward(whole)
        roundings = (128 if own.dtype == torch.float32 else 8) * torch.finfo(own.dtype).eps * own.abs().max().item()
        try:
            self._fused = FusedDecoder(self.model, self.adapters, self.context_length)
            agrees = torch.allclose(self.forward(whole)[0].float(), own.float(), rtol=0.0, atol=roundings)
        except (RuntimeError, TypeError, AttributeError, ValueError):
            agrees = False
        if not agrees:
            self._fused = None

    # ---- steps ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, step: StepInput) -> tuple[torch.Tensor, list[float]]:
        """Logits [len(keep), vocabulary] of the tokens at `keep`, and the logprobs of the given successors.

        The logits of the given tokens are computed a few rows at a time. A model outside the common decoder computes
        them for the whole step at once.
        """
        states, head = self._run(step)
        self._threads.share_operations(len(states) * self.vocab_size, _SHARED_LOGITS)
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
        self._threads.share_operations(len(ids))
        if isinstance(self.cache, OwnCache):
            logits = self._one_by_one(self.cache, step, ids)
            return (logits if kept is None else logits[kept]), lambda logits: logits
        batch, passing = SlotBatch.of(self.cache, tokens[1], step.chunks), nullcontext()
        if isinstance(self.cache, StateCache):
            passing = self.cache.passing(tokens[1], step.chunks)
        with computing(batch), passing:
            if self.tower is not None:
                states = self._decoded(ids, places, step.shown)
                return (states if kept is None else states[kept]), self._head
            output = self._output(kept, input_ids=ids[None], position_ids=places[None], use_cache=False)
        return output.logits[0], lambda logits: logits

    def _output(self, kept: torch.Tensor | None, **inputs: Any) -> Any:
        """What the model's own code returns for one sequence, with logits [1, len(kept), vocabulary]. kept: indices of
        the tokens that need logits; None: all do. It gets those of the inputs that it takes."""
        inputs["logits_to_keep"] = 0 if kept is None else kept
        with nullcontext() if self.routers is None else self.routers.recording() as recorded:
            output = self._called(**{name: value for name, value in inputs.items() if name in self._takes})
        if self.routers is not None and recorded is not None:
            self.experts = self.routers.experts_of(recorded)
        if self.is_scorer:
            output.logits = self._head(output.last_hidden_state)
        if kept is not None and "logits_to_keep" not in self._takes:
            output.logits = output.logits[:, kept]
        return output

    def _one_by_one(self, cache: OwnCache, step: StepInput, ids: torch.Tensor) -> torch.Tensor:
        """The logits [N, vocabulary] of a step, by the model's own code for one row after another."""
        results, experts, start = list[torch.Tensor](), list[np.ndarray](), 0
        for run in cache.runs(step.positions, step.chunks):
            tokens = slice(start, start + run.length)
            start = tokens.stop
            new, known = ids[tokens], cache.rows.get(run.row) if run.start else None
            inputs: dict[str, Any] = {"use_cache": False}
            if "never" in cache.way:
                new = new if known is None else torch.cat([known, new])
            else:
                inputs = {"use_cache": True, "position_ids": torch.arange(run.start, run.end, device=self.device)[None]}
                inputs |= {} if known is None else dict.fromkeys(_CACHE_NAMES, known)
            kept = torch.arange(len(new) - run.length, len(new), device=self.device)
            with self.adapters.within(tokens):
                output = self._output(kept, input_ids=new[None], **inputs)
            results.append(output.logits[0])
            if self.experts is not None:
                experts.append(self.experts[-run.length :])
            cache.rows[run.row] = next((output[name] for name in _CACHE_NAMES if output.get(name) is not None), new)
        self.experts = np.concatenate(experts) if experts else None
        return torch.cat(results)

    def _decoded(self, ids: torch.Tensor, places: torch.Tensor, shown: ShownImages | None) -> torch.Tensor:
        """The decoder's own output [N, hidden]."""
        decoder = self.model.get_decoder()
        inputs: dict[str, Any] = {"position_ids": places[..., None, :], "use_cache": False}
        if shown is None:
            return decoder(input_ids=ids[None], **inputs).last_hidden_state[0]
        states = decoder.embed_tokens(ids)
        states[shown.places] = shown.vectors[0]
        if len(shown.vectors) > 1:
            is_shown = torch.zeros(1, len(ids), dtype=torch.bool, device=self.device)
            is_shown[0, shown.places] = True
            inputs |= {"visual_pos_masks": is_shown, "deepstack_visual_embeds": list(shown.vectors[1:])}
        return decoder(inputs_embeds=states[None], **inputs).last_hidden_state[0]

    def _in_parts(
        self, fused: FusedDecoder, step: StepInput, ids: torch.Tensor, places: torch.Tensor, positions: np.ndarray
    ) -> torch.Tensor:
        """The states of a step's tokens: each thread computes those of some rows, if they can be shared out."""
        lengths = [chunk.length for chunk in step.chunks]
        num_decoding = len(ids) - sum(lengths)
        cuts = [] if self.adapters.is_used else self._threads.cuts([1] * num_decoding + lengths)
        if not cuts:
            self._threads.share_operations(len(ids))
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
        """Copy tensors into parameters and buffers by name.

        Others stay, unless the weights were released: then all must come. Raises WeightsError, copying none, if one
        does not fit.
        """
        parameters = self.model.state_dict()
        check_fit(tensors, {name: parameter.shape for name, parameter in parameters.items()})
        if "weights" in self.released:
            raise WeightsError("the weights' memory is released; call /resume_memory_occupation before loading")
        if self._lacks_weights and (missing := sorted(self.stored_form.own_names - tensors.keys())):
            raise WeightsError(
                f"the weights were released, so all must be loaded again, and {named(missing)} is missing"
            )
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)
        self._lacks_weights = False
        if self._fused is not None:
            self._fused.refresh()
        if self.tower is not None and any(name.startswith(PART) for name in tensors):
            self.tower.forget()

    # Memory. Tensors stay the objects that they are, in the model and in the fused decoder; only their memory goes and
    # comes. What it then holds is undefined, so nothing is computed until all weights have been loaded again.

    @property
    def can_compute(self) -> bool:
        """Its memory is there, and its weights are."""
        return not self.released and not self._lacks_weights

    @property
    def held_bytes(self) -> dict[MemoryPart, int]:
        return {"kv_cache": self.cache.num_bytes, "weights": sum(storage.nbytes() for storage in self._storages())}

    def release(self, parts: Collection[MemoryPart]) -> None:
        """Parts that are released already stay so."""
        if "kv_cache" in parts and "kv_cache" not in self.released:
            self.cache.release()
        if "weights" in parts and "weights" not in self.released:
            self._sizes = {storage: storage.nbytes() for storage in self._storages()}
            for storage in self._sizes:
                storage.resize_(0)
            self._lacks_weights = True
        self.released |= frozenset(parts)
        # Let the system have what torch, or the C library, would keep for later.
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        elif (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc alone has it
            trim(0)

    def resume(self, parts: Collection[MemoryPart]) -> None:
        """Parts that are held already stay so."""
        if "weights" in parts and "weights" in self.released:
            for storage, size in self._sizes.items():
                storage.resize_(size)
            self._sizes = {}
        if "kv_cache" in parts and "kv_cache" in self.released:
            self.cache.resume()
        self.released -= frozenset(parts)

    def _storages(self) -> list[torch.UntypedStorage]:
        """Each storage of weights once, though several parameters may be parts of it."""
        storages = [parameter.untyped_storage() for parameter in self.model.parameters()]
        return list({storage._cdata: storage for storage in storages}.values())


class ModelThreads:
    """The CPU threads of the model: each computes some rows of a step, or all of them share each operation.

    Threads that share an operation wait for each other at its end, a hundred times in a step, and spin meanwhile:
    beside other programs that takes many times as long. Threads that have rows of their own meet once in a step.
    Belongs to the model thread, which is one of them.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._others: ThreadPoolExecutor | None = None
        if num_threads > 1:
            self._others = ThreadPoolExecutor(num_threads - 1, "arl-rows", lambda: torch.set_num_threads(1))

    def close(self) -> None:
        if self._others is not None:
            self._others.shutdown()

    def cuts(self, lengths: Sequence[int]) -> list[int]:
        """Where to cut rows of so many tokens each, so that each thread has about as many; empty if that cannot be."""
        total = sum(lengths)
        num_parts = min(self._num_threads, total // TOKENS_FOR_A_THREAD)
        if num_parts < 2:
            return []
        ends = np.cumsum(lengths)
        cuts = (np.searchsorted(ends, total * np.arange(1, num_parts) / num_parts) + 1).tolist()
        shares = np.diff([0, *ends[np.array(cuts) - 1], total])
        return cuts if shares.min() > 0 and shares.max() <= 1.5 * total / num_parts else []

    def share_operations(self, amount: int, enough: int | None = None) -> None:
        """Let all threads share each of the next operations, if there is enough work: by default tokens for two."""
        is_worth_it = amount >= (enough or 2 * TOKENS_FOR_A_THREAD)
        num_threads = self._num_threads if is_worth_it else 1
        if num_threads != torch.get_num_threads():
            torch.set_num_threads(num_threads)

    def run(self, parts: Sequence[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
        """Compute each part on a thread of its own. Raises a part's error once all have ended."""
        if len(parts) == 1 or self._others is None:
            return [part() for part in parts]
        self.share_operations(0)
        others = [self._others.submit(torch.inference_mode()(part)) for part in parts[1:]]
        try:
            first = parts[0]()
        finally:
            wait(others)
        return [first, *(other.result() for other in others)]


def _read_tokenizer(model_dir: str) -> Any | None:
    """The tokenizer, or None if the directory has none. Raises ModelError if it is broken."""
    if not any(next(Path(model_dir).glob(name), None) for name in _TOKENIZER_FILES):
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


def _read_model(model_dir: str, kind: Any, dtype: torch.dtype) -> Any:
    """kind: the class of transformers that loads it."""
    try:
        loaded: Any = kind.from_pretrained(model_dir, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"the model in {model_dir} cannot be loaded: {error}") from error
    model, loading = loaded
    if missing := sorted(loading["missing_keys"]):
        raise ModelError(f"the weights in {model_dir} lack {len(missing)} parameters, such as {missing[0]}")
    return model.eval()


def _eos_ids(config: Any, model: Any, tokenizer: Any) -> frozenset[int]:
    """End-of-sequence tokens of the model's configuration, its generation configuration and the tokenizer, if any."""
    found: set[int] = set()
    for source in (config, getattr(model, "generation_config", None), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
    return frozenset(found)
