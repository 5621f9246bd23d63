"""Plants faults in the processes of a stock SGLang that finds this directory in PYTHONPATH.

The environment variable ARL_FAULT names a file. Its text is the name of the fault that is planted now; empty, SGLang's
own functions run. A fault replaces functions of SGLang, which it gets as `own`, each for as long as it is planted.
"""

import copy
import functools
import importlib
import os
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

Change = Callable[..., Any]
CHANGES: dict[str, dict[str, Change]] = {}
"""By "module:function": the changes, each by the name of its fault."""
HELD: dict[str, Any] = {}
"""What a fault remembers. Each fault is planted in a process once."""


def planted() -> str:
    return Path(os.environ["ARL_FAULT"]).read_text()


def fault(name: str, *places: str) -> Callable[[Change], Change]:
    def register(change: Change) -> Change:
        for place in places:
            CHANGES.setdefault(place, {})[name] = change
        return change

    return register


def replace(place: str) -> None:
    """Put a function in the place of SGLang's that asks at each call which fault is planted."""
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for one in classes:
        owner = getattr(owner, one)
    is_static = isinstance(vars(owner)[name], staticmethod)
    own, changes = getattr(owner, name), CHANGES[place]

    @functools.wraps(own)
    def called(*args: Any, **more: Any) -> Any:
        change = changes.get(planted())
        return own(*args, **more) if change is None else change(own, *args, **more)

    setattr(owner, name, staticmethod(called) if is_static else called)


class Watch(MetaPathFinder):
    """Replaces functions of a module once it is imported."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        places = [place for place in CHANGES if place.partition(":")[0] == fullname]
        if not places:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def executed(module: Any) -> None:
            execute(module)
            for place in places:
                replace(place)

        loader.exec_module = executed
        return spec


# Loads

LOAD = "sglang.srt.model_loader.loader:DefaultModelLoader.load_weights_and_postprocess"


def loads_only(keep: Callable[[str, Any], bool]) -> Change:
    def load(own: Change, model: Any, weights: Any, device: Any) -> None:
        own(model, ((name, tensor) for name, tensor in weights if keep(name, tensor)), device)

    return load


fault("load_without_effect", LOAD)(loads_only(lambda _, __: False))
fault("one_layer_not_updated", LOAD)(loads_only(lambda name, _: ".layers.1." not in name))
fault("packed_linear_layers", LOAD)(loads_only(lambda name, tensor: ".layers." not in name or tensor.dim() == 1))


@fault("load_rounds_to_bfloat16", LOAD)
def rounded(own: Change, model: Any, weights: Any, device: Any) -> None:
    own(model, ((name, tensor.bfloat16().float()) for name, tensor in weights), device)


@fault("load_fails", "sglang.srt.model_loader.loader:DefaultModelLoader._get_weights_iterator")
def failed(*_: Any, **__: Any) -> None:
    raise RuntimeError("out of memory")


@fault("tied_head_not_updated", "sglang.srt.layers.logits_processor:LogitsProcessor.forward")
def with_old_head(own: Change, self: Any, ids: Any, hidden: Any, head: Any, *rest: Any) -> Any:
    if "head" not in HELD:
        import torch

        held = copy.copy(head)
        held._parameters = {**head._parameters, "weight": torch.nn.Parameter(head.weight.detach().clone())}
        HELD["head"] = held
    return own(self, ids, hidden, HELD["head"], *rest)


# Versions


@fault("label_of_the_version_before", "sglang.srt.managers.scheduler:Scheduler.record_weight_version_change")
def lagging(own: Change, self: Any, new_version: str | None) -> None:
    own(self, HELD.get("label", "default"))
    HELD["label"] = new_version


@fault(
    "labels_change_two_tokens_early",
    "sglang.srt.managers.scheduler_components.output_streamer:compute_weight_version_spans",
)
def early(own: Change, events: Any, current_version: str, num_output_tokens: int) -> Any:
    early = [type(one)(one.old_version, max(one.num_output_tokens - 2, 0)) for one in events]
    return own(early, current_version, num_output_tokens)


# Sampling

SAMPLE = "sglang.srt.layers.sampler:Sampler._sample_from_probs"


@fault("sampled_at_temperature_1", SAMPLE)
def at_temperature_1(own: Change, self: Any, probs: Any, info: Any, *rest: Any) -> Any:
    drawn = probs**info.temperatures
    return own(self, drawn / drawn.sum(-1, keepdim=True), info, *rest)


@fault("top_k_40_that_nobody_asked_for", SAMPLE)
def of_40(own: Change, self: Any, probs: Any, info: Any, *rest: Any) -> Any:
    kept = probs.where(probs >= probs.topk(40).values[:, -1:], 0.0)
    return own(self, kept / kept.sum(-1, keepdim=True), info, *rest)


@fault("top_p_with_renormalised_logprobs", SAMPLE)
def in_top_p(own: Change, self: Any, probs: Any, info: Any, *rest: Any) -> Any:
    """The sampler takes the logprobs from `probs` afterwards."""
    ranked, order = probs.sort(-1, descending=True)
    ranked[ranked.cumsum(-1) - ranked > 0.9] = 0.0
    probs.scatter_(-1, order, ranked / ranked.sum(-1, keepdim=True))
    return own(self, probs, info, *rest)


# Adapters

ADAPTER = "sglang.srt.managers.tokenizer_manager:TokenizerManager._resolve_lora_path"


@fault("base_model_instead_of_adapter", ADAPTER)
async def base_model(_: Change, __: Any, request: Any) -> None:
    request.lora_path = request.lora_id = None


@fault("first_adapter_for_every_name", "sglang.srt.managers.scheduler:Scheduler.handle_generate_request")
def first_adapter(own: Change, self: Any, request: Any, **more: Any) -> Any:
    if request.lora_id is not None:
        request.lora_id = HELD.setdefault("adapter", request.lora_id)
    return own(self, request, **more)


@fault("unknown_adapters_answered_by_the_base_model", ADAPTER)
async def known_adapters(own: Change, self: Any, request: Any) -> None:
    if await self.lora_registry.get_unregistered_loras({request.lora_path}):
        request.lora_path = request.lora_id = None
    else:
        await own(self, request)


# Routes


@fault(
    "routes_of_the_token_before",
    "sglang.srt.managers.scheduler_components.batch_result_processor:"
    "SchedulerBatchResultProcessor._maybe_collect_routed_experts",
)
def of_the_token_before(own: Change, self: Any, request: Any) -> None:
    own(self, request)
    if request.routed_experts is not None:
        request.routed_experts = request.routed_experts.roll(1, 0)


if "ARL_FAULT" in os.environ:
    sys.meta_path.insert(0, Watch())
