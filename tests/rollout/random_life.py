"""Random events around the real buffer, ledger and replay, one after another without an event loop's turns.

A model counts beside them, in the plainest way, what docs/staleness.md says. `check` compares after every event: who
may go on and does, who must wait and does, what is charged, and that the invariant of the proof holds.
"""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from players import TwoTurns, as_json, examples
from records import trajectory

from arl.api.fakes import ScriptedEngine
from arl.api.settings.run import RolloutConfig
from arl.api.types import Group
from arl.rollout.buffer import Replay, ReplayBuffer, Slot
from arl.rollout.controller import RolloutController
from arl.rollout.episode import EpisodeRunner
from arl.rollout.ledger import ExampleId, GroupOutcome, Issue

NUM_EXAMPLES = 13

_OF_RUNNING = ["sample", "finish", "reject"]
"""Events of a running group."""

made = cache(lambda version: trajectory((version,)))


class Hand:
    """A coroutine that is driven by hand: it goes on when what it waits for has come."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self._waits_for: Any = None
        self.is_done = False
        self.result: Any = None
        self.advance()

    def advance(self) -> None:
        while not self.is_done and (self._waits_for is None or self._waits_for.done()):
            try:
                self._waits_for = self._coroutine.send(None)
            except StopIteration as stop:
                self.is_done, self.result = True, stop.value

    def close(self) -> None:
        self._coroutine.close()


@dataclass(kw_only=True, eq=False)
class Held:
    """A group that is charged, by the model."""

    slot: Slot
    issue: Issue
    oldest: int | None = None
    """The oldest version of its tokens so far."""
    stage: str = "running"
    trained_in: int = -1


@dataclass
class Disk:
    """The newest checkpoint."""

    version: int = 0
    sizes: tuple[int, int] = (0, 0)
    """batch_size and max_staleness at that time."""
    rollout: dict[str, Any] | None = None
    groups: list[Group] = field(default_factory=list)
    num_trained: int = 0
    replay: tuple[Group, ...] = ()


class RandomLife:
    """A run from its beginning, with crashes. buffer_type: the real one, or one with a planted mistake."""

    def __init__(self, seed: int, buffer_type: type[ReplayBuffer], replay_type: type[Replay] = Replay) -> None:
        self.chance = random.Random(seed)
        self._buffer_type, self._replay_type = buffer_type, replay_type
        self.disk = Disk()
        self.weights: list[ExampleId] = []
        """The examples that the weights have seen."""
        self.seen = Counter[str]()
        self.batch_size, self.max_staleness = self.chance.randint(1, 4), self.chance.randint(0, 4)
        self.num_servers = self.chance.randint(1, 3)
        self.rates = {name: self.chance.choice(weights) for name, weights in _RATES.items()}
        self._begin()

    # Lives

    def _begin(self) -> None:
        """Continue from the newest checkpoint."""
        disk, config = self.disk, RolloutConfig(batch_size=self.batch_size, max_staleness=self.max_staleness)
        self.t = self.p = disk.version
        self.servers = [disk.version] * self.num_servers
        self.delivering: int | None = None
        self.buffer = self._buffer_type(self.batch_size, self.max_staleness, version=disk.version)
        runner = EpisodeRunner(workflow=TwoTurns(), timeout_s=99)
        engine = ScriptedEngine(lambda _: (1,))
        self.controller = RolloutController(engine, runner, examples(NUM_EXAMPLES), config, self.buffer, seed=7)
        self.ledger = self.controller.ledger
        self.replay = self._replay_type(2, min_reward=-1.0, max_staleness=self.max_staleness)
        self.weights = self.weights[: disk.num_trained]
        self.held: list[Held] = []
        if disk.rollout:
            self._restore(disk)
        self.batch: list[Held] = []
        self.admitting: Hand | None = None
        self.taking = Hand(self.buffer.take_batch(self.t))
        self._note_taken()

    def close(self) -> None:
        self.taking.close()
        if self.admitting:
            self.admitting.close()

    def _restore(self, disk: Disk) -> None:
        assert disk.rollout is not None
        self.controller.load_state_dict(as_json(disk.rollout), disk.groups)
        self.replay.add(disk.replay, disk.version)
        kept = self.buffer.untrained(disk.version)
        for number, group in enumerate(kept):
            slot, issue = (
                Slot(number=number, stamp=group.stamp),
                Issue(group_id=group.group_id, example_id=group.example_id),
            )
            self.held.append(Held(slot=slot, issue=issue, oldest=group.oldest_version, stage="finished"))
        if disk.sizes == (self.batch_size, self.max_staleness):
            assert len(kept) == len(disk.groups), "a group of the checkpoint was dropped, and nothing had changed"

    def crash(self) -> None:
        self.close()
        if self.chance.random() < 0.3:
            self.batch_size, self.max_staleness = self.chance.randint(1, 4), self.chance.randint(0, 4)
        self._begin()

    def save(self) -> None:
        groups = self.buffer.untrained(self.t)
        waiting = [held.issue.group_id for held in self.held if held.stage == "finished" or held.trained_in >= self.t]
        assert [group.group_id for group in groups] == sorted(waiting), (
            "a checkpoint has other groups than those that wait"
        )
        self.disk = Disk(
            version=self.t,
            sizes=(self.batch_size, self.max_staleness),
            rollout=as_json(self.controller.state_dict()),
            groups=groups,
            num_trained=len(self.weights),
            replay=self.replay.groups,
        )

    # Events

    def step(self) -> None:
        """One event that can happen now."""
        running = [held for held in self.held if held.stage == "running"]
        possible = ["save", "crash"]
        possible += ["train"] if self.taking.is_done else ["cut"]
        possible += ["admit"] * (self.admitting is None) + _OF_RUNNING * bool(running)
        possible += ["load"] * (self.delivering is not None or self.p < self.t)
        rates = self.rates
        point = self.chance.random() * sum([rates[kind] for kind in possible])
        for kind in possible:
            point -= rates[kind]
            if point < 0:
                break
        self.seen[kind] += 1
        if kind in _OF_RUNNING:
            getattr(self, kind)(running[int(self.chance.random() * len(running))])
        else:
            getattr(self, kind)()
        self.check()

    def admit(self) -> None:
        """The rollouts ask for a place, or wait for one."""
        self.admitting = Hand(self.buffer.admit())
        self._wake()

    def _note_admitted(self) -> None:
        if self.admitting and self.admitting.is_done:
            slot, self.admitting = self.admitting.result, None
            assert slot.stamp == self.p
            self.held.append(Held(slot=slot, issue=self.ledger.issue()))

    def sample(self, held: Held) -> None:
        version = self.chance.choice(self.servers)
        held.oldest = version if held.oldest is None else min(held.oldest, version)

    def finish(self, held: Held) -> None:
        if held.oldest is None:
            self.sample(held)
        assert held.oldest is not None
        group = Group(
            group_id=held.issue.group_id,
            example_id=held.issue.example_id,
            stamp=held.slot.stamp,
            trajectories=(made(held.oldest),),
            episode_indices=(0,),
        )
        held.stage = "finished"
        assert Hand(self.buffer.finish(held.slot, group)).is_done
        self._wake()

    def reject(self, held: Held, outcome: GroupOutcome = GroupOutcome.REJECTED) -> None:
        self.held.remove(held)
        self.ledger.settle(held.issue.example_id, outcome)
        assert Hand(self.buffer.release(held.slot)).is_done
        self._wake()

    def cut(self) -> None:
        """Stragglers: those that keep the trainer waiting."""
        overdue, _ = self.buffer._overdue(math.inf, 0.0)
        blocking = self._blocking()
        assert sorted(overdue) == sorted(held.slot.number for held in blocking), "others are cut than keep it waiting"
        for held in blocking[:1]:
            self.reject(held, GroupOutcome.DROPPED)

    def train(self) -> None:
        """The batch that was taken."""
        batch, replayed = self.batch, self.replay.take(self.t)
        ids = [held.issue.example_id for held in batch]
        for group in replayed:
            assert self.t - group.oldest_version <= self.max_staleness, "a replayed token is too old"
            assert group.example_id in self.weights, "a group is replayed that was not trained"
            assert group.example_id not in ids
        assert len(replayed) <= 2
        self.weights += ids
        groups = self.taking.result
        self.controller.trained(groups)
        self.t += 1
        self.replay.add(groups, self.t)
        self.batch = []
        self.taking = Hand(self.buffer.take_batch(self.t))
        self._note_taken()
        self._wake()

    def load(self) -> None:
        """The next server gets the version that is on its way; once all have it, it is published."""
        if self.delivering is None:
            self.delivering = self.t
        behind = [i for i, version in enumerate(self.servers) if version < self.delivering]
        if behind:
            self.servers[self.chance.choice(behind)] = self.delivering
        if len(behind) > 1:
            return
        self.p, self.delivering = self.delivering, None
        self.held = [held for held in self.held if held.stage != "taken" or held.trained_in >= self.p]
        assert Hand(self.buffer.published(self.p)).is_done
        self._wake()

    def _wake(self) -> None:
        """Whoever waits goes on, in any order."""
        hands = [self.admitting, self.taking]
        for hand in hands if self.chance.random() < 0.5 else hands[::-1]:
            if hand:
                hand.advance()
            self._note_admitted()
            self._note_taken()

    def _note_taken(self) -> None:
        if not self.taking.is_done or self.batch:
            return
        expected = self._earliest(self.t)
        assert expected is not None, "a batch was taken that must wait"
        got = [group.group_id for group in self.taking.result]
        assert got == sorted(held.issue.group_id for held in expected), "not the groups with the earliest deadlines"
        for held in expected:
            assert held.oldest is not None
            assert self.t - held.oldest <= self.max_staleness, "a token is too old"
            held.stage, held.trained_in = "taken", self.t
        self.batch = expected
        self._taken_for = self.t

    # The model

    def _deadline(self, held: Held) -> int:
        version = held.slot.stamp if held.stage == "running" else held.oldest
        assert version is not None
        return version + self.max_staleness

    def _outstanding(self) -> list[Held]:
        return [held for held in self.held if held.stage != "taken"]

    def _overfull(self, left: list[Held], version: int) -> int | None:
        """The first deadline by which more stay behind than the later batches hold."""
        deadlines = sorted(map(self._deadline, left))
        for number, deadline in enumerate(deadlines, 1):
            is_last = number == len(deadlines) or deadlines[number] != deadline
            if is_last and number > max(0, (deadline - version) * self.batch_size):
                return deadline
        return None

    def _split(self) -> tuple[list[Held], list[Held]]:
        """The batch that would be taken, and who would stay."""
        finished = sorted(
            (held for held in self.held if held.stage == "finished"),
            key=lambda held: (self._deadline(held), held.slot.number),
        )
        first = finished[: self.batch_size]
        return first, [held for held in self._outstanding() if held not in first]

    def _earliest(self, version: int) -> list[Held] | None:
        batch, left = self._split()
        return None if len(batch) < self.batch_size or self._overfull(left, version) is not None else batch

    def _blocking(self) -> list[Held]:
        running = [held for held in self.held if held.stage == "running"]
        batch, left = self._split()
        if len(batch) < self.batch_size:
            return running
        last = self._overfull(left, self.t)
        assert last is not None
        return [held for held in running if self._deadline(held) <= last]

    def check(self) -> None:
        """Everything that must hold between any two events."""
        held, buffer = self.held, self.buffer
        stages = [one.stage for one in held]
        num_running = stages.count("running")
        assert buffer.num_charged == len(held) <= buffer.capacity, "the charges do not add up"
        assert (buffer.num_running, buffer.num_finished) == (num_running, stages.count("finished"))
        assert self.admitting is None or len(held) == buffer.capacity, "a group waits, and there is room"
        version = self.t + self.taking.is_done
        deadlines = [self._deadline(one) for one in self._outstanding()]
        for number, deadline in enumerate(sorted(deadlines), 1):
            assert number <= (deadline - version + 1) * self.batch_size, "a group could not be trained in time"
        if not self.taking.is_done:
            may_go_on = num_running or self.p < self.t or len(held) < buffer.capacity
            assert may_go_on, "the trainer waits, and nothing can happen: a deadlock"
            assert self._earliest(self.t) is None, "the trainer waits, and need not"

    def check_end(self) -> None:
        """Each example of an epoch ended once, as the weights have seen it, or is pending."""
        ledger, seen = self.ledger, Counter(self.weights)
        assert not seen or max(seen.values()) == 1, "an example of an epoch was trained twice"
        pending = Counter(epoch for epoch, *_ in ledger.state_dict()["pending"])
        for epoch in range(ledger.epoch):
            outcomes = ledger.outcomes(epoch)
            assert sum(map(len, outcomes.values())) + pending[epoch] == NUM_EXAMPLES
            assert outcomes[GroupOutcome.TRAINED] == sorted(row for e, row in self.weights if e == epoch)


_RATES: dict[str, tuple[float, ...]] = {
    "admit": (0.5, 2.0, 10.0),
    "sample": (0.5, 2.0),
    "finish": (0.3, 1.0, 4.0),
    "reject": (0.0, 0.1, 1.0),
    "cut": (0.0, 0.05, 0.3),
    "train": (0.3, 3.0),
    "load": (0.1, 1.0, 5.0),
    "save": (0.02,),
    "crash": (0.005,),
}
"""How likely each event is among those that can happen; a run has one of each."""


_EVENTS = 2000
"""Of a run."""


def live(
    num_events: int, buffer_type: type[ReplayBuffer] = ReplayBuffer, *, first_seed: int = 0, **options: Any
) -> Counter[str]:
    """Runs of _EVENTS events each; returns how often each kind of event was."""

    async def lives() -> Counter[str]:
        seen = Counter[str]()
        for seed in range(first_seed, first_seed + num_events // _EVENTS):
            life = RandomLife(seed, buffer_type, **options)
            try:
                for _ in range(_EVENTS):
                    life.step()
                life.check_end()
            except AssertionError as error:
                raise AssertionError(f"{error} (seed {seed}, after {life.seen.total()} events)") from error
            finally:
                life.close()
            seen += life.seen
        return seen

    return asyncio.run(lives())
