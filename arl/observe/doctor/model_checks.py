"""Checks of the computation: the trainer itself, weights, precision, long prompts, batches.

They ask for logprobs of given tokens, so sampling plays no role.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from arl.api.types import SamplingParams
from arl.observe.doctor.causes import (
    BATCH_VARIANCE,
    CHUNKED_PREFILL,
    KEYS_AND_VALUES,
    OTHER_WEIGHTS,
    PRECISION,
    ROUTING,
    TRAIN_ENGINE,
    UNEXPLAINED,
)
from arl.observe.doctor.checked import Checked
from arl.observe.doctor.evidence import Tolerance, first_far, gap, worst
from arl.observe.doctor.mixtures import Suspicion, old_parts, suspicions
from arl.observe.doctor.probes import long_prompt
from arl.observe.doctor.server_probe import Floats
from arl.observe.doctor.visit import Visit
from arl.runtime.threads import offload

_DECODED = 12
_LONG = 1500
"""Tokens of a long prompt, unless the server's chunks are longer."""
_MOST_LONG = 16384
_MARGIN = 16
"""Servers reserve some tokens of the context: SGLang refuses a prompt that leaves fewer than 6 tokens free."""


async def check_train_engine(visit: Visit) -> Checked:
    """The train engine against plain transformers with the weights that it publishes."""
    reference = await offload(visit.reference.score, visit.prompts)
    apart = gap(reference, visit.trained.short)
    measured = f"train engine and plain transformers differ by {apart:.2g} nats on average"
    if apart <= visit.tolerance.limit:
        return visit.ok("train engine", measured, visit.tolerance.why)
    return visit.fault("train engine", TRAIN_ENGINE, measured, visit.tolerance.why)


async def scores_alone(visit: Visit) -> list[Floats]:
    return [await visit.server.score(ids, adapter=visit.trained.adapter) for ids in visit.prompts]


async def check_weights(visit: Visit, name: str) -> Checked:
    """Logprobs of short prompts, one at a time. name: of this check, such as `weights after load 1`.

    At first it is enough that rounding explains the difference. After a load, the difference must be as small as
    before.
    """
    told = await scores_alone(visit)
    is_first = visit.reference.before is visit.reference.newest
    apart, limit = gap(told, visit.trained.short), visit.tolerance.coarse if is_first else visit.tolerance.limit
    threshold = f"{limit:.2g} nats: rounding explains no more" if is_first else visit.tolerance.why
    measured = f"{apart:.2g} nats on average, {worst(told, visit.trained.short):.2g} at most"
    if apart <= limit:
        return visit.ok(name, measured, threshold)
    found = await offload(_explained, visit, told, apart)
    if found is None:
        if is_first and visit.facts.kv_dtype is not None:
            return visit.fault(name, KEYS_AND_VALUES, measured, threshold, _kept_in(visit))
        return visit.fault(name, OTHER_WEIGHTS if is_first else UNEXPLAINED, measured, threshold)
    suspicion, left = found
    measured = f"{measured}; only {left:.2g} from the weights that this cause would leave"
    return visit.fault(name, suspicion.cause, measured, threshold, suspicion.detail)


def _explained(visit: Visit, told: Sequence[Floats], apart: float) -> tuple[Suspicion, float] | None:
    """The suspicion that best explains the server's logprobs, and the difference that it leaves; None if none does."""
    reference, subject = visit.reference, visit.subject
    if reference.before is reference.newest:
        return None
    enough = max(visit.tolerance.limit, 0.05 * apart)
    known = suspicions(
        reference.parts,
        [visit.facts.num_ranks, *subject.shards, 2],
        is_tied=reference.is_tied,
        adapters=subject.adapters,
    )
    try:
        left = [(one, _left(visit, one, told)) for one in known]
        best = min(left, key=lambda pair: pair[1])
        if best[1] <= enough:
            return next(pair for pair in left if pair[1] <= max(2 * best[1], visit.tolerance.limit))
        return _several_parts(visit, told, best[1], enough)
    finally:
        reference.take()


def _several_parts(visit: Visit, told: Sequence[Floats], apart: float, enough: float) -> tuple[Suspicion, float] | None:
    """Repeatedly add the part that explains most, as long as the difference shrinks."""
    old: set[str] = set()
    while len(old) < len(visit.reference.parts):
        tried = [old_parts(old | {part}) for part in visit.reference.parts if part not in old]
        found, left = min(((one, _left(visit, one, told)) for one in tried), key=lambda pair: pair[1])
        if left <= enough:
            return found, left
        if old and left >= apart:
            return None
        old, apart = set(found.detail.removeprefix("Old: ").split(", ")), left
    return None


def _left(visit: Visit, suspicion: Suspicion, told: Sequence[Floats]) -> float:
    reference = visit.reference
    reference.take(suspicion.mix, reference.first if suspicion.is_of_first else None)
    return gap(told, reference.score(visit.prompts))


def _kept_in(visit: Visit) -> str:
    return f"It keeps them in {visit.facts.kv_dtype}"


async def check_precision(visit: Visit) -> Checked:
    """Compares the numbers of check_weights with the limit of the run's settings.

    A fault widens visit.tolerance, so that later checks do not name it again.
    """
    apart, tolerance = gap(await scores_alone(visit), visit.trained.short), visit.tolerance
    measured = f"{apart:.2g} nats; bfloat16 would change {tolerance.rounding:.2g}"
    if apart <= tolerance.limit:
        return visit.ok("precision", measured, tolerance.why)
    visit.tolerance = Tolerance(rounding=max(tolerance.rounding, apart), is_exact=False)
    if visit.facts.kv_dtype is not None:
        return visit.fault("precision", KEYS_AND_VALUES, measured, tolerance.why, _kept_in(visit))
    said = f"The server says that its dtype is {visit.facts.dtype}" if visit.facts.dtype else ""
    return visit.fault("precision", PRECISION, measured, tolerance.why, said)


async def check_long_prompt(visit: Visit) -> Checked:
    """The logprobs of a prompt of several chunks, by place."""
    name, chunk = "chunked prefill", visit.facts.chunk_size
    length = min(visit.room - _MARGIN, max(_LONG, 2 * (chunk or 0) + 100), _MOST_LONG)
    ids = long_prompt(visit.subject.encode, length)
    told = await visit.server.score(ids, adapter=visit.trained.adapter)
    [ours] = await visit.trainer.score([ids])
    place = first_far(told, ours, visit.tolerance.limit)
    several = f", in {-(-length // chunk)} chunks" if chunk else ""
    measured = f"{gap([told], [ours]):.2g} nats over {length} tokens{several}"
    threshold = f"{visit.tolerance.limit:.2g} nats on average in each half"
    if place is None:
        return visit.ok(name, measured, threshold)
    return visit.fault(
        name, CHUNKED_PREFILL, measured, threshold, f"Logprobs agree up to token {place + 1}, and differ from there on"
    )


async def check_batch(visit: Visit) -> Checked:
    """Each prompt alone, and all at once: given tokens, and greedy ones."""
    alone = await scores_alone(visit)
    async with asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(visit.server.score(ids, adapter=visit.trained.adapter)) for ids in visit.prompts]
    of_prompts = gap(alone, [call.result() for call in calls])
    greedy = SamplingParams(temperature=0.0, max_new_tokens=_DECODED, ignore_eos=True)
    lonely = [await visit.sample(ids, greedy) for ids in visit.prompts]
    together = await visit.sample_all(visit.prompts, greedy)
    differences: list[float] = []
    for one, other in zip(lonely, together, strict=True):
        same = int(np.cumprod([a == b for a, b in zip(one.output_ids, other.output_ids, strict=False)]).sum())
        differences += np.abs(one.logprobs - other.logprobs)[: same + 1].tolist()
    apart = max(of_prompts, float(np.mean(differences)))
    measured = f"{apart:.2g} nats between a request alone and in a batch of {len(visit.prompts)}"
    if apart <= visit.tolerance.limit:
        return visit.ok("batch invariance", measured, visit.tolerance.why)
    return visit.fault("batch invariance", BATCH_VARIANCE, measured, visit.tolerance.why)


async def check_routing(visit: Visit) -> Checked:
    """Samples, as the trainer computes them with the experts that the server reports, and with its own choice."""
    name = "routing"
    if visit.subject.routing is None:
        return visit.skipped(name, "the model is dense, or engine.replay_routing is false")
    responses = await visit.sample_all(visit.prompts, SamplingParams(max_new_tokens=32, ignore_eos=True))
    if any(one.routes is None for one in responses):
        return visit.fault(name, ROUTING, "responses came without routes", "the routes of every token")
    told = [one.logprobs for one in responses]
    replayed = gap(told, await visit.trainer.of_sampled(responses))
    own = gap(told, await visit.trainer.of_sampled(responses, with_routes=False))
    measured = f"{replayed:.2g} nats with the server's experts, {own:.2g} with the trainer's own choice"
    if replayed <= visit.tolerance.limit:
        return visit.ok(name, measured, visit.tolerance.why)
    return visit.fault(name, ROUTING, measured, visit.tolerance.why)
