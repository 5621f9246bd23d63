"""The linear layers of a model that low-rank adapters may change: trainer and embedded server have the same rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from arl.engine.routers import num_experts_of


def linear_layers(model: nn.Module, heads: Sequence[nn.Module | None]) -> dict[str, nn.Linear]:
    """By name, the layers that compute W x + b with a W that no other layer has. heads: these are left out."""
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    uses = Counter(id(module.weight) for module in linears.values())
    return {
        name: module
        for name, module in linears.items()
        if module not in heads and uses[id(module.weight)] == 1 and _is_plain(module)
    }


@torch.no_grad()
def _is_plain(module: nn.Linear) -> bool:
    """Routers, layers of groups and others that compute something else may be subclasses."""
    if type(module).forward is nn.Linear.forward:
        return True
    x = torch.linspace(-1, 1, 2 * module.in_features, device=module.weight.device).view(2, -1).to(module.weight)
    expected = F.linear(x, module.weight, module.bias)
    roundings = 16 * torch.finfo(x.dtype).eps * expected.abs().max().item()
    try:
        return torch.allclose(module(x), expected, rtol=0, atol=roundings)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False


def router_layers(model: Any) -> set[str]:
    """The names of layers that choose among fused experts: with an output for each expert, and none beside them takes
    these."""
    found, modules = set[str](), dict(model.named_modules())
    num_experts = num_experts_of(model.config.get_text_config())
    for path, experts in modules.items():
        sizes = {parameter.shape[0] for parameter in experts.parameters(recurse=False) if parameter.ndim == 3}
        block = path.rpartition(".")[0]
        for name, module in modules[block].named_modules(prefix=block) if num_experts in sizes else ():
            if isinstance(module, nn.Linear) and module.out_features in sizes:
                beside = modules[name.rpartition(".")[0]].children()
                if not any(isinstance(other, nn.Linear) and other.in_features in sizes for other in beside):
                    found.add(name)
    return found
