"""The order of the checks: a check comes after those that it depends on, so the first fault is the cause.

    tokens -> train engine -> weights -> precision -> long prompts -> batches -> routing -> temperature -> truncation
    -> ends -> cache -> load 1: weights, label, cache -> load 2, during responses: weights, labels, cache -> adapters

If a check failed, those that depend on it are skipped: their numbers would show the same fault again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from arl.api.errors import ArlError, TransportError, first_error
from arl.api.types import SamplingParams
from arl.observe.doctor import model_checks, sampling_checks, text_checks, update_checks
from arl.observe.doctor.causes import LOAD_FAILED, UNANSWERED
from arl.observe.doctor.checked import Checked, Diagnosis
from arl.observe.doctor.evidence import Tolerance
from arl.observe.doctor.probes import short_prompts
from arl.observe.doctor.reference_model import ReferenceModel
from arl.observe.doctor.server_probe import Sampled, ServerProbe
from arl.observe.doctor.trainer_probe import TrainerProbe
from arl.observe.doctor.visit import Subject, Trained, Visit
from arl.runtime.threads import offload

Publish = Callable[[], Awaitable[str | None]]
"""Publishes the trainer's weights to all servers, as the run would; returns the adapter's name if it is an adapter."""
Check = Callable[[], Awaitable[Checked]]
OnCheck = Callable[[Checked], object]

_MOVE, _MOVE_ROUNDINGS = 0.3, 20.0
"""How far each version moves logprobs, in nats: far enough that one old layer of many shows, beyond any rounding."""
_DURING = SamplingParams(max_new_tokens=600, ignore_eos=True)
_LANES = 4
_TRIES = 4
"""How often the second load is done, at most, until the weights have changed during some response of each server."""
_POLL_S = 0.01
_START_S = 30.0
"""The longest wait until a server has begun to process a request."""


@dataclass(slots=True, kw_only=True, eq=False)
class Examination:
    """Runs the checks on every server. `run` may be awaited once."""

    servers: Sequence[ServerProbe]
    trainer: TrainerProbe
    subject: Subject
    publish: Publish | None
    """None: leave the servers' weights as they are."""
    why_not: str = ""
    """Why weights are not published."""
    scratch: Path
    """A directory for the weights of each version."""
    on_check: OnCheck = lambda _: None
    """Called with each result as it comes."""
    _checked: list[Checked] = field(default_factory=list[Checked], init=False)
    _broken: dict[str, set[str]] = field(default_factory=dict[str, set[str]], init=False)
    """For each server: checks that failed, and those that depend on them."""

    async def run(self) -> Diagnosis:
        """Raises an ArlError if a part cannot start. Faults of servers are in the Diagnosis."""
        visits = await self._arrive()
        for visit in visits:
            await self._as_started(visit)
        for number in (1, 2):
            await self._after_load(number, visits)
        for visit in visits:
            if self.subject.adapters:
                await self._try(visit, "adapter names", (), lambda v=visit: update_checks.check_adapter_names(v))
        return Diagnosis(checked=self._checked)

    async def _arrive(self) -> list[Visit]:
        first = self.scratch / "version-0"
        await self.trainer.write(first)
        reference = await offload(ReferenceModel, first)
        facts = [await server.facts() for server in self.servers]
        room = min((n for one in facts if (n := one.context_length)), default=4096)
        prompts = short_prompts(self.subject.encode, max(room // 2, 8))
        tolerance = Tolerance(
            rounding=await offload(reference.rounding, prompts),
            is_exact=self.subject.is_exact,
        )
        trained = Trained(version=self.trainer.engine.version, short=await self.trainer.score(prompts))
        return [
            Visit(
                server=server,
                facts=told,
                trainer=self.trainer,
                reference=reference,
                subject=self.subject,
                tolerance=tolerance,
                prompts=prompts,
                trained=trained,
                says_address=len(facts) > 1,
            )
            for server, told in zip(self.servers, facts, strict=True)
        ]

    async def _as_started(self, visit: Visit) -> None:
        """With the weights that the server has."""
        await self._try(visit, "tokenizer", (), lambda: text_checks.check_tokenizer(visit))
        await self._try(visit, "chat template", ("tokenizer",), lambda: text_checks.check_template(visit))
        await self._try(visit, "context length", (), lambda: text_checks.check_context(visit))
        await self._try(visit, "train engine", (), lambda: model_checks.check_train_engine(visit))
        await self._try(visit, "weights", ("train engine",), lambda: model_checks.check_weights(visit, "weights"))
        await self._try(visit, "precision", ("weights",), lambda: model_checks.check_precision(visit))
        rest = ("weights", "context length")
        await self._try(visit, "chunked prefill", rest, lambda: model_checks.check_long_prompt(visit))
        await self._try(visit, "batch invariance", ("weights",), lambda: model_checks.check_batch(visit))
        in_batch = ("weights", "batch invariance", "routing")
        await self._try(visit, "routing", in_batch[:2], lambda: model_checks.check_routing(visit))
        await self._try(visit, "temperature", in_batch, lambda: sampling_checks.check_temperature(visit))
        sampled = (*in_batch, "temperature")
        await self._try(visit, "truncation", sampled, lambda: sampling_checks.check_truncation(visit))
        await self._try(visit, "stop strings", (), lambda: text_checks.check_stop_strings(visit))
        await self._try(visit, "end of sequence", (), lambda: text_checks.check_end(visit))
        await self._try(visit, "prefix cache", ("weights",), lambda: update_checks.check_cache(visit))

    async def _after_load(self, number: int, visits: Sequence[Visit]) -> None:
        """Move the trainer's weights, publish them, and check the servers again."""
        names = {what: f"{what} after load {number}" for what in ("weights", "version label", "prefix cache")}
        before = "weights" if number == 1 else "weights after load 1"
        well = [visit for visit in visits if before not in self._broken.get(visit.server.address, ())]
        if self.publish is None or not well:
            for visit in visits:
                why = self.why_not if self.publish is None else f"{before} failed"
                for name in names.values():
                    self._note(visit, visit.skipped(name, why), is_broken=True)
            return
        labels: dict[str, int] = {}
        interrupted: dict[str, list[Sampled]] = {}
        for _ in range(_TRIES):
            labels = {visit.server.address: visit.trained.version for visit in visits}
            loaded = await self._load(number, well)
            if loaded is None:
                return
            adapter, interrupted = loaded
            version, short = self.trainer.engine.version, await self.trainer.score(visits[0].prompts)
            for visit in visits:
                visit.trained = Trained(version=version, adapter=adapter, short=short)
            if all(interrupted.values()):
                break
        for visit in visits:
            old_label = str(labels[visit.server.address]) if number > 1 else visit.facts.label
            await self._check_load(visit, names, before, interrupted.get(visit.server.address), old_label)

    async def _check_load(
        self, visit: Visit, names: dict[str, str], before: str, interrupted: Sequence[Sampled] | None, old_label: str
    ) -> None:
        held = names["weights"]
        await self._try(visit, held, (before,), lambda: model_checks.check_weights(visit, held))
        label = names["version label"]
        await self._try(visit, label, (held,), lambda: update_checks.check_labels(visit, label))
        if interrupted is not None:
            inside = "labels during the load"
            await self._try(
                visit, inside, (held, label),
                lambda: update_checks.check_labels_inside(visit, inside, interrupted, old_label),
            )  # fmt: skip
        cache = names["prefix cache"]
        await self._try(visit, cache, (held, "prefix cache"), lambda: update_checks.check_cache_after(visit, cache))

    async def _load(self, number: int, visits: Sequence[Visit]) -> tuple[str | None, dict[str, list[Sampled]]] | None:
        """Publish a version that clearly differs; returns its adapter, and the responses during the second load.

        Returns None if the load failed; the failure is noted.
        """
        tolerance = visits[0].tolerance
        least = _MOVE if tolerance.is_exact else max(_MOVE, _MOVE_ROUNDINGS * tolerance.rounding)
        during: dict[str, asyncio.Task[list[Sampled]]] = {}
        published = asyncio.Event()
        for visit in visits:
            await update_checks.fill_cache(visit)
        await self.trainer.move(visits[0].prompts, least)
        directory = self.scratch / f"version-{self.trainer.engine.version}"
        await self.trainer.write(directory)
        await offload(visits[0].reference.add, directory)
        await offload(visits[0].reference.take)
        assert self.publish is not None
        try:
            async with asyncio.TaskGroup() as tasks:
                if number > 1 and not self.subject.adapters:
                    for visit in visits:
                        during[visit.server.address] = tasks.create_task(_generate_until(published, visit))
                        await _until_running(visit.server)
                try:
                    adapter = await self.publish()
                finally:
                    published.set()
        except BaseExceptionGroup as errors:
            error = first_error(errors)
            if not isinstance(error, ArlError):
                raise error from error.__cause__
            for visit in visits:
                name = f"weights after load {number}"
                self._note(visit, visit.fault(name, LOAD_FAILED, "the load failed", "", str(error)), is_broken=True)
            return None
        return adapter, {address: call.result() for address, call in during.items()}

    async def _try(self, visit: Visit, name: str, needs: Sequence[str], check: Check) -> Checked:
        """Run a check, unless one that it depends on has failed."""
        broken = self._broken.setdefault(visit.server.address, set())
        if missing := [need for need in needs if need in broken]:
            return self._note(visit, visit.skipped(name, f"it depends on: {missing[0]}"), is_broken=True)
        try:
            found = await check()
        except (ArlError, BaseExceptionGroup) as errors:
            error = first_error(errors) if isinstance(errors, BaseExceptionGroup) else errors
            if not isinstance(error, ArlError):
                raise error from error.__cause__
            found = visit.fault(name, UNANSWERED, "the server gave no usable answer", "", str(error))
        return self._note(visit, found, is_broken=found.outcome == "fault")

    def _note(self, visit: Visit, found: Checked, *, is_broken: bool) -> Checked:
        if is_broken:
            self._broken.setdefault(visit.server.address, set()).add(found.check)
        self._checked.append(found)
        self.on_check(found)
        return found


async def _generate_until(published: asyncio.Event, visit: Visit) -> list[Sampled]:
    """The responses during which the labels changed.

    Responses follow each other on some lanes, each lane a part of a response later than the one before, so that one
    is well under way whenever the weights change, also where a short context ends responses soon.
    """

    async def lane(number: int) -> list[Sampled]:
        changed: list[Sampled] = []
        for seed in itertools.count():
            length = whole if seed else max(1, whole * (number + 1) // _LANES)
            one = await visit.sample(prompt, replace(_DURING, max_new_tokens=length), seed=seed)
            if len(set(one.labels)) > 1:
                changed.append(one)
            if published.is_set():
                break
        return changed

    prompt = visit.prompts[0]
    whole = min(_DURING.max_new_tokens, visit.room_after(prompt))
    async with asyncio.TaskGroup() as tasks:
        lanes = [tasks.create_task(lane(number)) for number in range(_LANES)]
    return [one for each in lanes for one in each.result()]


async def _until_running(server: ServerProbe) -> None:
    """Raises TransportError if the server does not begin to process a request."""
    try:
        async with asyncio.timeout(_START_S):
            while not await server.num_running():  # noqa: ASYNC110 - another process begins
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise TransportError(f"{server.address} has not begun to process a request after {_START_S:g} s") from None
