"""The driver of a RayTrainEngine's ranks: it calls them all, and ends them all when one of them fails or hangs.

Ranks (this process) ----Ray----> RankActor --> FSDPTrainEngine
         |                           |
         +<----- CallOutcome --------+
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import ray
from ray.exceptions import RayError, RayTaskError

from arl.api.errors import ArlError, EngineClosedError, ProcessLostError, TrainingError, TransportError
from arl.api.types import new_id
from arl.engine.fsdp.rank_actor import THREADS, RankActor
from arl.engine.fsdp.ray_cluster import Placement
from arl.runtime.processes.rpc import CallOutcome, Message, OtherTracebackError

_GRACE_S = 3.0
"""How long a call may go on after one rank has failed; ranks in a collective would wait for ever."""
_LOOK_S = 30.0
"""How often the driver asks ranks where they are while it waits for them."""
_ANSWER_S = 5.0
_CLOSING_S = 300.0
"""How long closing ranks may take to finish their checkpoints."""


class _Watch:
    """Finds ranks that hang in a call: none computed a microbatch for timeout_s or, beside training, none answered."""

    def __init__(self, timeout_s: float, *, is_training: bool) -> None:
        self._timeout_s = timeout_s
        self._is_training = is_training
        self._since = time.monotonic()
        self._counts: dict[int, int] = {}

    def verdict(self, pending: Iterable[int], answers: Mapping[int, tuple[int, str]]) -> str | None:
        """A sentence about the ranks that hang; None if the call may go on."""
        counts = {rank: count for rank, (count, _) in answers.items()}
        grew = any(count > self._counts.get(rank, count) for rank, count in counts.items())
        self._counts |= counts
        if grew or (answers and not self._is_training):
            self._since = time.monotonic()
        if time.monotonic() - self._since < self._timeout_s:
            return None
        silent = [rank for rank in pending if rank not in answers]
        where = [f"rank {rank} does not answer, as if it were stopped" for rank in silent]
        where += [f"rank {rank} is at {place}" for rank, (_, place) in sorted(answers.items())]
        return f"has not moved for {self._timeout_s:g} s: {'; '.join(where)}"


class Ranks:
    """N actors. `train` calls a method on all of them, one call at a time; `beside` calls one, from any thread.

    If a rank raises or dies in `train`, others may wait for it in a collective for ever. So `train` ends all of them,
    and raises ProcessLostError with the rank and the error, as later calls do. If every rank raises the
    same ArlError, none waits: `train` raises that error, and the ranks live on. If a rank hangs for timeout_s, in any
    call, all ranks are ended, too.
    """

    def __init__(self, count: int, placement: Placement, *, num_threads: int, num_gpus: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # Ray shows each actor one GPU, its own.
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
        """A reference to a copy of `value`, as an argument for ranks. Raises TypeError if it does not pickle."""
        self._check()
        return ray.put(value)

    def train(self, method: str, arguments: Sequence[tuple[Any, ...]], *, deadline: float | None = None) -> list[Any]:
        """Call `method` on the first ranks, each with its arguments; returns their values. deadline: monotonic time."""
        self._check()
        try:
            refs = [self._submit(rank, "training", method, own) for rank, own in enumerate(arguments)]
            watch = _Watch(self._timeout_s, is_training=True) if deadline is None else None
            outcomes = self._collect(method, {ref: rank for rank, ref in enumerate(refs)}, watch, deadline)
        except BaseException:
            self.end(f"{method} was interrupted")  # the ranks may be anywhere in it
            raise
        _log(outcomes)
        if len(outcomes) < len(refs) or any(outcome.error for outcome in outcomes.values()):
            self._fail(method, outcomes)
        return [outcomes[rank].value for rank in range(len(refs))]

    def train_alike(self, method: str, *arguments: Any, deadline: float | None = None) -> list[Any]:
        """`train` on all ranks with the same arguments."""
        return self.train(method, [arguments] * len(self), deadline=deadline)

    def beside(self, rank: int, method: str, *arguments: Any, group: str = "beside") -> Any:
        """Call `method` on one rank; returns or raises what it does. Raises ProcessLostError if the rank died."""
        return self._beside([rank], group, method, arguments)[rank]

    def beside_all(self, method: str, *arguments: Any) -> None:
        """Call `method` on every rank and wait until it has ended on all, or one is dead."""
        self._beside(range(len(self)), "beside", method, arguments)

    def _beside(self, ranks: Iterable[int], group: str, method: str, arguments: Sequence[Any]) -> dict[int, Any]:
        self._check()
        refs = {self._submit(rank, group, method, arguments): rank for rank in ranks}
        outcomes = self._collect(method, refs, _Watch(self._timeout_s, is_training=False))
        late = [rank for rank in refs.values() if rank not in outcomes]
        if late and not any(outcome.is_dead for outcome in outcomes.values()):
            self._check_answers(method, late)
        dead_first = sorted(outcomes.items(), key=lambda item: not item[1].is_dead)
        return {rank: self._value(rank, outcome) for rank, outcome in dead_first}

    def _check_answers(self, method: str, late: Sequence[int]) -> None:
        """`method` failed on other ranks. If late ones do not answer, that is why: end all, raise ProcessLostError."""
        if silent := sorted({*late} - self._whereabouts(late).keys()):
            self.end(reason := f"{method} failed, and ranks {silent} of {len(self)} do not answer")
            raise ProcessLostError(f"{reason}. The train engine is closed")

    def ask(self, key: str, name: str, *args: Any, is_leaving: bool = False) -> Any:
        """The attribute `name` of what rank 0 keeps under `key`; see arl.runtime.processes.rpc.Holder."""
        return self.beside(0, "ask", key, name, args, group="leaving" if is_leaving else "beside")

    def unseen(self, directory: Path, ranks: Iterable[int] = (0,)) -> str | None:
        """A sentence naming a rank, and its node, that does not share this process's directory; None if all do.

        Raises TransportError if this process cannot write there.
        """
        token = directory / f".seen-{new_id()[:12]}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            token.touch()
            for rank in ranks:
                mark = token.with_name(f"{token.name}-{rank}")
                node = self.beside(rank, "answer", token, mark)
                if not mark.exists():
                    return f"rank {rank}, on {node}, does not see {directory} of this machine, or may not write there"
                mark.unlink()
        except OSError as error:
            raise TransportError(f"cannot write to {directory}: {error}") from error
        finally:
            with contextlib.suppress(OSError):
                token.unlink(missing_ok=True)
        return None

    def tell(self, method: str, *arguments: Any) -> None:
        """Call `method` on every rank without waiting."""
        if self._ended is None:
            for rank in range(len(self)):
                self._submit(rank, "leaving", method, arguments)

    def close(self) -> None:
        """Let the ranks finish, then end them. Idempotent."""
        if self._ended is None:
            refs = [self._submit(rank, "training", "close", ()) for rank in range(len(self))]
            ray.wait(refs, num_returns=len(refs), timeout=_CLOSING_S)
            self.end("")

    def end(self, reason: str) -> None:
        """Kill the ranks. Later calls raise ProcessLostError with the first `reason`; without one EngineClosedError."""
        with self._ending:
            if self._ended is not None:
                return
            self._ended = reason
        for actor in self._actors:
            ray.kill(actor)

    def _submit(self, rank: int, group: str, method: str, arguments: Sequence[Any]) -> Any:
        return getattr(self._actors[rank], method).options(concurrency_group=group).remote(*arguments)

    def _check(self) -> None:
        if self._ended:
            raise ProcessLostError(f"the train engine was closed: {self._ended}")
        if self._ended is not None:
            raise EngineClosedError("the train engine was closed")

    def _collect(
        self, method: str, refs: Mapping[Any, int], watch: _Watch | None, deadline: float | None = None
    ) -> dict[int, CallOutcome]:
        """How the call ended on each rank; ranks that had not ended soon after others failed are missing.

        refs: reference -> rank. Raises ProcessLostError, after ending all ranks, if the watch finds that they hang.
        """
        ranks = dict(refs)
        outcomes: dict[int, CallOutcome] = {}
        while ranks:
            left_s = math.inf if deadline is None else max(deadline - time.monotonic(), 0.0)
            done, _ = ray.wait(list(ranks), num_returns=1, timeout=min(left_s, _LOOK_S, self._timeout_s / 4))
            if not done and deadline is not None and time.monotonic() >= deadline:
                break
            if not done:
                if watch and (sentence := watch.verdict(ranks.values(), self._whereabouts(ranks.values()))):
                    self.end(reason := f"{method} {sentence}")
                    raise ProcessLostError(f"{reason}. The train engine is closed")
                continue
            outcome = outcomes[ranks.pop(done[0])] = _outcome(done[0])
            if outcome.is_dead:
                break
            if outcome.error is not None:
                grace = time.monotonic() + _GRACE_S
                deadline = grace if deadline is None else min(deadline, grace)
        return outcomes

    def _whereabouts(self, ranks: Iterable[int]) -> dict[int, tuple[int, str]]:
        """RankActor.whereabouts of the ranks that answer."""
        refs = {self._submit(rank, "watching", "whereabouts", ()): rank for rank in ranks}
        done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=min(_ANSWER_S, self._timeout_s / 4))
        return {refs[ref]: outcome.value for ref in done if (outcome := _outcome(ref)).error is None}

    def _value(self, rank: int, outcome: CallOutcome) -> Any:
        _log({rank: outcome})
        if outcome.error is None:
            return outcome.value
        if outcome.is_dead:
            self._check()  # raises the reason if `end` killed it
            raise ProcessLostError(f"rank {rank} of {len(self)} died") from OtherTracebackError(outcome.traceback)
        raise outcome.error from OtherTracebackError(f"on rank {rank}:\n{outcome.traceback}")

    def _fail(self, method: str, outcomes: Mapping[int, CallOutcome]) -> NoReturn:
        failed = {rank: outcome for rank, outcome in outcomes.items() if outcome.error is not None}
        if not failed:
            late = [rank for rank in range(len(self)) if rank not in outcomes]
            self.end(reason := f"{method} took too long on ranks {late} of {len(self)}")
            raise TrainingError(f"{reason}; put the model on faster storage, or use fewer ranks on a machine")
        # A dead rank is the cause of the others' broken connections.
        rank, first = min(failed.items(), key=lambda item: not item[1].is_dead)
        cause = OtherTracebackError(f"on rank {rank}:\n{first.traceback}")
        kinds = {type(outcome.error) for outcome in failed.values()}
        if isinstance(first.error, ArlError) and len(failed) == len(self) and len(kinds) == 1:
            raise first.error from cause
        what = "died" if first.is_dead else f"failed: {type(first.error).__name__}: {first.error}"
        self.end(reason := f"in {method}, rank {rank} of {len(self)} {what}")
        raise ProcessLostError(f"{reason}. The train engine is closed") from cause


def _outcome(ref: Any) -> CallOutcome:
    try:
        return ray.get(ref)
    except RayTaskError as error:  # the call's arguments did not arrive
        return CallOutcome(error=error.cause, traceback=str(error))
    except RayError as error:
        return CallOutcome(error=error, traceback=str(error), is_dead=True)


def _log(outcomes: Mapping[int, CallOutcome]) -> None:
    """Repeat the ranks' messages in this process's log, each message once."""
    said: dict[Message, int] = {}
    for rank, outcome in sorted(outcomes.items()):
        for message in outcome.messages:
            said.setdefault(message, rank)
    for message, rank in said.items():
        logging.getLogger(message.logger).log(message.level, "rank %d: %s", rank, message.text)
