"""An embedded server with a path more, POST /plant {"name": ..}, that plants one of FAULTS in it, or none ("").

A fault patches the running server: each stands for one that has been seen in servers of this field.
"""

import copy
import os
import runpy
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from aiohttp import web
from embedded_server import ForkedServer
from torch import nn

from arl.api.types import SamplingParams
from arl.engine.local import app as server_app
from arl.engine.local.generate import Generation, Inflight
from arl.engine.local.model_thread import Scheduler
from arl.engine.local.sampler import BatchSampler, Filter, Samples
from arl.engine.local.sequences import Job


@dataclass(frozen=True)
class Ward:
    """The parts of a running server."""

    scheduler: Scheduler
    generation: Any

    @property
    def batch(self) -> Any:
        return self.scheduler.batch

    @property
    def runner(self) -> Any:
        return self.scheduler.runner


Fault = Callable[[Ward], AbstractContextManager[object]]
FAULTS: dict[str, Fault] = {}


def fault(plant: Callable[[Ward], Iterator[None]]) -> Fault:
    """Register a generator that plants a fault, yields, and takes it out again."""
    made = contextmanager(plant)
    FAULTS[plant.__name__] = made
    return made


def changed_tokenizer(ward: Ward, change: Callable[[Any], object]) -> AbstractContextManager[object]:
    tokenizer = copy.deepcopy(ward.generation._tokenizer)
    change(tokenizer)
    return patch.object(ward.generation, "_tokenizer", tokenizer)


@fault
def tokenizer_with_one_token_more(ward: Ward) -> Iterator[None]:
    with changed_tokenizer(ward, lambda tokenizer: tokenizer.add_tokens(["brown fox"])):
        yield


@fault
def template_with_a_default_system_prompt(ward: Ward) -> Iterator[None]:
    def change(tokenizer: Any) -> None:
        start = "{%- if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{%- endif %}"
        tokenizer.chat_template = start + tokenizer.chat_template

    with changed_tokenizer(ward, change):
        yield


@fault
def context_of_48_tokens(ward: Ward) -> Iterator[None]:
    with patch.object(ward.runner, "context_length", 48):
        yield


@fault
def prompts_cut_to_128_tokens(ward: Ward) -> Iterator[None]:
    job = ward.generation.job

    def cut(rid: str, ids: Any, *rest: Any) -> Job:
        return job(rid, ids[-128:], *rest)

    with patch.object(ward.generation, "job", cut):
        yield


@fault
def weights_of_another_model(ward: Ward) -> Iterator[None]:
    kept = {name: p.detach().clone() for name, p in ward.runner.model.named_parameters()}
    noise = torch.Generator().manual_seed(0)
    ward.runner.load({name: p + 0.05 * torch.randn(p.shape, generator=noise) for name, p in kept.items()})
    yield
    ward.runner.load(kept)


def loads_only(ward: Ward, change: Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]) -> Any:
    """A load takes `change(name, held, new)` in the place of what it is given."""
    load, held = ward.runner.load, ward.runner.model.state_dict()

    def changed(tensors: dict[str, torch.Tensor]) -> None:
        load({name: change(name, held[name].clone(), new) for name, new in tensors.items()})

    return patch.object(ward.runner, "load", changed)


@fault
def load_without_effect(ward: Ward) -> Iterator[None]:
    with loads_only(ward, lambda _, held, __: held):
        yield


@fault
def one_layer_not_updated(ward: Ward) -> Iterator[None]:
    with loads_only(ward, lambda name, held, new: held if ".layers.1." in name else new):
        yield


@fault
def packed_linear_layers(ward: Ward) -> Iterator[None]:
    """As vLLM on a CPU: new embeddings and norms, old linear layers."""
    with loads_only(ward, lambda name, held, new: held if ".layers." in name and new.dim() == 2 else new):
        yield


@fault
def tied_head_not_updated(ward: Ward) -> Iterator[None]:
    head = nn.Linear(1, 1, bias=False)
    head.weight = nn.Parameter(ward.runner._head.weight.detach().clone())
    with patch.object(ward.runner, "_head", head):
        yield


@fault
def load_rounds_to_bfloat16(ward: Ward) -> Iterator[None]:
    with loads_only(ward, lambda _, __, new: new.bfloat16().float()):
        yield


@fault
def load_fails(ward: Ward) -> Iterator[None]:
    def fail(_: object) -> None:
        raise RuntimeError("out of memory")

    with patch.object(ward.runner, "load", fail):
        yield


@fault
def label_of_the_version_before(ward: Ward) -> Iterator[None]:
    load = ward.batch.load
    told = [ward.batch.weight_version]

    def lagging(tensors: Any, weight_version: str) -> None:
        load(tensors, weight_version)
        told.append(weight_version)
        ward.batch.weight_version = told[-2]

    with patch.object(ward.batch, "load", lagging):
        yield


@fault
def labels_change_two_tokens_early(_: Ward) -> Iterator[None]:
    spans = Job.version_spans

    def early(job: Job) -> list[dict[str, Any]]:
        told = spans(job)
        for one, following in pairwise(told):
            one["end"] = following["start"] = max(one["end"] - 2, one["start"])
        return told

    with patch.object(Job, "version_spans", early):
        yield


def resampled(change: Callable[[BatchSampler, torch.Tensor, Any], Any]) -> AbstractContextManager[object]:
    """`change(sampler, logits, sample)` samples; `sample` is the sampler's own way."""
    own = BatchSampler.sample

    def sample(self: BatchSampler, logits: torch.Tensor, positions: Any, allowed: Any = None) -> Any:
        return change(self, logits.float(), lambda other: own(other, logits, positions, allowed))

    return patch.object(BatchSampler, "sample", sample)


def of_tokens(logits: torch.Tensor, samples: Samples) -> Samples:
    """The same tokens with the logprobs of other logits."""
    told = logits.log_softmax(-1).gather(1, torch.tensor(samples.tokens)[:, None])[:, 0].tolist()
    return replace(samples, logprobs=told, kept_logprobs=told)


@fault
def logprobs_of_temperature_1(_: Ward) -> Iterator[None]:
    with resampled(lambda own, logits, sample: of_tokens(logits, sample(own))):
        yield


@fault
def sampled_at_temperature_1(_: Ward) -> Iterator[None]:
    def change(own: BatchSampler, logits: torch.Tensor, sample: Any) -> Samples:
        scaled = logits if own.temperature is None else logits / own.temperature
        return of_tokens(scaled, sample(replace(own, temperature=None)))

    with resampled(change):
        yield


@fault
def kept_ids_with_logprobs_of_all_ids(_: Ward) -> Iterator[None]:
    def change(own: BatchSampler, _: torch.Tensor, sample: Any) -> Samples:
        samples = sample(own)
        return replace(samples, kept_logprobs=samples.logprobs)

    with resampled(change):
        yield


def filtered(ward: Ward, **limits: Any) -> Filter | None:
    return Filter.of([SamplingParams(**limits)], ward.runner.vocab_size, ward.runner.device)


@fault
def top_k_40_that_nobody_asked_for(ward: Ward) -> Iterator[None]:
    """Samples lack a tail; logprobs are of the whole distribution."""
    with resampled(lambda own, _, sample: sample(replace(own, filter=filtered(ward, top_k=40)))):
        yield


@fault
def top_p_with_renormalised_logprobs(ward: Ward) -> Iterator[None]:
    kept = filtered(ward, top_p=0.9)
    assert kept is not None

    def change(own: BatchSampler, logits: torch.Tensor, sample: Any) -> Samples:
        scaled = logits if own.temperature is None else logits / own.temperature
        left = scaled.masked_fill(kept.apply(scaled.softmax(-1)) == 0, -torch.inf)
        return of_tokens(left, sample(replace(own, filter=kept)))

    with resampled(change):
        yield


@fault
def routes_of_the_token_before(ward: Ward) -> Iterator[None]:
    meta_info = ward.generation._meta_info

    def shifted(job: Job, *rest: Any) -> Any:
        info = meta_info(job, *rest)
        if (told := info.get("routed_experts")) is not None:
            experts = np.frombuffer(b64decode(told), "<i4")
            each = len(experts) // (len(job.input_ids) + len(job.output_ids) - 1)
            info["routed_experts"] = b64encode(np.roll(experts, each).tobytes()).decode()
        return info

    with patch.object(ward.generation, "_meta_info", shifted):
        yield


def with_adapter(ward: Ward, choose: Callable[[str], str]) -> AbstractContextManager[object]:
    add = ward.batch.add

    def other(job: Job) -> None:
        job.adapter = choose(job.adapter)
        add(job)

    return patch.object(ward.batch, "add", other)


@fault
def base_model_instead_of_adapter(ward: Ward) -> Iterator[None]:
    with with_adapter(ward, lambda _: ""):
        yield


@fault
def first_adapter_for_every_name(ward: Ward) -> Iterator[None]:
    seen: list[str] = []

    def first(name: str) -> str:
        if name in ward.runner.adapters.loaded:
            seen.append(name)
        return seen[0] if name in seen else name

    with with_adapter(ward, first), patch.object(ward.runner.adapters, "remove", lambda _: None):
        yield
    ward.runner.adapters._loaded.clear()


@fault
def unknown_adapters_answered_by_the_base_model(ward: Ward) -> Iterator[None]:
    with with_adapter(ward, lambda name: name if name in ward.runner.adapters.loaded else ""):
        yield


def serve(stdout: str, arguments: list[str]) -> None:
    """What the process does."""
    os.dup2(os.open(stdout, os.O_WRONLY), 1)
    sys.argv = ["arl.engine.local", *arguments]
    generations: list[Generation] = []
    build, begin = server_app.build_app, Generation.__init__

    def remembered(self: Generation, inflight: Inflight) -> None:
        begin(self, inflight)
        generations.append(self)

    def built(inflight: Inflight, *rest: Any) -> web.Application:
        app = build(inflight, *rest)
        planted = ExitStack()

        async def plant(request: web.Request) -> web.Response:
            planted.close()
            if name := (await request.json())["name"]:
                planted.enter_context(FAULTS[name](Ward(inflight.scheduler, generations[0])))
            return web.json_response({})

        app.router.add_post("/plant", plant)
        return app

    server_app.build_app, Generation.__init__ = built, remembered
    runpy.run_module("arl.engine.local", run_name="__main__", alter_sys=True)


class FaultyServer(ForkedServer):
    """A process of it."""

    serves = "observe.doctor.faulty_server:serve"
