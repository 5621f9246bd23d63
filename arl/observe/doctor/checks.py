"""The checks. Each is a coroutine from a Visit to a Checked; examination.py has their order."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from arl.api.errors import PromptTooLongError, ServerError
from arl.api.types import SamplingParams
from arl.observe.doctor.causes import (
    BASE_SERVED,
    CONTEXT,
    KEPT_IDS,
    LABEL,
    LABEL_INSIDE,
    LOADED_IN_PART,
    LOGPROB_TEMPERATURE,
    NOT_LOADED,
    OTHER_ADAPTER,
    OTHER_WEIGHTS,
    PRECISION,
    ROUTING,
    SAMPLED_OTHERWISE,
    TEMPLATE,
    TOKENIZER,
    TRUNCATION,
    UNEXPLAINED,
    UNKNOWN_ADAPTER,
    Checked,
)
from arl.observe.doctor.trainer_probe import Floats, Sampled
from arl.observe.doctor.visit import CHATS, EXACT, ROUNDED, TEXTS, Visit, gap, long_prompt

_BEYOND = 16
"""Servers reserve some tokens of the context: SGLang refuses a prompt that leaves fewer than 6 tokens free."""
_LEAST_CONTEXT = 48
"""The shortest context with room for the prompts of every check and their answers."""
_MOST_SCORED = 1500
"""Tokens of a long prompt that are all scored: each costs the server a row of logits."""
_ROUNDINGS = 4.0
"""Two ways to round differ by less than this many times what was seen first."""
_MISSING, _SURE, _MOST_OF = 0.02, 6.0, 0.4
"""The smallest share of an update that counts as missing, in how many standard errors it must be seen, and how much of
the difference it must explain: rounding, too, makes tokens less likely that were just trained."""
_REPEATED = 2
"""Responses to each short prompt."""
_UNLIKELY = 40.0
"""Chi-squared of one degree of freedom: exceeded by chance once in 4 thousand million times."""
_AS_GOOD_AS = 0.03
"""Temperatures that differ by less than this share count as equal."""
_ONE_TOKEN = 8.0
"""A single token may differ by this many times the limit of the mean."""
_BY_CHANCE = 3e-3
"""A number drawn between two others is nearer to one of them than this share of their distance this rarely."""


# Texts


async def check_tokenizer(visit: Visit) -> Checked:
    """Compares the token ids of texts and of each special token."""
    name, texts = "tokenizer", [*TEXTS, "".join(visit.subject.special_tokens), *visit.subject.special_tokens]
    for text in filter(None, texts):
        told = await visit.server.tokens_of(text)
        if told is None:
            return visit.skipped(name, "the server has no tokenizer; arl sends token ids and does not need one")
        ours = visit.subject.encode(text)
        if told != ours:
            place = next((i for i, (a, b) in enumerate(zip(told, ours, strict=False)) if a != b), len(min(told, ours)))
            there, here = told[place : place + 1], ours[place : place + 1]
            detail = f"{text[:40]!r}: token {place} is {there} there and {here} here"
            return visit.fault(name, TOKENIZER, f"{len(told)} tokens there, {len(ours)} here", "equal", detail)
    return visit.ok(name, f"{len(texts)} texts give the same tokens", "equal")


async def check_template(visit: Visit) -> Checked:
    """Compares chats as the server renders them with those of the workflow."""
    name, subject = "chat template", visit.subject
    if subject.render is None:
        return visit.skipped(name, "the tokenizer has no chat template")
    for messages in CHATS:
        told = await visit.server.rendered(messages, subject.template_options)
        if told is None:
            return visit.skipped(name, "the server does not render messages; arl renders them itself")
        ours = subject.render(messages)
        if told != ours:
            measured = f"{len(told)} tokens there, {len(ours)} here"
            return visit.fault(name, TEMPLATE, measured, "equal", f"Messages: {list(messages)}")
    return visit.ok(name, f"{len(CHATS)} chats give the same tokens", "equal")


async def check_context(visit: Visit) -> Checked:
    """The server's context length, and whether it reads a prompt of this length whole and refuses a longer one."""
    name, subject, server = "context length", visit.subject, visit.server
    needed = subject.sampling.max_new_tokens + 1 if subject.sampling is not None else 1
    told, least = server.context_length, max(needed, subject.context_length or 0)
    measured = f"the server accepts {told} tokens, the model {subject.model_context}"
    threshold = f"at least {least}, which the run needs" if least > 1 else "what the server says"
    if told is not None and told < least:
        return visit.fault(name, CONTEXT, measured, threshold)
    if visit.room < _LEAST_CONTEXT:
        why = f"at least {_LEAST_CONTEXT}, for the prompts of the doctor's checks"
        return visit.fault(name, CONTEXT, measured, why)
    one, length = SamplingParams(max_new_tokens=1), visit.room - _BEYOND
    try:
        await visit.sample(long_prompt(subject.encode, length), one)
        await server.score(long_prompt(subject.encode, min(length, _MOST_SCORED)), visit.adapter)
    except (ServerError, PromptTooLongError) as error:
        return visit.fault(name, CONTEXT, measured, threshold, str(error))
    if told is not None:
        beyond = long_prompt(subject.encode, told + _BEYOND)
        try:
            await server.sample(beyond, one, adapter=visit.adapter)
        except (ServerError, PromptTooLongError):
            pass
        else:
            detail = f"The server answered a prompt of {len(beyond)} tokens instead of refusing it"
            return visit.fault(name, CONTEXT, measured, threshold, detail)
    return visit.ok(name, measured, threshold)


# Weights: logprobs of given tokens, so sampling plays no role


async def check_weights(visit: Visit, name: str) -> Checked:
    """Logprobs of short prompts, one at a time. name: of this check, such as `weights after load 1`.

    At first it is enough that rounding explains the difference. After a load the difference must be as small as before,
    and not lie in the direction of the previous version, as that of an update of which a part is missing does.
    """
    told, ours = await visit.score(), visit.scores[-1]
    apart = gap(told, ours)
    measured = (
        f"{apart:.2g} nats on average, {max(np.abs(a - b).max() for a, b in zip(told, ours, strict=True)):.2g} at most"
    )
    if len(visit.scores) == 1:
        threshold = f"{ROUNDED:g} nats: rounding explains no more"
        return visit.judged(apart <= ROUNDED, name, OTHER_WEIGHTS, measured, threshold)
    missing, error = missing_share(visit.scores[-2], ours, told)
    is_missing = missing > max(_MISSING, _SURE * error, _MOST_OF * apart / gap(visit.scores[-2], ours))
    if apart <= visit.limit and not is_missing:
        return visit.ok(name, measured, visit.why)
    near = max(visit.limit, 0.05 * apart)
    if visit.subject.adapters and gap(told, visit.scores[0]) <= near:
        return visit.fault(name, BASE_SERVED, measured, visit.why)
    if gap(told, visit.scores[-2]) <= near:
        return visit.fault(name, OTHER_ADAPTER if visit.subject.adapters else NOT_LOADED, measured, visit.why)
    if is_missing:
        detail = f"Judging by the logprobs, {min(missing, 1):.0%} of the update is missing"
        return visit.fault(name, LOADED_IN_PART, measured, visit.why, detail)
    if apart <= ROUNDED:
        return visit.fault(name, PRECISION, measured, visit.why, "The load rounds the weights")
    return visit.fault(name, UNEXPLAINED, measured, visit.why)


def missing_share(before: Sequence[Floats], now: Sequence[Floats], told: Sequence[Floats]) -> tuple[float, float]:
    """The share of the update from `before` to `now` that the server's logprobs lack, and its standard error.

    It is the slope of (told - now) over (before - now): 0 if only rounding is between them, 1 for the weights before.
    """
    old, new, seen = (np.concatenate(rows) for rows in (before, now, told))
    update, lack = old - new, seen - new
    share = float(update @ lack / (update @ update))
    left = lack - share * update
    return share, float(np.sqrt((left @ left) / (len(left) - 1) / (update @ update)))


async def check_precision(visit: Visit) -> Checked:
    """Compares the numbers of check_weights with the limit of the run's settings, and sets the limit of later checks.

    A fault widens it, so that later checks do not name it again.
    """
    apart = gap(await visit.score(), visit.scores[-1])
    measured, is_exact = f"{apart:.2g} nats", visit.subject.is_exact
    if is_exact and apart > EXACT:
        visit.limit = _ROUNDINGS * apart
        return visit.fault("precision", PRECISION, measured, f"{EXACT:g} nats, for float32 on both sides")
    visit.limit = EXACT if is_exact else ROUNDED
    return visit.ok("precision", measured, visit.why)


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
    return visit.judged(replayed <= visit.limit, name, ROUTING, measured, visit.why)


# Sampling


async def check_temperature(visit: Visit) -> Checked:
    """The logprobs that come with samples of the whole distribution, and whether the samples follow them.

    At the run's temperature, or at two if it is unknown.
    """
    name, told = "temperature", list[str]()
    known = visit.subject.sampling
    for asked in (1.0, 0.7) if known is None else (known.logprob_temperature,):
        sampling = SamplingParams(temperature=asked, ignore_eos=True, max_new_tokens=64)
        responses = await visit.sample_all([*visit.prompts] * _REPEATED, sampling)
        reported = np.concatenate([one.logprobs for one in responses])

        async def at(temperature: float, responses: Sequence[Sampled] = responses) -> Floats:
            return np.concatenate(await visit.trainer.of_sampled(responses, temperature=temperature))

        async def distance(temperature: float, reported: Floats = reported) -> float:
            return float(np.abs(await at(temperature) - reported).mean())

        async def surprise(temperature: float) -> float:
            return -float((await at(temperature)).sum())

        apart = await distance(asked)
        if apart > visit.limit:
            nearest, left = await _best(distance)
            measured = (
                f"at {asked:g} the logprobs differ by {apart:.2g} nats, and by {left:.2g} from those at {nearest:.3g}"
            )
            if left <= max(visit.limit, 0.05 * apart) and abs(nearest / asked - 1) > _AS_GOOD_AS:
                detail = f"They are those of temperature {nearest:.3g}, but the request asked for {asked:g}"
                return visit.fault(name, LOGPROB_TEMPERATURE, measured, visit.why, detail)
            above = reported - await at(asked)
            if (above > -visit.limit).all():  # as those within a part of the distribution, renormalised
                detail = f"The logprobs are those within {np.exp(-above).mean():.0%} of the distribution"
                return visit.fault(name, TRUNCATION, measured, visit.why, detail)
            return visit.fault(name, UNEXPLAINED, measured, visit.why)
        chi_squared = await _chi_squared(surprise, asked)
        if chi_squared > _UNLIKELY:
            drawn, _ = await _best(surprise)
            measured = f"samples are likeliest at {drawn:.3g}, by chi-squared {chi_squared:.0f}"
            detail = f"They look like temperature {drawn:.3g}, but the request asked for {asked:g}"
            return visit.fault(name, SAMPLED_OTHERWISE, measured, f"chi-squared {_UNLIKELY:g}", detail)
        told.append(f"at {asked:g}: {apart:.2g} nats, and chi-squared {chi_squared:.1f} of the samples")
    return visit.ok(name, "; ".join(told), f"{visit.why}; chi-squared {_UNLIKELY:g}")


async def _chi_squared(surprise: Callable[[float], Coroutine[Any, Any, float]], asked: float) -> float:
    """How much likelier the samples are at another temperature, as chi-squared(1): the score test, in 1 / T."""
    step = 0.05
    below, here, above = [await surprise(asked / (1 + k * step)) for k in (-1, 0, 1)]
    slope, curvature = (above - below) / (2 * step), (above - 2 * here + below) / step**2
    return slope**2 / curvature if curvature > 0 else 0.0


async def _best(loss_of: Callable[[float], Coroutine[Any, Any, float]]) -> tuple[float, float]:
    """The temperature with the least loss, and that loss. The loss must have one minimum."""
    factor = 10**0.25
    losses = {t: await loss_of(t) for t in (factor**k for k in range(-4, 5))}
    best = min(losses, key=losses.__getitem__)
    for _ in range(12):
        factor **= 0.5
        losses |= {t: await loss_of(t) for t in (best / factor, best * factor)}
        best = min(losses, key=losses.__getitem__)
    return best, losses[best]


async def check_truncation(visit: Visit) -> Checked:
    """The logprobs of samples under the run's own top_p, top_k and min_p, as the run would train them."""
    name, asked = "truncation", visit.subject.sampling
    if asked is None or not asked.is_filtered:
        return visit.skipped(name, "the run samples among all tokens")
    sampling = replace(asked, max_new_tokens=32, ignore_eos=True, stop=(), stop_token_ids=(), grammar=None)
    responses = await visit.sample_all([*visit.prompts] * _REPEATED, sampling)
    apart = gap([one.logprobs for one in responses], await visit.trainer.of_sampled(responses))
    return visit.judged(apart <= visit.limit, name, KEPT_IDS, f"{apart:.2g} nats", visit.why)


# Versions


async def check_labels(visit: Visit, name: str) -> Checked:
    """Tokens of the newest version (check_weights has found that they are) must be labelled with it."""
    if visit.adapter is not None:
        return visit.skipped(name, "labels are of the base model; the version is that of the request's adapter")
    response = await visit.sample(visit.prompts[0], SamplingParams(max_new_tokens=16, ignore_eos=True))
    told, expected = sorted(set(response.labels)), str(visit.version)
    measured = f"tokens of version {expected} are labelled {', '.join(told)}"
    return visit.judged(told == [expected], name, LABEL, measured, "equal")


async def check_labels_inside(visit: Visit, name: str, responses: Sequence[Sampled]) -> Checked:
    """In responses that an update interrupted, labels must change where the weights do."""
    newest = str(visit.version)
    spanning = [one for one in responses if newest in one.labels and one.labels[0] != newest]
    if not spanning:
        return visit.skipped(name, "no response was under way when the weights changed")
    of_old = await visit.trainer.of_sampled(spanning, of="reference_logprobs")
    of_new = await visit.trainer.of_sampled(spanning)
    late = early = 0
    for one, old, new in zip(spanning, of_old, of_new, strict=True):
        found = mislabelled(old, new, one.logprobs, one.labels.index(newest), _ONE_TOKEN * visit.limit)
        late, early = max(late, found[0]), max(early, found[1] - visit.server.num_late)
    measured = f"{len(spanning)} responses: {late} tokens labelled too old, {early} too new"
    threshold = f"none, except {visit.server.num_late} that arl's client labels with the previous version"
    return visit.judged(late == 0 and early == 0, name, LABEL_INSIDE, measured, threshold)


def mislabelled(of_old: Floats, of_new: Floats, logprobs: Floats, num_old: int, limit: float) -> tuple[int, int]:
    """(tokens labelled old that the old weights did not sample, tokens labelled new that they did).

    of_old, of_new: the logprobs of the response's tokens under either version. num_old: how many of its first tokens
    are labelled old. Behind an update in place nothing equals the new version, because old keys and values stay: a
    logprob lies anywhere near both, sometimes close to the old one. But what the old weights sampled equals it, so only
    a token that is nearer to it by _BY_CHANCE of the distance between both counts.
    """
    off = np.abs(logprobs - of_old)
    late = int((off[:num_old] > limit).sum())
    early = 0
    for told, apart in zip(off[num_old:], np.abs(of_old - of_new)[num_old:], strict=True):
        if told > limit:
            break
        early += bool(apart > 3 * limit and told <= _BY_CHANCE * apart)
    return late, early


async def check_adapter_names(visit: Visit) -> Checked:
    """A request for an adapter that was never loaded must be refused."""
    name = "adapter names"
    try:
        await visit.server.sample(visit.prompts[0], SamplingParams(max_new_tokens=1), adapter="arl-doctor-unknown")
    except ServerError as error:
        return visit.ok(name, f"refused: {str(error)[:80]}", "a refusal")
    return visit.fault(name, UNKNOWN_ADAPTER, "answered", "a refusal")
