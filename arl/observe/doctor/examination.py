"""The order of the checks: a check comes after those that it depends on, so the first fault is the cause.

    tokens -> context -> weights -> precision -> routing -> temperature -> truncation
    -> load 1: weights, label -> load 2, during responses: weights, labels -> adapters

If a check failed, those that depend on it are skipped: their numbers would show the same fault again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from arl.api.errors import ArlError, first_error
from arl.api.types import SamplingParams
from arl.observe.doctor import checks
from arl.observe.doctor.causes import LOAD_FAILED, UNANSWERED, Checked, Diagnosis
from arl.observe.doctor.trainer_probe import Sampled, TrainerProbe
from arl.observe.doctor.visit import ProbedServer, Subject, Visit, short_prompts

Publish = Callable[[], Awaitable[str | None]]
"""Publishes the trainer's weights to all servers, as the run would; returns the adapter's name if it is an adapter."""

_MOVE = 0.3
"""How far each version moves logprobs, in nats: far enough that one old layer of many shows, beyond any rounding."""
_DURING = SamplingParams(max_new_tokens=600, ignore_eos=True)
_LANES = 4
_TRIES = 4
"""How often the second load is done, at most, until the weights have changed during some response of each server."""


@dataclass(slots=True, kw_only=True, eq=False)
class Examination:
    """Runs the checks on every server. `run` may be awaited once."""

    servers: Sequence[ProbedServer]
    trainer: TrainerProbe
    subject: Subject
    publish: Publish | None
    """None: leave the servers' weights as they are."""
    why_not: str = ""
    """Why weights are not published."""
    on_check: Callable[[Checked], object] = lambda _: None
    """Called with each result as it comes."""
    _checked: list[Checked] = field(default_factory=list[Checked], init=False)
    _broken: dict[str, set[str]] = field(default_factory=dict[str, set[str]], init=False)
    """For each server: checks that failed, and those that depend on them."""

    async def run(self) -> Diagnosis:
        """Raises an ArlError if a part cannot start. Faults of servers are in the Diagnosis."""
        room = min((n for one in self.servers if (n := one.context_length)), default=4096)
        prompts = short_prompts(self.subject.encode, max(room // 2, 8))
        scores = await self.trainer.score(prompts)
        visits = [
            Visit(
                server=server,
                trainer=self.trainer,
                subject=self.subject,
                prompts=prompts,
                scores=[scores],
                version=self.trainer.engine.version,
                says_address=len(self.servers) > 1,
            )
            for server in self.servers
        ]
        self._broken = {visit.server.address: set() for visit in visits}
        for visit in visits:
            await self._as_started(visit)
        for number in (1, 2):
            await self._after_load(number, visits)
        for visit in visits:
            if self.subject.adapters:
                await self._try(visit, "adapter names", (), checks.check_adapter_names(visit))
        return Diagnosis(checked=self._checked)

    async def _as_started(self, visit: Visit) -> None:
        """With the weights that the server has."""
        await self._try(visit, "tokenizer", (), checks.check_tokenizer(visit))
        await self._try(visit, "chat template", ("tokenizer",), checks.check_template(visit))
        await self._try(visit, "context length", (), checks.check_context(visit))
        await self._try(visit, "weights", (), checks.check_weights(visit, "weights"))
        await self._try(visit, "precision", ("weights",), checks.check_precision(visit))
        await self._try(visit, "routing", ("weights",), checks.check_routing(visit))
        await self._try(visit, "temperature", ("weights", "routing"), checks.check_temperature(visit))
        await self._try(visit, "truncation", ("weights", "routing", "temperature"), checks.check_truncation(visit))

    async def _after_load(self, number: int, visits: Sequence[Visit]) -> None:
        """Move the trainer's weights, publish them, and check the servers again."""
        held, label, inside = (
            f"weights after load {number}",
            f"version label after load {number}",
            "labels during the load",
        )
        before = "weights" if number == 1 else "weights after load 1"
        well = [visit for visit in visits if before not in self._broken[visit.server.address]]
        if self.publish is None or not well:
            for visit in visits:
                why = self.why_not if self.publish is None else f"it depends on: {before}"
                for name in (held, label):
                    self._note(visit, visit.skipped(name, why), is_broken=True)
            return
        interrupted: dict[str, list[Sampled]] = {}
        for _ in range(_TRIES):
            await self.trainer.move(well[0].prompts, max(_MOVE, *(3 * visit.limit for visit in well)))
            try:
                adapter, interrupted = await self._publish(well if number > 1 and not self.subject.adapters else ())
            except (ArlError, BaseExceptionGroup) as errors:
                error = _arl_error(errors)
                for visit in well:
                    fault = visit.fault(held, LOAD_FAILED, "the load failed", "", str(error))
                    self._note(visit, fault, is_broken=True)
                return
            scores = await self.trainer.score(well[0].prompts)
            for visit in visits:
                visit.version, visit.adapter = self.trainer.engine.version, adapter
                visit.scores.append(scores)
            if all(interrupted.values()):
                break
        for visit in visits:
            await self._try(visit, held, (before,), checks.check_weights(visit, held))
            await self._try(visit, label, (held,), checks.check_labels(visit, label))
            if (responses := interrupted.get(visit.server.address)) is not None:
                await self._try(visit, inside, (held, label), checks.check_labels_inside(visit, inside, responses))

    async def _publish(self, busy: Sequence[Visit]) -> tuple[str | None, dict[str, list[Sampled]]]:
        """Publish the trainer's weights while the servers of `busy` generate.

        Returns the adapter's name, and of each busy server the responses during which its labels changed.
        """
        assert self.publish is not None
        published = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            begun = {visit.server.address: asyncio.Event() for visit in busy}
            lanes = {
                visit.server.address: [
                    tasks.create_task(_generate(visit, number, begun[visit.server.address], published))
                    for number in range(_LANES)
                ]
                for visit in busy
            }
            for event in begun.values():
                await event.wait()
            try:
                adapter = await self.publish()
            finally:
                published.set()
        return adapter, {address: [one for lane in own for one in lane.result()] for address, own in lanes.items()}

    async def _try(self, visit: Visit, name: str, needs: Sequence[str], check: Coroutine[Any, Any, Checked]) -> None:
        """Run a check, unless one that it depends on has failed."""
        if missing := [need for need in needs if need in self._broken[visit.server.address]]:
            check.close()
            return self._note(visit, visit.skipped(name, f"it depends on: {missing[0]}"), is_broken=True)
        try:
            found = await check
        except (ArlError, BaseExceptionGroup) as errors:
            found = visit.fault(name, UNANSWERED, "the server gave no usable answer", "", str(_arl_error(errors)))
        self._note(visit, found, is_broken=found.outcome == "fault")

    def _note(self, visit: Visit, found: Checked, *, is_broken: bool) -> None:
        if is_broken:
            self._broken[visit.server.address].add(found.check)
        self._checked.append(found)
        self.on_check(found)


def _arl_error(errors: ArlError | BaseExceptionGroup) -> ArlError:
    """The first of them; any other error is raised."""
    error = first_error(errors) if isinstance(errors, BaseExceptionGroup) else errors
    if not isinstance(error, ArlError):
        raise error from error.__cause__
    return error


async def _generate(visit: Visit, number: int, begun: asyncio.Event, published: asyncio.Event) -> list[Sampled]:
    """The responses of a lane during which the labels changed.

    The first response of each lane is a part longer than that of the lane before, so that one response is well under
    way whenever the weights change, also where a short context ends responses soon.
    """
    prompt = visit.prompts[0]
    whole = min(_DURING.max_new_tokens, visit.room_after(prompt))
    changed: list[Sampled] = []
    for seed in itertools.count():
        length = whole if seed else max(1, whole * (number + 1) // _LANES)
        one = await visit.sample(prompt, replace(_DURING, max_new_tokens=length), seed)
        begun.set()
        if len(set(one.labels)) > 1:
            changed.append(one)
        if published.is_set():
            break
    return changed
