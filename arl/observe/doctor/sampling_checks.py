"""Checks of sampling: the logprobs that come with samples, and whether samples follow this distribution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from arl.api.types import SamplingParams
from arl.observe.doctor.causes import KEPT_IDS, LOGPROB_TEMPERATURE, SAMPLED_TEMPERATURE, TRUNCATION, UNEXPLAINED
from arl.observe.doctor.checked import Checked
from arl.observe.doctor.evidence import (
    SURE,
    gap,
    kept_mass,
    missing_tail,
    reported_temperature,
    sampled_temperature,
)
from arl.observe.doctor.reference_model import Logits, chosen
from arl.observe.doctor.server_probe import Sampled
from arl.observe.doctor.visit import Visit
from arl.runtime.threads import offload

_REPEATED = 2
"""Responses to each short prompt."""
_UNLIKELY = 40.0
"""Chi-squared of one degree of freedom: exceeded by chance once in 4 thousand million times."""
_AS_GOOD_AS = 0.03
"""Temperatures that differ by less than this share count as equal."""


async def samples(visit: Visit, sampling: SamplingParams) -> list[Sampled]:
    return await visit.sample_all([*visit.prompts] * _REPEATED, sampling)


def logits_of(visit: Visit, responses: Sequence[Sampled]) -> Logits:
    """[N, V] The logits of all sampled tokens, end to end."""
    return np.concatenate([visit.reference.logits(one.token_ids, len(one.prompt_ids)) for one in responses])


def _tokens(responses: Sequence[Sampled]) -> list[int]:
    return [token for one in responses for token in one.output_ids]


async def check_temperature(visit: Visit) -> Checked:
    """At each of the run's temperatures: the reported logprobs, and how surprising the samples are."""
    name, told = "temperature", list[str]()
    for sampling in visit.subject.samplings:
        responses = await samples(visit, sampling)
        found = await _judged_temperature(visit, name, responses)
        if found.outcome == "fault":
            return found
        told.append(f"at {sampling.temperature:g}: {found.measured}")
    return visit.ok(name, "; ".join(told), visit.tolerance.why)


async def _judged_temperature(visit: Visit, name: str, responses: Sequence[Sampled]) -> Checked:
    asked, tokens = responses[0].temperature, _tokens(responses)
    told = [one.logprobs for one in responses]
    apart = gap(told, await visit.trainer.of_sampled(responses))
    logits = await offload(logits_of, visit, responses)
    limit = visit.tolerance.limit
    if apart > limit:
        reported, left = await offload(reported_temperature, logits, tokens, np.concatenate(told))
        measured = (
            f"at {asked:g} the logprobs differ by {apart:.2g} nats, and by {left:.2g} from those at {reported:.3g}"
        )
        if left <= visit.tolerance.coarse and abs(reported / asked - 1) > _AS_GOOD_AS:
            detail = f"They are those of temperature {reported:.3g}, but the request asked for {asked:g}"
            return visit.fault(name, LOGPROB_TEMPERATURE, measured, visit.tolerance.why, detail)
        if (share := kept_mass(np.concatenate(told), chosen(logits, tokens, asked))) is not None:
            detail = f"The logprobs are those within {share:.0%} of the distribution"
            return visit.fault(name, TRUNCATION, measured, visit.tolerance.why, detail)
        return visit.fault(name, UNEXPLAINED, measured, visit.tolerance.why)
    drawn, surprise = await offload(sampled_temperature, logits, tokens, asked)
    missing = await offload(missing_tail, logits, tokens, asked)
    if surprise > _UNLIKELY and abs(drawn / asked - 1) > _AS_GOOD_AS and missing.chance > SURE:
        measured = f"samples are likeliest at {drawn:.3g}, by chi-squared {surprise:.0f}"
        detail = f"They look like temperature {drawn:.3g}, but the request asked for {asked:g}"
        return visit.fault(name, SAMPLED_TEMPERATURE, measured, f"chi-squared {_UNLIKELY:g}", detail)
    return visit.ok(name, f"{apart:.2g} nats; samples are likeliest at {drawn:.3g}")


async def check_truncation(visit: Visit) -> Checked:
    """Whether samples of the whole distribution reach all of it; and the logprobs under the run's own truncation."""
    name = "truncation"
    sampling = visit.subject.samplings[0]
    responses = await samples(visit, sampling)
    logits, tokens = await offload(logits_of, visit, responses), _tokens(responses)
    missing = await offload(missing_tail, logits, tokens, sampling.temperature)
    measured = (
        f"{len(tokens)} tokens stay within {missing.kind} {missing.value:.3g} with probability {missing.chance:.2g}"
    )
    threshold = f"{SURE:g}"
    if missing.chance < SURE:
        detail = f"The samples look like {missing.kind}={missing.value:.3g}"
        return visit.fault(name, TRUNCATION, measured, threshold, detail)
    asked = visit.subject.sampling
    if asked is None or not asked.is_filtered:
        return visit.ok(name, measured, threshold)
    return await _declared(visit, asked, measured)


async def _declared(visit: Visit, asked: SamplingParams, before: str) -> Checked:
    """Samples with the run's own top_p, top_k and min_p, and computes logprobs as the run would train them."""
    values = {name: getattr(asked, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    responses = await samples(visit, SamplingParams(**values, max_new_tokens=32, ignore_eos=True))
    apart = gap([one.logprobs for one in responses], await visit.trainer.of_sampled(responses))
    measured = f"{before}; {apart:.2g} nats under the run's own truncation"
    if apart <= visit.tolerance.limit:
        return visit.ok("truncation", measured, visit.tolerance.why)
    return visit.fault("truncation", KEPT_IDS, measured, visit.tolerance.why)
