"""The ranks of a RayTrainEngine, and their driver: it calls them all, and ends them all when one fails or hangs.

Ranks (this process) ----Ray----> RankActor --> FSDPTrainEngine
         |                           |
         +<----- CallOutcome --------+
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayError, RayTaskError
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] (documented, but not in __all__)

from arl.algorithm.flat_sequences import FlatSequences
from arl.api.errors import ArlError, EngineClosedError, ProcessLostError, TrainingError, TransportError
from arl.api.events import PlacedPart
from arl.api.settings.engines import TrainConfig
from arl.api.train_engine import Head, ModelLimits, Output, TokenLoss
from arl.api.types import new_id
from arl.engine.fsdp.ray_cluster import Placement
from arl.engine.fsdp.train_engine import FSDPTrainEngine
from arl.runtime.processes.rpc import CallOutcome, Kept, Message, Messages, OtherTracebackError, place_of, reported

_GRACE_S = 3.0
"""How long a call may go on after one rank has failed; ranks in a collective would wait for ever."""
_LOOK_S = 30.0
"""How often the driver asks ranks where they are while it waits for them."""
_ANSWER_S = 5.0
_CLOSING_S = 300.0
"""How long closing ranks may take to finish their checkpoints."""


THREADS = {"training": 1, "beside": 64, "leaving": 4, "watching": 1}
"""Ray's concurrency groups and their threads: calls of the engine, which collectives need on one thread; snapshots and
savings; calls that end others; where the training thread is."""


class RankActor:
    """One rank: an FSDPTrainEngine in a process of its own. The driver names snapshots and savings by keys."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._store: TCPStore | None = None
        self._kept = Kept()
        self.messages = Messages()

    @reported
    def call(self, name: str, *args: Any) -> Any:
        """Call this rank's method of that name, or else its engine's."""
        return getattr(self if hasattr(self, name) else self._engine, name)(*args)

    def open_store(self, address: str) -> int:
        """Open the store through which the ranks meet, listening at `address` alone; returns its port."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        sock = socket.create_server((address, 0), family=family)
        port = sock.getsockname()[1]
        # Handed over open, so that nobody else takes the port.
        self._store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=sock.detach())
        return port

    def build(self, store: tuple[str, int], model: str, config: TrainConfig, seed: int, head: Head) -> ModelLimits:
        """Join the process group and build the engine on the thread that will train; returns its limits."""
        self._training_thread = threading.get_ident()
        address, port = store
        meeting = self._store or TCPStore(address, port, is_master=False)
        # Gloo groups made here listen at loopback if ranks meet there; later groups may reach other machines.
        is_local = address.startswith("127.") and "GLOO_SOCKET_IFNAME" not in os.environ
        if is_local:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        try:
            backend = "cpu:gloo,cuda:nccl" if torch.device(config.device).type == "cuda" else "gloo"
            dist.init_process_group(backend, store=meeting, rank=self._rank, world_size=self._world_size)
            self._engine = FSDPTrainEngine(model, config, seed, head)
        finally:
            if is_local:
                del os.environ["GLOO_SOCKET_IFNAME"]
        return self._engine.limits

    def forward(self, shares: Sequence[FlatSequences], output: Output) -> np.ndarray:
        """The output for the sequences of the one share, end to end."""
        outputs = self._engine.forward(shares[0], output)
        return torch.cat(outputs).numpy() if outputs else np.zeros(0, np.float32)

    def train_batch(
        self, shares: Sequence[FlatSequences], loss: TokenLoss
    ) -> tuple[dict[str, float], list[dict[str, np.ndarray]]]:
        """shares: this rank's part of each minibatch. Returns the metrics, and what the loss kept."""
        metrics = self._engine.train_batch(shares, loss)
        return metrics, [{name: column.numpy() for name, column in kept.items()} for kept in self._engine.kept]

    def load(self, directory: Path) -> int:
        """Returns the version."""
        self._engine.load(directory)
        return self._engine.version

    def keep(self, key: str, name: str, *args: Any) -> None:
        """Call the engine's `name` (snapshot, snapshot_adapter or save) and keep what it returns."""
        self._kept.put(key, getattr(self._engine, name)(*args))

    def ask(self, key: str, name: str, args: tuple[Any, ...]) -> Any:
        return self._kept.ask(key, name, args)

    def forget(self, key: str) -> None:
        self._kept.forget(key)

    def answer(self, token: Path, mark: Path) -> str:
        """Make the file `mark`, if this rank sees `token` and may write there; returns this node's address."""
        with contextlib.suppress(OSError):
            if token.exists():
                mark.touch()
        return ray.util.get_node_ip_address()

    def place(self) -> tuple[PlacedPart, str]:
        """Where this rank runs, and the name of its GPU, the same for all processes; empty without one."""
        gpus = ", ".join(map(str, ray.get_gpu_ids()))
        device = f"GPU {gpus}" if gpus else "cpu"
        properties = torch.cuda.get_device_properties(torch.cuda.current_device()) if gpus else None
        address = ray.util.get_node_ip_address()
        part = PlacedPart(part="trainer", host=socket.gethostname(), address=address, pid=os.getpid(), device=device)
        return part, str(getattr(properties, "uuid", ""))

    def whereabouts(self) -> tuple[int, str]:
        """The number of microbatches computed so far, and where the training thread is."""
        return self._engine.num_computed, place_of(self._training_thread)

    def close(self) -> None:
        self._engine.close()
        dist.destroy_process_group()


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

    def beside(self, ranks: Iterable[int], method: str, *arguments: Any, group: str = "beside") -> dict[int, Any]:
        """Call `method` on these ranks and wait until it has ended on all, or one is dead; returns or raises what it
        does. Raises ProcessLostError if a rank died."""
        self._check()
        refs = {self._submit(rank, group, method, arguments): rank for rank in ranks}
        outcomes = self._collect(method, refs, _Watch(self._timeout_s, is_training=False))
        late = {rank for rank in refs.values() if rank not in outcomes}
        is_one_dead = any(outcome.is_dead for outcome in outcomes.values())
        # The method failed on other ranks. If late ones do not answer, that is why.
        if late and not is_one_dead and (silent := sorted(late - self._whereabouts(late).keys())):
            self.end(reason := f"{method} failed, and ranks {silent} of {len(self)} do not answer")
            raise ProcessLostError(f"{reason}. The train engine is closed")
        dead_first = sorted(outcomes.items(), key=lambda item: not item[1].is_dead)
        return {rank: self._value(rank, outcome) for rank, outcome in dead_first}

    def ask(self, key: str, name: str, *args: Any, is_leaving: bool = False) -> Any:
        """The attribute `name` of what rank 0 keeps under `key`; see arl.runtime.processes.rpc.Holder."""
        return self.beside([0], "ask", key, name, args, group="leaving" if is_leaving else "beside")[0]

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
                node = self.beside([rank], "answer", token, mark)[rank]
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
        return self._actors[rank].call.options(concurrency_group=group).remote(method, *arguments)

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
