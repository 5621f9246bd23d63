"""Checks around weight updates: labels, prefix caches, adapters."""

from __future__ import annotations

from collections.abc import Sequence

from arl.api.errors import ServerError
from arl.api.types import SamplingParams
from arl.observe.doctor.causes import LABEL, LABEL_INSIDE, PREFIX_CACHE, STALE_CACHE, UNKNOWN_ADAPTER
from arl.observe.doctor.checked import Checked
from arl.observe.doctor.evidence import gap, mislabelled
from arl.observe.doctor.probes import long_prompt
from arl.observe.doctor.reference_model import chosen
from arl.observe.doctor.server_probe import Floats, Sampled
from arl.observe.doctor.visit import Visit
from arl.runtime.threads import offload

_ANSWER = SamplingParams(max_new_tokens=16, ignore_eos=True)
_PREFIX, _BEHIND = 160, 40
"""Tokens of a prompt that is sent twice, and of what follows it: an answer, the second turn and its answer."""
_ONE_TOKEN = 8.0
"""A single token may differ by this many times the limit of the mean."""


def cached_prompt(visit: Visit) -> list[int]:
    return long_prompt(visit.subject.encode, min(_PREFIX, visit.room - _BEHIND))


async def fill_cache(visit: Visit) -> None:
    """Leave a prefix in the cache, as an earlier turn would."""
    await visit.sample(cached_prompt(visit), _ANSWER, key=_key(visit))


def _key(visit: Visit) -> str:
    """Another key for each version, as arl's client does."""
    return f"arl-doctor-{id(visit.trainer):x}-{visit.trained.version}"


async def check_cache(visit: Visit) -> Checked:
    """A second turn, whose prompt begins with all of the first."""
    first = await visit.sample(cached_prompt(visit), _ANSWER, key=_key(visit))
    more = [*first.token_ids, *visit.prompts[0][:8]]
    second = await visit.sample(more, _ANSWER, seed=1, key=_key(visit))
    apart = gap([second.logprobs], await visit.trainer.of_sampled([second]))
    measured = f"{apart:.2g} nats after {second.cached_tokens} cached tokens"
    if apart <= visit.tolerance.limit:
        return visit.ok("prefix cache", measured, visit.tolerance.why)
    return visit.fault("prefix cache", PREFIX_CACHE, measured, visit.tolerance.why)


async def check_cache_after(visit: Visit, name: str) -> Checked:
    """Sends the prompt that was in the cache before the load again."""
    again = await visit.sample(cached_prompt(visit), _ANSWER, seed=2, key=_key(visit))
    apart = gap([again.logprobs], await visit.trainer.of_sampled([again]))
    measured = f"{apart:.2g} nats on a prompt cached before the load, {again.cached_tokens} of its tokens cached"
    if apart <= visit.tolerance.limit:
        return visit.ok(name, measured, visit.tolerance.why)
    return visit.fault(name, STALE_CACHE, measured, visit.tolerance.why)


async def check_labels(visit: Visit, name: str) -> Checked:
    """Tokens of the newest version (check_weights has found that they are) must be labelled with it."""
    if visit.trained.adapter is not None:
        return visit.skipped(name, "labels are of the base model; the version is that of the request's adapter")
    response = await visit.sample(visit.prompts[0], _ANSWER)
    told, expected = sorted(set(response.labels)), str(visit.trained.version)
    measured = f"tokens of version {expected} are labelled {', '.join(told)}"
    if told == [expected]:
        return visit.ok(name, measured, "equal")
    return visit.fault(name, LABEL, measured, "equal")


async def check_labels_inside(visit: Visit, name: str, responses: Sequence[Sampled], old_label: str) -> Checked:
    """In responses that an update interrupted, labels must change where the weights do."""
    spanning = [one for one in responses if {old_label, str(visit.trained.version)} <= set(one.labels)]
    if not spanning:
        return visit.skipped(name, "no response was under way when the weights changed")
    limit = _ONE_TOKEN * visit.tolerance.limit
    late = early = 0
    for one in spanning:
        of_old, of_new = await offload(_under_both, visit, one)
        num_old = one.labels.index(str(visit.trained.version))
        found = mislabelled(of_old, of_new, one.logprobs, num_old, limit)
        late, early = max(late, found[0]), max(early, found[1] - visit.facts.num_late)
    measured = f"{len(spanning)} responses: {max(late, 0)} tokens labelled too old, {max(early, 0)} too new"
    threshold = f"none, except {visit.facts.num_late} that arl's client labels with the previous version"
    if late <= 0 and early <= 0:
        return visit.ok(name, measured, threshold)
    return visit.fault(name, LABEL_INSIDE, measured, threshold)


def _under_both(visit: Visit, one: Sampled) -> tuple[Floats, Floats]:
    """The logprobs of its tokens under the previous version and under the newest."""
    reference, first = visit.reference, len(one.prompt_ids)
    try:
        reference.take(lambda _, old, __: old)
        of_old = chosen(reference.logits(one.token_ids, first), one.output_ids, one.temperature)
    finally:
        reference.take()
    return of_old, chosen(reference.logits(one.token_ids, first), one.output_ids, one.temperature)


async def check_adapter_names(visit: Visit) -> Checked:
    """A request for an adapter that was never loaded must be refused."""
    name = "adapter names"
    try:
        await visit.server.sample(visit.prompts[0], SamplingParams(max_new_tokens=1), adapter="arl-doctor-unknown")
    except ServerError as error:
        return visit.ok(name, f"refused: {str(error)[:80]}", "a refusal")
    return visit.fault(name, UNKNOWN_ADAPTER, "answered", "a refusal")
