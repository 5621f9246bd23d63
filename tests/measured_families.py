"""How far arl is from transformers on a tiny model of a family: trained, adapted by LoRA, served and published.

Each function takes a directory of `write_family` and raises what arl raises for a model that it refuses. Right is the
model's own forward pass with eager attention, one sequence at a time, without a cache.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from decoder_families import reference_cached_logits, reference_logits, write_family
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from arl.api.errors import ArlError, ModelError
from arl.api.settings.engines import LoRAConfig
from arl.api.train_engine import TrainSequence
from arl.api.types import SamplingParams
from arl.engine.fsdp.lora import Adapters
from arl.engine.fsdp.minibatch import Microbatch, build_microbatch
from arl.engine.fsdp.model import ModelWriter, load_model
from arl.engine.local.runner import ModelRunner
from arl.engine.local.scheduler import IterationTimes, RunningBatch
from arl.engine.local.sequences import Job
from arl.engine.local.weight_receiver import read_directory
from arl.engine.model_files import whole_class

_CPU = torch.device("cpu")
_LENGTHS, _SHARED = (30, 26, 19), 15
_DIFFERENT = torch.randperm(256, generator=torch.Generator().manual_seed(0))
"""No token stands twice: a model that attends to the best of equal ones chooses by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """nats: the largest difference of a token's log-probability."""

    nats: float
    way: str = ""
    gradient: float | None = None
    """|ours - theirs| / |theirs| over all parameters together."""
    note: str = ""
    load_s: float = 0.0
    trial_s: float = 0.0
    """What the first load of a model takes longer than the next, in seconds of one core."""


def training(directory: Path) -> Measured:
    """A packed row of three sequences that share a prefix, and the gradient of its logprobs, weighted at random."""
    began = time.process_time()
    load_model(directory)
    tried = time.process_time()
    loaded = load_model(directory)
    load_s = time.process_time() - tried
    policy, batch, twin = loaded.token_model(), _row(), _twin(directory)
    logprobs = policy(batch).logprobs
    weights = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(1))
    (logprobs * weights).sum().backward()
    theirs = torch.cat([_logprobs(twin(input_ids=s[None], use_cache=False).logits[0], s) for s in _sequences()])
    (theirs * weights).sum().backward()
    g, g_ref = _gradient(loaded.model), _gradient(twin)
    return Measured(
        nats=_difference(logprobs, theirs),
        way=loaded.decoder.way.split()[0],
        gradient=((g - g_ref).norm() / g_ref.norm()).item(),
        load_s=load_s,
        trial_s=tried - began - load_s,
    )


def adapting(directory: Path) -> Measured:
    """A step of adapters of all linear layers: the logprobs after it are those of the published merged model."""
    loaded = load_model(directory)
    writer = ModelWriter(loaded)
    adapters = Adapters(writer, directory, LoRAConfig(rank=4, alpha=8), "float32", seed=0)
    policy, batch = loaded.token_model(), _row()
    before = policy(batch).logprobs
    before.sum().backward()
    still = 0
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            slope = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            still += not slope.norm() > 0
            parameter.data -= 0.3 * slope / slope.norm().clamp(min=1e-9)
    with torch.no_grad():
        after = policy(batch).logprobs
    if (after - before).abs().max() < 1e-2:
        raise AssertionError("adapters have no effect")
    merged = adapters.merged()
    writer.write(directory / "merged", {spec.name: merged[spec.name] for spec in writer.own_specs})
    theirs = _reference(_twin(directory / "merged"), _sequences())
    return Measured(nats=_difference(after, torch.cat(theirs)), note=f"{still} untrained" if still else "")


def serving(directory: Path) -> Measured:
    """Two requests at once, whose prompts are computed in parts, and a next turn of one of them."""
    batch, twin = _batch(directory), _twin(directory)
    one, other, more = _DIFFERENT[:64].split((21, 34, 9))
    first, second = jobs = [_job(prompt.tolist()) for prompt in (one, other)]
    _run(batch, jobs)
    turn = [*first.input_ids, *first.output_ids]
    following = _job([*turn, *more.tolist()], start=len(turn))
    _run(batch, [following])
    error = 0.0
    for job in (first, second, following):
        (right,) = _reference(twin, [torch.tensor([*job.input_ids, *job.output_ids])])
        error = max(error, _difference(_answer(job), right[job.logprob_start :]))
    cached, (whole,) = reference_cached_logits(twin, turn, len(first.input_ids)), reference_logits(twin, [turn])
    own = _difference(cached.log_softmax(-1), whole.log_softmax(-1))
    note = f"transformers' own cache {short(own)}" if not own < 1e-4 else ""
    return Measured(nats=error, way=batch._runner.way, note=note)


def publishing(directory: Path) -> Measured:
    """The written model, and a server of other weights that loads it."""
    loaded = load_model(directory)
    writer, published = ModelWriter(loaded), directory / "published"
    state = loaded.model.state_dict()
    writer.write(published, {spec.name: state[spec.name] for spec in writer.own_specs})
    right, written = (torch.cat(_reference(_twin(place), _sequences())) for place in (directory, published))
    error = _difference(written, right)
    try:
        servers = _batch(write_family(loaded.model.config.model_type, directory / "other", seed=1)), _batch(published)
    except ModelError:
        return Measured(nats=error, note="no server")
    form = servers[0]._runner.stored_form
    servers[0].load(form.parameters(read_directory(str(published), form.shapes, form.tied)), "1")
    updated, fresh = (_job(_DIFFERENT[:34].tolist()) for _ in range(2))
    for server, job in zip(servers, (updated, fresh), strict=True):
        _run(server, [job])
    return Measured(nats=max(error, _difference(_answer(updated), _answer(fresh))))


MEASURES = {"train": training, "LoRA": adapting, "serve": serving, "publish": publishing}


def measure(name: str, family: str, directory: str, result: str) -> None:
    """Write what a measure says, or {"refused": sentence} or {"failed": ...}, as JSON into the file `result`."""
    torch.set_num_threads(1)
    place = Path(directory)
    try:
        if not place.exists():
            write_family(family, place)
        found = asdict(MEASURES[name](place))
    except ArlError as error:
        found = {"refused": str(error)}
    except Exception as error:  # noqa: BLE001 - of arl's code or of transformers': a row of the table tells
        found = {"failed": f"{type(error).__name__}: {error}"}
    aside = Path(f"{result}.new")
    aside.write_text(json.dumps(found))
    os.replace(aside, result)


def short(error: float) -> str:
    """2e-6"""
    return f"{error:.0e}".replace("e-0", "e-").replace("e+00", "")


def _sequences() -> list[torch.Tensor]:
    own = [length - _SHARED for length in _LENGTHS]
    prefix, *rests = _DIFFERENT[: _SHARED + sum(own)].split([_SHARED, *own])
    return [torch.cat([prefix, rest]) for rest in rests]


def _row() -> Microbatch:
    return build_microbatch(
        [TrainSequence(token_ids=s, loss_mask=torch.arange(len(s)) > 0) for s in _sequences()], _CPU
    )


def _twin(directory: Path) -> PreTrainedModel:
    """The model as transformers runs it by itself."""
    auto = whole_class(AutoConfig.from_pretrained(directory))
    return auto.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


def _reference(twin: PreTrainedModel, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    logits = reference_logits(twin, [s.tolist() for s in sequences])
    return [_logprobs(x, s) for x, s in zip(logits, sequences, strict=True)]


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return (ours - theirs).abs().max().nan_to_num(torch.inf).item()


def _gradient(model: nn.Module) -> torch.Tensor:
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([g.flatten().double() for g in gradients])


def _batch(directory: Path) -> RunningBatch:
    """Prompts are computed 20 tokens at a time."""
    runner = ModelRunner(str(directory), device="cpu", dtype="float32", max_rows=4, context_length=128)
    return RunningBatch(runner, max_rows=4, prefill_tokens=20, weight_version="0", times=IterationTimes(is_alone=True))


def _job(prompt: list[int], start: int = 0) -> Job:
    """10 tokens, and the logprobs of the prompt's tokens after `start`."""
    settings = SamplingParams(max_new_tokens=10, ignore_eos=True, seed=len(prompt))
    return Job(f"{len(prompt)}", prompt, settings, logprob_start=start)


def _run(batch: RunningBatch, jobs: Sequence[Job]) -> None:
    for job in jobs:
        batch.add(job)
    while not batch.is_idle:
        batch.step()


def _answer(job: Job) -> torch.Tensor:
    """Its logprobs, of given and of sampled tokens."""
    return torch.tensor([*job.input_logprobs, *job.output_logprobs])
