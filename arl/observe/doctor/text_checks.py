"""Checks around the model: tokens, the chat template, the context, the end of a response."""

from __future__ import annotations

from arl.api.errors import ServerError
from arl.api.grammar import Grammar
from arl.api.types import SamplingParams
from arl.observe.doctor.causes import CONTEXT, END_OF_SEQUENCE, STOP_STRINGS, TEMPLATE, TOKENIZER
from arl.observe.doctor.checked import Checked
from arl.observe.doctor.probes import CHATS, LEAST_CONTEXT, TEXTS, long_prompt
from arl.observe.doctor.server_probe import Sampled
from arl.observe.doctor.visit import Visit

_BEYOND = 16
_STOP_AFTER, _STOP_LENGTH = 12, 4
"""The stop string is the text of these tokens of a greedy response."""


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
            detail = (
                f"{text[:40]!r}: token {place} is {told[place : place + 1]} there and {ours[place : place + 1]} here"
            )
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
            return visit.fault(
                name, TEMPLATE, f"{len(told)} tokens there, {len(ours)} here", "equal", f"Messages: {list(messages)}"
            )
    return visit.ok(name, f"{len(CHATS)} chats give the same tokens", "equal")


async def check_context(visit: Visit) -> Checked:
    """The server's context length, and whether it reads a prompt of this length whole and refuses a longer one."""
    name, subject, told = "context length", visit.subject, visit.facts.context_length
    needed = subject.sampling.max_new_tokens + 1 if subject.sampling is not None else 1
    least = max(needed, subject.context_length or 0)
    measured = f"the server accepts {told} tokens, the model {subject.model_context}"
    threshold = f"at least {least}, which the run needs" if least > 1 else "what the server says"
    if told is not None and told < least:
        return visit.fault(name, CONTEXT, measured, threshold)
    if visit.room < LEAST_CONTEXT:
        return visit.fault(name, CONTEXT, measured, f"at least {LEAST_CONTEXT}, for the prompts of the doctor's checks")
    length = visit.room - _BEYOND
    whole = await visit.sample(long_prompt(subject.encode, length), SamplingParams(max_new_tokens=1))
    if whole.prompt_tokens != length:
        detail = f"The server read {whole.prompt_tokens} tokens of a prompt of {length}"
        return visit.fault(name, CONTEXT, measured, threshold, detail)
    if told is not None:
        beyond = long_prompt(subject.encode, told + _BEYOND)
        try:
            await visit.server.sample(beyond, SamplingParams(max_new_tokens=1), adapter=visit.trained.adapter)
        except ServerError:
            pass
        else:
            detail = f"The server answered a prompt of {len(beyond)} tokens instead of refusing it"
            return visit.fault(name, CONTEXT, measured, threshold, detail)
    return visit.ok(name, measured, threshold)


async def check_stop_strings(visit: Visit) -> Checked:
    """Repeats a greedy response with a piece of it as the stop string."""
    name = "stop strings"
    greedy = SamplingParams(temperature=0.0, max_new_tokens=_STOP_AFTER + _STOP_LENGTH + 8, ignore_eos=True)
    for prompt in visit.prompts:
        free = await visit.sample(prompt, greedy)
        cut = _stop_string(visit, free)
        if cut is None:
            continue
        stop, length = cut
        stopped = await visit.sample(
            prompt, SamplingParams(temperature=0.0, max_new_tokens=64, ignore_eos=True, stop=(stop,))
        )
        text = visit.subject.decode(stopped.output_ids)
        measured = f"{len(stopped.output_ids)} tokens with stop={stop!r}, ended by {stopped.finish.get('type')}"
        threshold = f"{length} tokens, up to the end of the string"
        if (
            stop not in text
            or stop in visit.subject.decode(stopped.output_ids[:-1])
            or len(stopped.output_ids) != length
        ):
            said = "The tokens do not contain it" if stop not in text else "The response continues after it"
            return visit.fault(name, STOP_STRINGS, measured, threshold, said)
        return visit.ok(name, measured, threshold)
    return visit.skipped(name, "greedy responses contain no text that could serve as a stop string")


def _stop_string(visit: Visit, free: Sampled) -> tuple[str, int] | None:
    """A text that occurs once in the response, and the number of tokens up to its end."""
    decode, ids = visit.subject.decode, free.output_ids
    for first in range(4, len(ids) - _STOP_LENGTH):
        stop = decode(ids[first : first + _STOP_LENGTH])
        if len(stop.strip()) < 2 or "\N{REPLACEMENT CHARACTER}" in stop:
            continue
        length = next((n for n in range(1, len(ids) + 1) if stop in decode(ids[:n])), None)
        if length == first + _STOP_LENGTH:
            return stop, first + _STOP_LENGTH
    return None


async def check_end(visit: Visit) -> Checked:
    """The tokens at which responses end: forced by a grammar, and seen in samples."""
    name, known = "end of sequence", visit.subject.end_token_ids
    threshold = f"the tokens {sorted(known)}, and no others"
    free = await visit.sample_all([*visit.prompts] * 2, SamplingParams(max_new_tokens=64, temperature=1.0))
    seen: set[int] = set()
    for one in free:
        inside = known.intersection(one.output_ids[:-1])
        if inside:
            detail = f"The server continues after token {min(inside)}"
            return visit.fault(name, END_OF_SEQUENCE, "an end token inside a response", threshold, detail)
        if one.finish.get("type") == "stop":
            seen.add(one.output_ids[-1])
    if (forced := await _forced_end(visit)) is not None:
        seen.add(forced)
    if wrong := seen - known:
        detail = f"The server ends responses at token {min(wrong)}"
        return visit.fault(name, END_OF_SEQUENCE, "a response ended at another token", threshold, detail)
    if not seen:
        return visit.skipped(name, "no response ended by itself, and the server accepts no grammar to force an end")
    return visit.ok(name, f"responses ended at {sorted(seen)}", threshold)


async def _forced_end(visit: Visit) -> int | None:
    """The token that follows when the grammar allows no other; None if the server cannot decode under a grammar."""
    sampling = SamplingParams(max_new_tokens=4, grammar=Grammar(kind="regex", text="a"))
    try:
        forced = await visit.sample(visit.prompts[0], sampling)
    except ServerError:
        return None
    is_forced = forced.finish.get("type") == "stop" and len(forced.output_ids) > 1
    return forced.output_ids[-1] if is_forced else None
