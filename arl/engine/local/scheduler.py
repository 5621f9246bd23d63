"""The running batch: each step plans its tokens, runs the model on them, and takes the samples.

    waiting --admit--> rows: [ decoding ... | prefilling ... ] --finish--> delivered, and retained as a prefix

Row i of the cache belongs to rows[i]. The decoding sequences come first and without gaps, so that their part of the
cache is a view; the last row moves into the place of one that ends.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from arl.api.sampling_mask import SetTable
from arl.api.settings.engines import RELEASED
from arl.engine.local.runner import MemoryPart, ModelRunner
from arl.engine.local.sampler import Allowed, BatchSampler, Constraint, Samples, StopStrings, random_stream
from arl.engine.local.sequences import Job, Prefix, PrefixIndex, Retained, Row, StepPlan
from arl.runtime.http.bodies import RequestError


class IterationTimes:
    """Sums since the server began. Use it on the model thread.

    is_alone: the model computes on the CPU with one thread, whose CPU seconds are counted, as other processes do not
    change these much. Otherwise seconds are those of the clock.
    """

    def __init__(self, *, is_alone: bool) -> None:
        self.clock: Callable[[], float] = time.thread_time if is_alone else time.perf_counter
        self._is_alone = is_alone
        self._sums: dict[tuple[int, bool], list[float]] = {}
        """(bit length of the number of decoded requests, whether prompts were read) -> the number of iterations, and
        the sums of what `add` gets."""

    def add(self, decoded: int, context: int, prompt: int, begun: int, seconds: float) -> None:
        """Count an iteration. context: tokens that the decoded requests held. begun: requests that got their first
        token."""
        sums = self._sums.setdefault((decoded.bit_length(), prompt > 0 or begun > 0), [0.0] * 6)
        for i, value in enumerate((1, decoded, context, prompt, begun, seconds)):
            sums[i] += value

    def report(self) -> dict[str, Any]:
        """The sums, in the form that arl.api.events.ServerWorked reads."""
        rows = [[reads, *self._sums[bits, reads]] for bits, reads in sorted(self._sums)]
        return {"is_cpu_time": self._is_alone, "iterations": rows}


class RunningBatch:
    """Continuous batching on one thread: jobs go in, and each step returns those that finished.

    prefill_tokens: most prompt tokens in a step, so that a long prompt does not delay the other requests for long.
    prefix_cache_bytes: memory for the keys and values of finished sequences.
    times: where steps note how long they took.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        max_rows: int,
        prefill_tokens: int,
        weight_version: str,
        times: IterationTimes,
        prefix_cache_bytes: int = 1 << 30,
    ) -> None:
        self._runner = runner
        self._times = times
        self._max_rows = max_rows
        self._prefill_tokens = prefill_tokens
        self._stop_strings = StopStrings(runner.tokenizer)
        self._can_rewind = runner.cache.can_rewind
        self._prefixes = PrefixIndex(prefix_cache_bytes, can_rewind=self._can_rewind)
        self._waiting: deque[Row] = deque()
        self._rows: list[Row] = []
        self._num_decoding = 0
        self._sampler: BatchSampler | None = None
        self._sampled: Sequence[Row] = ()
        self.weight_version = weight_version

    @property
    def num_running(self) -> int:
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        return not self._rows and not self._waiting

    def add(self, job: Job) -> None:
        """Queue a job that fits the context. It finishes at once if its adapter is unknown, or if the tokens that it
        continues break its grammar."""
        adapter = self._runner.adapters.find(job.adapter)
        if job.adapter and adapter is None:
            loaded = ", ".join(self._runner.adapters.loaded) or "none"
            job.abort(f"LoRA adapter {job.adapter} is not loaded. Loaded adapters: {loaded}", 400)
            return
        sampling = job.sampling
        constraint = None
        if job.compiled is not None and not job.is_prefill_only:
            constraint = Constraint(job.compiled.result(), has_end=bool(self._runner.eos_ids))
            count = job.num_continued
            for number, token in enumerate(job.input_ids[len(job.input_ids) - count :]):
                if constraint.has_ended or not constraint.accept(token):
                    job.abort(f"token {number} of the {count} that the response begins with breaks its grammar", 400)
                    return
        if job.returns_kept_ids and not job.is_prefill_only:
            job.sets = SetTable(self._runner.vocab_size)
        tokens = [*job.input_ids, *job.output_ids]
        if (view := None if job.view is None else job.view.result()) is not None:
            tokens = view.marked(tokens)
        extra_key = f"{adapter.key}/{job.extra_key}" if adapter else job.extra_key
        stop_ids = self._runner.eos_ids.union(sampling.stop_token_ids)
        self._waiting.append(
            Row(
                tokens,
                extra_key=extra_key,
                keys=self._prefixes.keys(tokens, extra_key),
                job=job,
                adapter=adapter,
                max_length=len(job.input_ids) + sampling.max_new_tokens,
                stream=random_stream(sampling.seed),
                stop=tuple(string for string in sampling.stop if string),
                stop_ids=frozenset() if sampling.ignore_eos else stop_ids,
                constraint=constraint,
                view=view,
            )
        )

    # ---- a step: plan, run, take ------------------------------------------------------------------------------

    def step(self) -> list[Job]:
        """Compute one step; returns the jobs that finished. If it raises, `fail` makes the batch sound again.

        Raises FloatingPointError if the model's results are not finite.
        """
        began = self._times.clock()
        plan = self._plan()
        logits, given = self._run(plan)
        self._advance(plan, given)
        rows = plan.sampled
        ended = self._score(rows, logits) if self._runner.is_scorer else self._sample(rows, logits)
        for row in ended:
            self._retain(row)
        for row in reversed(ended):
            self._remove(row)
        n, chunks = plan.num_decoding, plan.input.chunks
        self._times.add(
            decoded=n,
            context=sum(plan.input.positions[:n]) + n,
            prompt=sum(chunk.length for chunk in chunks),
            begun=plan.num_sampled - n + len(plan.followers),
            seconds=self._times.clock() - began,
        )
        return [row.job for row in ended]

    def _plan(self) -> StepPlan:
        alike = self._admit()
        while self._num_decoding < len(self._rows) and self._rows[self._num_decoding].num_pending == 1:
            self._num_decoding += 1
        plan = StepPlan.of(self._rows, self._num_decoding, self._prefill_tokens, can_rewind=self._can_rewind)
        return self._follow(plan, alike) if alike and plan.num_sampled == len(self._rows) else plan

    def _run(self, plan: StepPlan) -> tuple[torch.Tensor, list[float]]:
        """Logits [sampled rows, vocabulary], and the logprobs of given tokens, chunk after chunk."""
        step = plan.input if self._runner.tower is None else plan.seen_by(self._runner.tower)
        adapted = [(row.adapter, length) for row, length in zip(plan.rows, plan.lengths, strict=True)]
        self._runner.adapters.use(adapted, self._runner.device)
        self._runner.cache.reserve(len(self._rows), max(step.positions) + 1)
        logits, given = self._runner.forward(step)
        if plan.leaders:
            logits = logits[torch.tensor([*range(plan.num_sampled), *plan.leaders], device=logits.device)]
        _check(given)
        return logits, given

    def _advance(self, plan: StepPlan, given: Sequence[float]) -> None:
        """Note what the step computed: keys and values, routes, logprobs of given tokens."""
        start = 0
        for row, length in zip(plan.rows, plan.lengths, strict=True):
            if row.experts is not None and self._runner.experts is not None:
                of_row = self._runner.experts[start : start + length]
                row.experts[row.num_computed : row.num_computed + length] = of_row
            start += length
            row.num_computed += length
        self._num_decoding = len(plan.sampled)
        first = len(plan.rows)
        for leader, count in Counter(plan.leaders).items():
            row = plan.rows[leader]
            self._runner.cache.spread(row.index, first, first + count, row.num_computed)
            first += count
        for row, leader in zip(plan.followers, plan.leaders, strict=True):
            row.num_computed = len(row.tokens)
            _copy_routes(plan.rows[leader], row, row.num_computed)
        of_chunks = iter(given)
        for row, count in zip(plan.prefilling, plan.given_counts, strict=True):
            row.job.input_logprobs += islice(of_chunks, count)

    def _sample(self, rows: Sequence[Row], logits: torch.Tensor) -> list[Row]:
        """Give each row its next token; returns the rows that end with it."""
        if not rows:
            return []
        if self._sampler is None or self._sampled != rows:  # else the sampler of the step before serves
            params = [row.job.sampling for row in rows]
            streams = [row.stream for row in rows]
            notes = [row.job.returns_kept_ids for row in rows]
            self._sampler = BatchSampler.of(params, streams, self._runner.vocab_size, self._runner.device, notes)
            self._sampled = rows
        constraints = [row.constraint for row in rows]
        allowed = None
        if any(constraints):
            allowed = Allowed.of(constraints, self._runner.vocab_size, self._runner.device)
        samples = self._sampler.sample(logits, [len(row.tokens) for row in rows], allowed)
        _check(samples.logprobs)
        for number, ids in samples.kept.items():
            if (sets := rows[number].job.sets) is not None:
                sets.add_free() if len(ids) == self._runner.vocab_size else sets.add(ids.tobytes(), ids)
        dead = set[int]() if allowed is None else _accept(rows, allowed, samples)
        return self._extend(rows, samples, dead)

    def _extend(self, rows: Sequence[Row], samples: Samples, dead: Collection[int]) -> list[Row]:
        """Append the samples; returns the rows that end with them. dead: rows whose grammar allows nothing."""
        version = self.weight_version
        ended: list[Row] = []
        told = zip(rows, samples.tokens, samples.logprobs, samples.kept_logprobs, strict=True)
        for number, (row, token, logprob, kept_logprob) in enumerate(told):
            job, tokens = row.job, row.tokens
            if job.is_prefill_only:
                job.finish_reason = {"type": "length", "length": 0}
                ended.append(row)
                continue
            if number in dead:
                job.abort(f"its grammar allows no token of this model after {len(job.output_ids)} sampled ones", 400)
                ended.append(row)
                continue
            tokens.append(token)
            job.output_ids.append(token)
            job.output_logprobs.append(logprob)
            if job.returns_kept_ids:
                job.kept_logprobs.append(kept_logprob)
            job.versions.append(version)
            if row.stop and (matched := self._stop_strings.find(job.output_ids, row.stop)) is not None:
                job.finish_reason = {"type": "stop", "matched": matched}
            elif token in row.stop_ids:
                job.finish_reason = {"type": "stop", "matched": token}
            elif row.constraint is not None and row.constraint.has_ended:
                job.finish_reason = {"type": "stop", "matched": token if token in self._runner.eos_ids else None}
            elif len(tokens) >= row.max_length:
                job.finish_reason = {"type": "length", "length": len(job.output_ids)}
            else:
                continue
            ended.append(row)
        return ended

    def _score(self, rows: Sequence[Row], scores: torch.Tensor) -> Sequence[Row]:
        """scores: [rows, labels]."""
        for row, of_labels in zip(rows, scores.tolist() if rows else (), strict=True):
            _check(of_labels)
            row.job.scores = of_labels
            row.job.versions = [self.weight_version]
            row.job.finish_reason = {"type": "length", "length": 0}
        return rows

    def _retain(self, row: Row) -> None:
        if not row.is_mixed:
            kv = self._runner.cache.export(row.index, row.num_computed)
            tokens = row.tokens[: row.num_computed]
            keys = self._prefixes.keys(tokens, row.extra_key, row.keys)
            experts = None if row.experts is None else row.experts[: row.num_computed].copy()
            self._prefixes.add(Retained(tokens, row.num_computed, row.extra_key, keys=keys, kv=kv, experts=experts))

    # ---- who is in the batch ----------------------------------------------------------------------------------

    def _admit(self) -> dict[Row, Row]:
        """Give places and longest known prefixes to waiting rows. A row waits while another computes its prefix.

        Returns those among the waiting whose tokens are exactly another's, with that row: its logits can serve both.
        """
        deferred: list[Row] = []
        alike: dict[Row, Row] = {}
        try:
            while self._waiting and len(self._rows) < self._max_rows:
                row = self._waiting.popleft()
                prefix, common = self._prefixes.find(row) or (None, 0)
                is_alike = False
                needs_all = self._can_rewind and row.num_reusable == common - 1
                if needs_all and isinstance(prefix, Row) and prefix.tokens == row.tokens:
                    alike[row], is_alike = prefix, True
                common = min(common, row.num_reusable)  # beyond it, logits are needed
                if is_alike or (prefix is not None and prefix.num_computed < min(common, len(prefix.tokens) - 1)):
                    deferred.append(row)
                else:
                    self._place(row, prefix, common)
        finally:
            self._waiting.extendleft(reversed(deferred))
        return alike

    def _follow(self, plan: StepPlan, alike: Mapping[Row, Row]) -> StepPlan:
        """Give places to waiting rows that sample from the logits of another row of the plan, grouped by that row."""
        rows = sorted(islice(alike, self._max_rows - len(self._rows)), key=lambda row: alike[row].index)
        for row in rows:
            self._waiting.remove(row)
            self._place(row, None, 0)
            row.job.cached_tokens = max(row.job.cached_tokens, min(row.num_reusable, len(row.job.input_ids)))
        return replace(plan, followers=rows, leaders=[alike[row].index for row in rows])

    def _place(self, row: Row, prefix: Prefix | None, common: int) -> None:
        """Append a row with the keys and values of the first `common` tokens of `prefix`, as far as computed."""
        length = min(common, prefix.num_computed) if prefix is not None else 0
        cache = self._runner.cache
        row.index = len(self._rows)
        self._rows.append(row)
        row.num_computed = length
        row.is_mixed = False
        if row.experts is None and (routers := self._runner.routers) is not None:
            row.experts = routers.room_for(row.max_length)
        if row.job.lacks_input_logprobs:
            row.job.input_logprobs.clear()  # a retraction left some; the row begins anew
        if length:
            cache.reserve(len(self._rows), length)
            if isinstance(prefix, Retained):
                cache.restore(row.index, prefix.kv, length)
            elif isinstance(prefix, Row):
                cache.copy(prefix.index, row.index, length)
            if prefix is not None:
                _copy_routes(prefix, row, length)
        row.job.cached_tokens = max(row.job.cached_tokens, min(length, len(row.job.input_ids)))
        self._prefixes.add(row)

    def _remove(self, row: Row) -> None:
        """Take a row out. The last decoding row moves into its place, and the last row into the decoding row's."""
        _settle(row)
        self._prefixes.remove(row)
        hole = row.index
        row.index = -1
        if hole < self._num_decoding:
            self._num_decoding -= 1
            self._move(self._num_decoding, hole)
            hole = self._num_decoding
        self._move(len(self._rows) - 1, hole)
        self._rows.pop()

    def _move(self, source: int, target: int) -> None:
        if source != target:
            row = self._rows[source]
            self._runner.cache.copy(source, target, row.num_computed)
            row.index = target
            self._rows[target] = row

    # ---- between steps ----------------------------------------------------------------------------------------

    def abort(self, rid: str | None, message: str = "Aborted by request") -> list[Job]:
        """Finish and return a job, or all jobs, with their tokens so far. Aborting all never touches the device."""
        if rid is None:
            ended = [*self._take_out_all(), *self._waiting]
            self._waiting.clear()
        else:
            running = [row for row in self._rows if row.job.rid == rid]
            waiting = [row for row in self._waiting if row.job.rid == rid]
            for row in running:
                self._remove(row)
            for row in waiting:
                self._waiting.remove(row)
            ended = [*running, *waiting]
        for row in ended:
            row.job.abort(message)
        return [row.job for row in ended]

    def fail(self, error: Exception) -> list[Job]:
        """Finish every running job after a step raised; the queued ones remain."""
        failed = self._take_out_all()
        for row in failed:
            if not row.job.is_done:
                row.job.abort(f"the step that computed this request failed: {type(error).__name__}: {error}", 500)
        self.flush()
        self._runner.cache.clear()
        return [row.job for row in failed]

    def retract(self) -> None:
        """Put the running sequences back to the head of the queue, without their keys and values."""
        rows = self._take_out_all()
        for row in rows:
            row.keys = self._prefixes.keys(row.tokens, row.extra_key, row.keys)
        self._waiting.extendleft(reversed(rows))

    def _take_out_all(self) -> list[Row]:
        rows, self._rows = self._rows, []
        self._num_decoding = 0
        for row in rows:
            _settle(row)
            self._prefixes.remove(row)
            row.index = -1
        return rows

    def load(self, tensors: Mapping[str, torch.Tensor], weight_version: str) -> None:
        """Change weights. Tokens sampled from then on carry weight_version, and later jobs find no keys and values of
        the old weights. Raises WeightsError, and changes nothing, on a misfit."""
        self._runner.load(tensors)
        self.flush()
        for row in self._rows:
            row.is_mixed = row.num_computed > 0
        self.weight_version = weight_version

    def release(self, parts: Collection[MemoryPart]) -> None:
        """Release memory. Raises RequestError while sequences run, whose keys and values would be lost."""
        if self._rows:
            raise RequestError(
                f"{len(self._rows)} requests are running: pause generation in mode abort or retract before their "
                "memory is released"
            )
        self.flush()
        if self._runner.tower is not None:
            self._runner.tower.forget()
        self._runner.release(parts)
        if "weights" in parts:
            self.weight_version = RELEASED

    def flush(self) -> None:
        """Forget the prefixes of finished sequences."""
        self._prefixes.clear()


def _check(numbers: Iterable[float]) -> None:
    if math.isnan(sum(numbers)):
        raise FloatingPointError("the model computed logits that are not numbers; its weights are broken")


def _accept(rows: Sequence[Row], allowed: Allowed, samples: Samples) -> set[int]:
    """Take constrained rows on in their grammars, and note what they allowed where no filter narrowed it.

    Returns the rows whose grammar allows nothing.
    """
    dead: set[int] = set()
    for place, number in enumerate(allowed.rows):
        row, token = rows[number], samples.tokens[number]
        if not allowed.is_alive[place]:
            dead.add(number)
            continue
        if row.job.sets is not None and number not in samples.kept:
            allowed.note(place, row.job.sets)
        if row.constraint is not None and not row.constraint.accept(token):
            raise RuntimeError(f"a grammar refused token {token}, which it had allowed")
    return dead


def _copy_routes(source: Prefix, target: Row, length: int) -> None:
    """Copy the routes of tokens whose keys and values were copied."""
    if source.experts is not None and target.experts is not None:
        target.experts[:length] = source.experts[:length]


def _settle(row: Row) -> None:
    """Keep the routes of what was computed, also if it will be computed again; but not before a token was sampled."""
    if row.experts is not None and (row.job.output_ids or row.job.is_done):
        row.job.settle_routes(row.experts[: row.num_computed])
