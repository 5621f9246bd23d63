"""Every token that was received has one fate, and the sum closes, whatever happens."""

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import pytest
from players import Moody, TwoTurns, as_json, controlled, engine_with_latency, examples, train
from records import grouped, trajectory
from virtual_time import run_in_virtual_time

from arl.api.engine import Sampler
from arl.api.errors import PromptTooLongError, RequestTimeoutError, ServerError
from arl.api.events import Fate
from arl.api.fakes import ScriptedEngine
from arl.api.types import Example, ModelRequest, SamplingParams, Trajectory
from arl.api.workflow import RolloutWorkflow
from arl.rollout.controller import RolloutController, run_examples
from arl.rollout.episode import EpisodeRunner
from arl.rollout.token_ledger import TokenLedger


def closes(ledger: TokenLedger) -> bool:
    counted = ledger.counted()
    return counted.received == counted.open + counted.waiting + sum(tally.tokens for tally in counted.fates.values())


def fates(ledger: TokenLedger) -> dict[str, int]:
    return {fate: tally.tokens for fate, tally in ledger.counted().fates.items() if tally.tokens}


OPEN = len(Fate)
CODES = {fate: code for code, fate in enumerate(Fate)}


class PlainLedger:
    """What TokenLedger does, token by token: each is a cell that holds its fate."""

    def __init__(self, cells: bytes = b"") -> None:
        self.cells = bytearray(cells)
        self.open: dict[str, list[int]] = {}
        self.groups: dict[int, list[list[int]]] = {}

    def copy(self) -> "PlainLedger":
        copied = PlainLedger(self.cells)
        copied.open = {episode: cells[:] for episode, cells in self.open.items()}
        copied.groups = dict(self.groups)
        return copied

    def fates(self) -> dict[str, int]:
        return {fate: number for fate, code in CODES.items() if (number := self.cells.count(code))}

    def answered(self, episode: str, number: int) -> None:
        self.open.setdefault(episode, []).extend(range(len(self.cells), len(self.cells) + number))
        self.cells += bytes([OPEN] * number)

    def mark(self, cells: list[int], fate: Fate) -> None:
        for cell in cells:
            self.cells[cell] = CODES[fate]

    def killed(self, saved: "PlainLedger", kept: set[int]) -> None:
        """Go on from a copy that was saved before."""
        num_undone = len(self.cells) - len(saved.cells)
        self.cells, self.open, self.groups = saved.cells[:], {}, {}
        for cells in saved.open.values():
            self.mark(cells, Fate.STOPPED)
        for number, group in saved.groups.items():
            if number in kept:
                self.groups[number] = group
            else:
                for cells in group:
                    self.mark(cells, Fate.RETURNED)
        self.cells += bytes([CODES[Fate.STOPPED]] * num_undone)


@dataclass
class TrainedGroup:
    """What the ledger looks at of a group: its episodes, the first of which has two trajectories, and their tokens."""

    group_id: int
    tokens: list[int]

    @property
    def episode_indices(self) -> tuple[int, ...]:
        return (0, *range(len(self.tokens)))

    @property
    def trajectories(self) -> list["TrainedGroup.Tokens"]:
        first, *others = self.tokens
        return [self.Tokens(first // 2), self.Tokens(first - first // 2), *map(self.Tokens, others)]

    @dataclass
    class Tokens:
        num_trained_tokens: int
        is_truncated: bool = False


class RandomRun:
    """A million events of a run: answers, requests without one, ends, groups, training, checkpoints and kills."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.ledger, self.plain = TokenLedger(), PlainLedger()
        self.unreceived = self.num_unanswered = 0
        self.number = 0
        self.saved = as_json(self.ledger.state_dict()), self.plain.copy()

    def step(self) -> None:
        kind = self.chance.random()
        if kind > 0.99999:
            self.kill()
        elif kind > 0.9999:
            self.saved = as_json(self.ledger.state_dict()), self.plain.copy()
        elif kind > 0.9 and self.plain.groups:
            self.train()
        elif len(self.plain.open) > 8 and kind < 0.3:
            self.hold() if kind < 0.1 else self.end()
        elif kind > 0.85:
            self.cancel()
        else:
            self.answer()

    def answer(self) -> None:
        self.number += self.chance.random() < 0.1
        episode, tokens = f"{self.number}.{int(4 * self.chance.random())}", int(4 * self.chance.random())
        self.ledger.answered(episode, tokens, 0.25)
        self.plain.answered(episode, tokens)

    def cancel(self) -> None:
        asked = self.chance.choice((1, 2))
        self.ledger.unanswered(asked)
        self.unreceived += asked
        self.num_unanswered += 1

    def end(self) -> None:
        episode = self.chance.choice(tuple(self.plain.open))
        fate = self.chance.choice([Fate.FAILED, Fate.RETRIED, Fate.OVERTAKEN, Fate.STRAGGLER, Fate.REJECTED])
        self.ledger.settle(episode, fate)
        self.plain.mark(self.plain.open.pop(episode), fate)

    def hold(self) -> None:
        chosen = self.chance.sample(tuple(self.plain.open), min(len(self.plain.open), 2))
        self.number += 1
        self.ledger.hold(self.number, dict(enumerate(chosen)))
        self.plain.groups[self.number] = [self.plain.open.pop(episode) for episode in chosen]

    def train(self) -> None:
        number = self.chance.choice(tuple(self.plain.groups))
        cells = self.plain.groups.pop(number)
        shares = [self.chance.randint(0, len(own)) for own in cells]
        self.ledger.trained(TrainedGroup(number, shares))
        for own, share in zip(cells, shares, strict=True):
            self.plain.mark(own[:share], Fate.TRAINED)
            self.plain.mark(own[share:], Fate.MASKED)

    def kill(self) -> None:
        state, plain = self.saved
        kept = {number for number in plain.groups if self.chance.random() < 0.8}
        told, self.ledger = self.ledger.counted(), TokenLedger()
        self.ledger.load_state_dict(state, kept)
        self.ledger.note_undone(told)
        self.plain.killed(plain, kept)
        self.saved = as_json(self.ledger.state_dict()), self.plain.copy()

    def check(self) -> None:
        assert closes(self.ledger)
        assert self.ledger.num_open + self.ledger.num_waiting == self.plain.cells.count(OPEN)
        assert fates(self.ledger) == self.plain.fates()
        counted = self.ledger.counted()
        assert (counted.unreceived, counted.unanswered) == (self.unreceived, self.num_unanswered)
        assert counted.asked == len(self.plain.cells) + self.unreceived


def test_the_sum_closes_over_a_million_random_events() -> None:
    run = RandomRun(1)
    for number in range(1_000_000):
        run.step()
        if number % 10_000 == 0:
            run.check()
    run.check()
    assert len(fates(run.ledger)) == 9
    assert run.num_unanswered > 1000
    assert run.ledger.unknown == 0


def ran(workflow: RolloutWorkflow, num_versions: int = 3, **settings: object) -> RolloutController:
    """The controller of a run of so many batches. Everything that the engine said was received."""

    async def main() -> RolloutController:
        engine = engine_with_latency()
        controller, buffer, _ = controlled(workflow, 50, engine, **settings)
        await train(controller, buffer, engine, range(num_versions))
        assert controller.tokens.received == engine.num_sampled
        return controller

    controller = run_in_virtual_time(main())
    assert closes(controller.tokens)
    return controller


class Turns(TwoTurns):
    """Does something of its own once it has what TwoTurns returns, 6 sampled tokens; `then` gets that and the number of
    episodes before."""

    def __init__(self, then: Callable[[int, Trajectory], object]) -> None:
        self._then, self._number = then, -1

    async def arun_episode(self, engine: Sampler, data: Example) -> object:
        self._number = number = self._number + 1
        result = self._then(number, await super().arun_episode(engine, data))
        return await result if asyncio.iscoroutine(result) else result


def fails(error: str) -> None:
    raise RuntimeError(error)


def unmasked(number: int, whole: Trajectory) -> Trajectory:
    return replace(whole, loss_mask=(*whole.loss_mask[:-2], 0, 0))


LATE = 10**6
CUT = {"batch_size": 1, "max_staleness": 0}
ONE_OF_THREE_FAILS: dict[str, object] = {"episode_retries": 0, "min_group_size": 1, "max_failure_rate": 1.0}


@pytest.mark.parametrize(
    ("then", "settings", "fate", "share"),
    [
        (lambda number, whole: whole, {}, Fate.TRAINED, 1.0),
        (unmasked, {}, Fate.MASKED, 1 / 3),
        (lambda number, whole: None if number % 2 else whole, {"min_group_size": 1}, Fate.REJECTED, 0.5),
        (lambda number, whole: fails("no") if number % 3 == 0 else whole, ONE_OF_THREE_FAILS, Fate.FAILED, 1 / 3),
        (lambda number, whole: fails("no") if number % 2 else whole, {"episode_retries": 9}, Fate.RETRIED, 0.5),
        (
            lambda number, whole: asyncio.sleep(number % 2 * LATE, whole),
            {"extra_episodes": 2, **CUT},
            Fate.OVERTAKEN,
            0.5,
        ),
        (lambda number, whole: whole, {"keep": lambda group: group.group_id % 2}, Fate.REJECTED, 0.5),
        (lambda number, whole: whole, {"has_baseline": True}, Fate.BASELINE, 1 / 3),
        (
            lambda number, whole: asyncio.sleep(number % 4 * LATE, whole),
            {"drop_stragglers_after_s": 9.0, "group_size": 1, **CUT},
            Fate.STRAGGLER,
            0.75,
        ),
    ],
)
def test_each_way_to_end_is_a_fate_of_its_own(
    then: Callable[[int, Trajectory], object], settings: dict[str, object], fate: Fate, share: float
) -> None:
    """share: of the tokens, but for those of the pipeline's ends."""
    ledger = ran(Turns(then), num_versions=40, **settings).tokens
    assert ledger.tally(fate).tokens == pytest.approx(share * ledger.received, rel=0.15)
    assert sum(fates(ledger).values()) == ledger.received - ledger.num_open - ledger.num_waiting


@pytest.mark.parametrize(
    ("error", "unreceived"),
    [
        (asyncio.CancelledError(), 9),
        (RequestTimeoutError("late"), 9),
        (ServerError("failed 5 times"), 9),
        (PromptTooLongError("no room"), 0),
    ],
)
async def test_a_request_without_a_response_asked_for_tokens_that_were_not_received_unless_it_was_refused(
    error: BaseException, unreceived: int
) -> None:
    def answer(request: ModelRequest) -> tuple[int, ...]:
        if request.input_ids == (2,):
            raise error
        return (7, 8)

    class TwoRequests(RolloutWorkflow):
        async def arun_episode(self, engine: Sampler, data: Example) -> None:
            for prompt in (1, 2):
                asked = ModelRequest(input_ids=(prompt,), sampling=SamplingParams(max_new_tokens=9))
                with suppress(type(error)):
                    await engine.agenerate(asked)

    runner = EpisodeRunner(workflow=TwoRequests(), timeout_s=5)
    await run_examples(ScriptedEngine(answer), runner, examples(1), max_concurrent=1)
    counted = runner.tokens.counted()
    assert (counted.asked, counted.received, counted.unreceived) == (2 + unreceived, 2, unreceived)
    assert counted.unanswered == bool(unreceived)


def test_held_out_episodes_and_those_that_the_end_of_a_run_stops_have_fates_too() -> None:
    async def main() -> TokenLedger:
        engine = engine_with_latency()
        runner = EpisodeRunner(workflow=TwoTurns(), timeout_s=99)
        await run_examples(engine, runner, examples(5), max_concurrent=2)
        endless = asyncio.create_task(
            run_examples(engine, replace(runner, workflow=Moody()), examples(50), max_concurrent=9)
        )
        await asyncio.sleep(1)
        endless.cancel()
        await asyncio.wait([endless])
        assert runner.tokens.received == engine.num_sampled > 30
        return runner.tokens

    ledger = run_in_virtual_time(main())
    assert fates(ledger) == {"evaluation": ledger.received}
    controller = ran(Turns(lambda number, whole: asyncio.sleep(9 * number, whole)), num_versions=2)
    assert controller.tokens.tally(Fate.STOPPED).tokens > 0


@pytest.mark.parametrize(
    ("is_trained", "expected"),
    [
        (None, {"trained": (5, 2), "masked": (2, 0)}),
        ((False, True), {"trained": (2, 1), "masked": (5, 1)}),
        ((False, False), {"masked": (7, 2)}),
    ],
)
def test_tokens_and_episodes_that_the_algorithm_leaves_out_are_masked(
    is_trained: tuple[bool, ...] | None, expected: dict[str, tuple[int, int]]
) -> None:
    ledger = TokenLedger()
    for episode, tokens in (("7.0", 4), ("7.2", 3)):
        ledger.answered(episode, tokens, 1.0)
    ledger.hold(7, {0: "7.0", 2: "7.2"})
    group = grouped(trajectory((0, 0, 0)), trajectory((0, 0)), number=7, episode_indices=(0, 2))
    ledger.trained(group, is_trained)
    told = ledger.counted().fates
    assert {fate: (tally.tokens, tally.episodes) for fate, tally in told.items()} == expected
    assert (ledger.received, ledger.unknown) == (7, 0)
    ledger.replayed(group, is_trained)
    assert ledger.trained_again == expected.get("trained", (0, 0))[0]


def test_a_token_that_is_trained_in_two_trajectories_is_counted_once() -> None:
    ledger = TokenLedger()
    ledger.answered("0.0", 3, 1.0)
    ledger.hold(0, {0: "0.0"})
    ledger.trained(grouped(trajectory((0, 0, 0)), trajectory((0, 0)), episode_indices=(0, 0)))
    ledger.replayed(grouped(trajectory((0, 0, 0))))
    assert (fates(ledger), ledger.unknown, ledger.trained_again) == ({"trained": 3}, 2, 3)


def test_a_fate_knows_its_cost_and_the_length_of_its_episodes() -> None:
    ledger = TokenLedger()
    for tokens, server_s in ((5, 1.0), (3, 0.6)):
        ledger.answered("0.0", tokens, server_s)
    ledger.hold(0, {0: "0.0"})
    ledger.trained(grouped(trajectory((0,) * 6)))
    ledger.answered("1.0", 0, 0.5)
    ledger.settle("1.0", Fate.FAILED)
    told = ledger.counted().fates
    assert (told["trained"].tokens, told["trained"].episodes, told["trained"].by_length) == (6, 1, {"4": 6})
    assert told["trained"].server_s == pytest.approx(1.2)
    assert (told["masked"].tokens, told["masked"].episodes, told["masked"].by_length) == (2, 0, {"4": 2})
    assert told["masked"].server_s == pytest.approx(0.4)
    assert (told["failed"].tokens, told["failed"].episodes, told["failed"].server_s) == (0, 1, 0.5)


def test_a_checkpoint_of_a_version_without_a_ledger_is_continued() -> None:
    ledger = TokenLedger()
    ledger.trained(grouped(trajectory((0, 0)), number=3))
    assert ledger.counted().fates == {}
