"""The routers of mixtures of experts: their choices can be recorded, and replaced by a sampler's choices.

    hidden states --> logits [N, experts] --choice--> experts [N, k] --weights of these--> a token's sum over experts
                                             ^    |
                                    replayed +    +--> recorded

Only this module touches the routers of transformers' models: it puts hooks on them, and changes no modelling code. The
weights of replayed experts come from the current logits, by the model's own rule, so gradients reach the router.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import nn

from arl.api.errors import ModelError
from arl.api.routed_experts import Routes, Routing

_Weights = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
"""(router, logits [N, experts], chosen experts int64[N, k]) -> their weights [N, k]."""

_SIZES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Fields in which a config has the number of experts. Dense models have none of these fields, or one expert."""


def _shares(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """The chosen experts' shares of the softmax over all experts, float32."""
    return logits.softmax(-1, dtype=torch.float32).gather(-1, chosen)


def _of_qwen(router: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    shares = _shares(logits, chosen)
    if router.norm_topk_prob:
        shares = shares / shares.sum(-1, keepdim=True)
    return shares.to(logits.dtype)


def _of_mixtral(router: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    shares = _shares(logits, chosen)
    return shares / shares.sum(-1, keepdim=True)


def _of_deepseek_v2(router: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Group limits and a bias affect only the choice, here and below."""
    return _shares(logits, chosen) * router.routed_scaling_factor


def _of_deepseek_v3(router: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    scores = logits.sigmoid().gather(-1, chosen)
    if router.norm_topk_prob:
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    return scores * router.routed_scaling_factor


_FAMILIES: dict[str, tuple[str, _Weights]] = {
    "qwen3_moe": ("Qwen3MoeTopKRouter", _of_qwen),
    "qwen3_next": ("Qwen3NextTopKRouter", _of_qwen),
    "mixtral": ("MixtralTopKRouter", _of_mixtral),
    "deepseek_v2": ("DeepseekV2TopkRouter", _of_deepseek_v2),
    "deepseek_v3": ("DeepseekV3TopkRouter", _of_deepseek_v3),
}
"""Model type (config.json) -> the class of its routers, and their rule."""


def num_experts_of(text: Any) -> int:
    """How many experts a layer has by the config of a model's decoder; 0 or 1 for a dense model."""
    return next((size for key in _SIZES if isinstance(size := getattr(text, key, None), int)), 0)


def routing_of(config: Any, name: str) -> Routing | None:
    """A model's routing; None for a dense model. config: the model's. Raises ModelError for an unknown mixture."""
    text = config.get_text_config()
    num_experts = num_experts_of(text)
    if num_experts <= 1:
        return None
    if text.model_type not in _FAMILIES:
        raise ModelError(
            f"{name} is a mixture of experts of type {text.model_type}, whose routers arl does not know (it knows "
            f"{', '.join(_FAMILIES)}); set engine.replay_routing=false to train it with the experts that the trainer "
            "chooses itself"
        )
    return Routing(
        num_layers=text.num_hidden_layers, experts_per_token=text.num_experts_per_tok, num_experts=num_experts
    )


class ReplayedRoutes:
    """The routes of a packed row, on the model's device.

    It is not a dataclass, because FSDP would search a dataclass for tensors at each layer.
    """

    def __init__(self, routes: Routes, device: torch.device) -> None:
        """routes: of the row's tokens."""
        experts = np.zeros((len(routes), *routes.experts.shape[1:]), np.int64)
        experts[routes.is_known] = routes.experts
        self.experts = torch.from_numpy(experts).to(device)
        """int64[T, layers, k]"""
        is_known = None if routes.is_known.all() else torch.from_numpy(routes.is_known.copy())
        self.is_known = None if is_known is None else is_known.to(device)
        """bool[T]; None if all are known."""

    def at(self, places: torch.Tensor) -> ReplayedRoutes:
        """The routes of the tokens at `places`, in their order."""
        moved = copy.copy(self)
        moved.experts = self.experts[places.flatten()]
        moved.is_known = None if self.is_known is None else self.is_known[places.flatten()]
        return moved

    def of_layer(self, layer: int, own: torch.Tensor) -> torch.Tensor:
        """int64[T, k]. own: the router's own choice, for tokens whose routes are unknown."""
        experts = self.experts[:, layer]
        return experts if self.is_known is None else torch.where(self.is_known[:, None], experts, own)


class Routers:
    """The routers of a model, by layer. Some layers may have none."""

    def __init__(self, model: Any, routing: Routing) -> None:
        """Puts a hook on each router. Raises ModelError if the routers do not weigh experts as their family does."""
        self.routing = routing
        kind, self._weights = _FAMILIES[model.config.get_text_config().model_type]
        self._routers = {
            index: module
            for index, layer in enumerate(model.get_decoder().layers)
            for module in layer.modules()
            if type(module).__name__ == kind
        }
        self._recorded: list[tuple[int, torch.Tensor]] | None = None
        self._replayed: dict[nn.Module, tuple[ReplayedRoutes, int]] = {}
        self._check(model, kind)
        for index, router in self._routers.items():
            router.register_forward_hook(self._hook(index))

    def _hook(self, index: int) -> Callable[[nn.Module, Any, Any], Any]:
        def hook(router: nn.Module, _: Any, output: Any) -> Any:
            logits, weights, chosen = output
            if self._recorded is not None:
                self._recorded.append((index, chosen))
            if (replayed := self._replayed.get(router)) is not None:
                routes, layer = replayed
                chosen = routes.of_layer(layer, chosen)
                weights = self._weights(router, logits, chosen)
            return logits, weights, chosen

        return hook

    @torch.no_grad()
    def _check(self, model: Any, kind: str) -> None:
        name = type(model).__name__
        if not self._routers:
            raise ModelError(f"{name} has no {kind} in any layer; set engine.replay_routing=false")
        for router in self._routers.values():
            states = torch.linspace(-1, 1, 4 * router.hidden_dim, device=router.weight.device)
            logits, weights, chosen = router(states.view(4, -1).to(router.weight.dtype))
            if not torch.allclose(self._weights(router, logits, chosen).float(), weights.float(), rtol=1e-3, atol=1e-6):
                raise ModelError(
                    f"the routers of {name} weigh experts in another way than arl expects of a {kind} in this version "
                    "of transformers; set engine.replay_routing=false"
                )

    def replay_in(self, layers: Sequence[nn.Module]) -> None:
        """Let layers take ReplayedRoutes as the keyword argument `replayed_routes`. Call it before layers are wrapped.

        Then a checkpointed layer gets the same routes when the backward pass computes it again.
        """
        for index, router in self._routers.items():
            layers[index].forward = self._replaying(layers[index].forward, router, index)

    def _replaying(self, forward: Callable[..., Any], router: nn.Module, index: int) -> Callable[..., Any]:
        @wraps(forward)
        def run(*args: Any, replayed_routes: ReplayedRoutes | None = None, **kwargs: Any) -> Any:
            if replayed_routes is None:
                return forward(*args, **kwargs)
            self._replayed[router] = replayed_routes, index
            try:
                return forward(*args, **kwargs)
            finally:
                del self._replayed[router]

        return run

    @contextmanager
    def recording(self) -> Iterator[list[tuple[int, torch.Tensor]]]:
        """Collects (layer, int64[N, k]: the experts that it chose) during a forward pass."""
        self._recorded = recorded = []
        try:
            yield recorded
        finally:
            self._recorded = None

    def room_for(self, num_tokens: int) -> np.ndarray:
        """An uninitialised array [num_tokens, layers, k] in the smallest dtype."""
        routing = self.routing
        return np.empty((num_tokens, routing.num_layers, routing.experts_per_token), routing.dtype)

    def experts_of(self, recorded: list[tuple[int, torch.Tensor]]) -> np.ndarray:
        """[N, layers, k]: the experts of one pass, in the smallest dtype."""
        experts = self.room_for(len(recorded[0][1]))
        experts[:, [layer for layer in range(experts.shape[1]) if layer not in self._routers]] = 0
        for layer, chosen in recorded:
            experts[:, layer] = chosen.cpu().numpy()
        return experts


def find_routers(model: Any, name: str) -> Routers | None:
    """The routers of a model, with hooks; None for a dense model. Raises ModelError for an unknown mixture."""
    routing = routing_of(model.config, name)
    return None if routing is None else Routers(model, routing)
