"""The ranks of a train engine as Ray actors, spoken to together; and what becomes of them when one fails."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import ray
from ray.exceptions import RayError, RayTaskError

from arl.api.errors import ArlError, EngineClosedError, TrainingError
from arl.engine.fsdp.rank_actor import THREADS, Message, Outcome, RankActor
from arl.engine.fsdp.ray_cluster import Placement

_GRACE_S = 3.0
"""How long other ranks may take to end, one way or the other, once one has failed; the rest sit in a collective."""
_CLOSING_S = 300.0
"""How long ranks may take to end by themselves: they finish checkpoints that they are writing."""


class RankTracebackError(Exception):
    """What a rank's error is raised from: the traceback as it was there."""


class Ranks:
    """N actors. `train` calls a method on all of them, one call at a time; `beside` calls one, from any thread.

    When a rank raises or dies in a call of `train`, others may wait for it in a collective for ever. So all are ended,
    and TrainingError says who failed, and of what. Where every rank raises an error of arl's own, none waits: that
    error is raised, and the ranks live on. After their end, calls raise EngineClosedError.
    """

    def __init__(self, count: int, placement: Placement, *, num_threads: int, num_gpus: int) -> None:
        # Ray shows each actor its own GPU alone, which is therefore its first.
        environment = {"OMP_NUM_THREADS": str(num_threads), "LOCAL_RANK": "0"}
        actor: Any = ray.remote(concurrency_groups=THREADS)(RankActor)  # pyright: ignore[reportCallIssue] (stubs lag)
        self._actors: list[Any] = [
            actor.options(
                num_cpus=num_threads,
                num_gpus=num_gpus,
                scheduling_strategy=placement.strategy(rank),
                runtime_env={"env_vars": environment},
            ).remote(rank, count)
            for rank in range(count)
        ]
        self._ended: str | None = None
        self._ending = threading.Lock()

    def __len__(self) -> int:
        return len(self._actors)

    def put(self, value: Any) -> Any:
        """A reference to a copy of `value` that ranks can be called with. Raises TypeError if it does not pickle."""
        self._check()
        return ray.put(value)

    def train(self, method: str, arguments: Sequence[tuple[Any, ...]], *, deadline: float | None = None) -> list[Any]:
        """Call `method` on the first ranks, each with its own arguments, and return what each returns.

        deadline: of the monotonic clock, for what belongs to the start.
        """
        self._check()
        try:
            refs = [self._submit(rank, "training", method, own) for rank, own in enumerate(arguments)]
            outcomes = self._collect(refs, deadline)
        except BaseException:
            self.end(f"{method} was interrupted")  # ranks may be anywhere in it
            raise
        _log(outcomes)
        if len(outcomes) < len(refs) or any(outcome.error for outcome in outcomes.values()):
            self._fail(method, outcomes)
        return [outcomes[rank].value for rank in range(len(refs))]

    def train_alike(self, method: str, *arguments: Any, deadline: float | None = None) -> list[Any]:
        """`train` with the same arguments for all ranks."""
        return self.train(method, [arguments] * len(self), deadline=deadline)

    def beside(self, rank: int, method: str, *arguments: Any, group: str = "beside") -> Any:
        """Call `method` on one rank, and return what it returns or raise what it raises.

        Raises TrainingError if the rank died meanwhile.
        """
        self._check()
        outcome = _outcome(self._submit(rank, group, method, arguments))
        return self._value(rank, outcome)

    def beside_all(self, method: str, *arguments: Any) -> None:
        """Call `method` on every rank, and wait until it has ended on each, or one of them is dead."""
        self._check()
        refs = [self._submit(rank, "beside", method, arguments) for rank in range(len(self))]
        outcomes = self._collect(refs)
        for rank, outcome in sorted(outcomes.items(), key=lambda item: not item[1].is_dead):
            self._value(rank, outcome)

    def tell(self, method: str, *arguments: Any) -> None:
        """Call `method` on every rank, and don't wait."""
        if self._ended is None:
            for rank in range(len(self)):
                self._submit(rank, "leaving", method, arguments)

    def close(self) -> None:
        """Let the ranks end what they are at; then end them. Idempotent."""
        if self._ended is None:
            refs = [self._submit(rank, "training", "close", ()) for rank in range(len(self))]
            ray.wait(refs, num_returns=len(refs), timeout=_CLOSING_S)
            self.end("")

    def end(self, reason: str) -> None:
        """Kill the ranks, for a reason that later calls give. Idempotent: the first reason stays."""
        with self._ending:
            if self._ended is not None:
                return
            self._ended = reason
        for actor in self._actors:
            ray.kill(actor)

    def _submit(self, rank: int, group: str, method: str, arguments: Sequence[Any]) -> Any:
        return getattr(self._actors[rank], method).options(concurrency_group=group).remote(*arguments)

    def _check(self) -> None:
        if self._ended is not None:
            raise EngineClosedError("the train engine was closed" + (f": {self._ended}" if self._ended else ""))

    def _collect(self, refs: Sequence[Any], deadline: float | None = None) -> dict[int, Outcome]:
        """How the call ended on each rank; without those that were still at it when others had failed."""
        ranks = {ref: rank for rank, ref in enumerate(refs)}
        outcomes: dict[int, Outcome] = {}
        while ranks:
            timeout_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            done, _ = ray.wait(list(ranks), num_returns=1, timeout=timeout_s)
            if not done:
                break
            outcome = outcomes[ranks.pop(done[0])] = _outcome(done[0])
            if outcome.is_dead:
                break
            if outcome.error is not None:
                grace = time.monotonic() + _GRACE_S
                deadline = grace if deadline is None else min(deadline, grace)
        return outcomes

    def _value(self, rank: int, outcome: Outcome) -> Any:
        _log({rank: outcome})
        if outcome.error is None:
            return outcome.value
        if outcome.is_dead:
            self._check()  # where the ranks were ended, that is the reason
            raise TrainingError(f"rank {rank} of {len(self)} died") from RankTracebackError(outcome.traceback)
        raise outcome.error from RankTracebackError(f"on rank {rank}:\n{outcome.traceback}")

    def _fail(self, method: str, outcomes: Mapping[int, Outcome]) -> NoReturn:
        failed = {rank: outcome for rank, outcome in outcomes.items() if outcome.error is not None}
        if not failed:
            late = [rank for rank in range(len(self)) if rank not in outcomes]
            self.end(reason := f"{method} took too long on ranks {late} of {len(self)}")
            raise TrainingError(
                f"{reason}: longer than train.startup_timeout_s for each rank (those of a machine load the model one "
                "after another). Set it higher if the model is large or its storage slow"
            )
        # The dead explain the living, whose connections they broke; otherwise the first that failed is the cause.
        rank, first = min(failed.items(), key=lambda item: not item[1].is_dead)
        cause = RankTracebackError(f"on rank {rank}:\n{first.traceback}")
        if isinstance(first.error, ArlError) and _are_all_alike(failed, len(self)):
            raise first.error from cause
        what = "died" if first.is_dead else f"failed: {type(first.error).__name__}: {first.error}"
        self.end(reason := f"in {method}, rank {rank} of {len(self)} {what}")
        raise TrainingError(f"{reason}. The train engine is closed; continue from a checkpoint") from cause


def _are_all_alike(failed: Mapping[int, Outcome], count: int) -> bool:
    return len(failed) == count and len({type(outcome.error) for outcome in failed.values()}) == 1


def _outcome(ref: Any) -> Outcome:
    try:
        return ray.get(ref)
    except RayTaskError as error:  # it could not be called: its arguments did not arrive
        return Outcome(error=error.cause, traceback=str(error))
    except RayError as error:
        return Outcome(error=error, traceback=str(error), is_dead=True)


def _log(outcomes: Mapping[int, Outcome]) -> None:
    """Repeat what ranks logged in this process's log: once, what several say alike."""
    said: dict[Message, int] = {}
    for rank, outcome in sorted(outcomes.items()):
        for message in outcome.messages:
            said.setdefault(message, rank)
    for message, rank in said.items():
        logging.getLogger(message.logger).log(message.level, "rank %d: %s", rank, message.text)
