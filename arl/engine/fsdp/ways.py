"""How a model's decoder computes a packed row: the first of three ways that gives what the model's own code gives.

    packed   the row [1, T] at once; only attention knows where sequences begin
    mixed    the same, but modules that carry a state along the sequence get each sequence by itself, [N, L]
    apart    the whole decoder gets each sequence by itself, with its own attention

What sequences share is computed once in a packed row, and for each sequence where they are apart: padded on the right,
which no token sees, as models are causal. No list of models decides; the trial of arl.engine.trial does, at loading.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from arl.algorithm.prefix_tree import PrefixOrder, RowPlan
from arl.api.errors import ModelError
from arl.engine.fsdp.attention import PACKED_ATTENTION, PackedLayout, current_row, row_of
from arl.engine.routers import ReplayedRoutes
from arl.engine.trial import (
    attending,
    compared,
    decoder_of,
    described,
    easily_told,
    moved_states,
    own_states,
    probe_sequences,
    rotary_limit,
    transformer_layers,
    watched,
)

log = logging.getLogger(__name__)


class RowDecoder:
    """A model's decoder for packed rows.

    way: "packed"; "mixed" and the names of the classes whose modules carry a state; or "apart" and the name of
    transformers' attention function, sdpa or eager.
    """

    def __init__(self, model: PreTrainedModel, way: str) -> None:
        """Changes how the model's modules compute. Call it before layers are wrapped or sharded."""
        self.model, self.way = model, way
        self._current: PackedLayout | None = None
        """The row that is computed now."""
        self._limit = rotary_limit(model)
        self._undo = ExitStack()
        self._decoder = decoder_of(model)
        kind, *names = way.split()
        self._is_apart = kind == "apart"
        self._undo.enter_context(attending(model, names[0] if self._is_apart else PACKED_ATTENTION))
        for layer in transformer_layers(model) if kind == "mixed" else ():
            for module in layer.modules():
                if type(module).__name__ in names:
                    self._replace(module, _apart(module.forward))
            self._replace(layer, _for_row(layer.forward))
            # Outside of what wraps the forward later: a checkpoint keeps the row with the other arguments.
            self._undo.callback(layer.register_forward_pre_hook(self._hand_row, with_kwargs=True).remove)

    def __call__(
        self,
        inputs: Mapping[str, Any],
        position_ids: torch.Tensor,
        layout: PackedLayout,
        routes: ReplayedRoutes | None = None,
    ) -> torch.Tensor:
        """The last hidden states [T, H] of a packed row. inputs: input_ids [1, T], or for a row with images what
        `decoder_inputs` made of them. routes: only for layers that `Routers.replay_in` knows. Raises ModelError for a
        text that is longer than the model's rotary embeddings allow in a row."""
        if layout.max_keys > self._limit:
            raise ModelError(
                f"a sequence has {layout.max_keys} tokens; from {self._limit} on, the rotary embeddings of "
                f"{type(self.model).__name__} depend on the longest text of a batch: keep sequences shorter"
            )
        if not self._is_apart:
            given = {} if routes is None else {"replayed_routes": routes}
            self._current = layout
            output = self._decoder(**inputs, position_ids=position_ids, use_cache=False, packed_layout=layout, **given)
            return output.last_hidden_state[0]
        places, found = layout.apart
        given = {} if routes is None else {"replayed_routes": routes.at(places)}
        output = self._decoder(**_padded(inputs, places, len(found)), use_cache=False, **given)
        return output.last_hidden_state.flatten(0, 1)[found]

    def close(self) -> None:
        """Let the model compute as before."""
        self._undo.close()

    def _replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._undo.callback(setattr, module, "forward", module.forward)
        module.forward = forward

    def _hand_row(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Not every decoder passes its keyword arguments on to its layers."""
        return args, {"packed_layout": self._current} | kwargs


def _for_row(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's forward that tells its modules of the row, also when the backward pass computes it again."""
    names = inspect.signature(forward).parameters.values()
    passes_on = any(p.kind is p.VAR_KEYWORD or p.name == "packed_layout" for p in names)

    @wraps(forward)
    def run(*args: Any, packed_layout: PackedLayout, **kwargs: Any) -> Any:
        given = {"packed_layout": packed_layout} if passes_on else {}
        with row_of(packed_layout):
            return forward(*args, **given, **kwargs)

    return run


def _apart(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a module with a state, that computes each sequence of the row by itself."""

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if (row := current_row()) is None:
            return forward(*args, **kwargs)
        places, found = row.apart
        output = forward(*_padded(args, places, len(found)), **_padded(kwargs, places, len(found)))

        def of_row(x: torch.Tensor) -> torch.Tensor:
            return x.flatten(0, 1)[found][None] if x.shape[:2] == places.shape else x

        return tree_map_only(torch.Tensor, of_row, output)

    return run


def _padded(values: Any, places: torch.Tensor, num_tokens: int) -> Any:
    """Tensors [1, T, ...] of a row as [N, L, ...] of its sequences, wherever they are in `values`."""
    return tree_map_only(torch.Tensor, lambda x: x[0, places] if x.shape[:2] == (1, num_tokens) else x, values)


@torch.no_grad()
def find_way(model: PreTrainedModel, to_logits: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """The first way that computes what the model's own code computes.

    to_logits: from states [M, H], whose differences are then told in nats. Raises ModelError if there is none.
    """
    refused: list[str] = []
    sequences = probe_sequences(model.config)
    seen: dict[nn.Module, float] = {}
    try:
        with watched() as seen, closing(RowDecoder(model, "mixed")) as decoder:
            _states(decoder, sequences)
        stateful = {type(m).__name__ for layer in transformer_layers(model) for m in _cache_takers(layer, seen)}
        first = [" ".join(["mixed", *sorted(stateful)])] if stateful else ["packed", "mixed"]
    except Exception as error:  # noqa: BLE001 - the model's code, used as it was not meant to be
        refused.append(f"packed or mixed: {_said(error)}")
        first = []
    with easily_told(model, seen):
        own = [to_logits(states) for states in own_states(model, sequences)]
        moved = [to_logits(states) for states in moved_states(model, sequences[-1:])]
        for way in (*first, "apart sdpa", "apart eager"):
            try:
                with closing(RowDecoder(model, way)) as decoder:
                    states = _states(decoder, sequences)
            except Exception as error:  # noqa: BLE001
                refused.append(f"{way}: {_said(error)}")
                continue
            difference, bound = compared(own, moved, [to_logits(x) for x in states])
            if difference <= bound:
                log.info("%s is trained %s. %s", type(model).__name__, way, "; ".join(refused))
                return way
            refused.append(f"{way}: logits differ by {difference:.2g}, and rounding explains {bound:.1g}")
    raise ModelError(
        f"arl cannot train {described(model)}, as none of its ways gives what its own code does: {'; '.join(refused)}"
    )


def _states(decoder: RowDecoder, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The states [T_i, H] of the sequences in one row."""
    plan = RowPlan.of(PrefixOrder.of([s.numpy() for s in sequences]))
    device = next(decoder.model.parameters()).device
    layout = PackedLayout(plan, device)
    places = plan.apart[0][plan.order.indices.argsort()]
    row = torch.empty(plan.num_tokens, dtype=torch.int64)
    for sequence, where in zip(sequences, places, strict=True):
        row[where[: len(sequence)]] = sequence
    states = decoder({"input_ids": row[None].to(device)}, layout.positions[None].long(), layout)
    return [states[where[: len(sequence)]] for sequence, where in zip(sequences, places, strict=True)]


def _cache_takers(layer: nn.Module, seen: Collection[nn.Module]) -> Iterator[nn.Module]:
    """The innermost modules that take a cache, but did not call arl's attention function."""

    def takes_cache(module: nn.Module) -> bool:
        return any("cache_" in name or "past_" in name for name in inspect.signature(module.forward).parameters)

    takers = [module for module in layer.modules() if module is not layer and takes_cache(module)]
    inner = (m for m in takers if not any(other in takers for other in m.modules() if other is not m))
    return (module for module in inner if module not in seen)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
