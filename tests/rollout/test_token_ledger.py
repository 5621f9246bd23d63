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


def test_the_sum_closes_over_random_events() -> None:
    """Answers, requests without one, ends, groups, training, checkpoints and kills."""
    chance, ledger, unreceived = random.Random(1), TokenLedger(), 0
    open_: dict[str, int] = {}
    groups: dict[int, list[int]] = {}
    saved: tuple[object, set[int]] = as_json(ledger.state_dict()), set()
    for number in range(100_000):
        kind = chance.random()
        if kind > 0.9999:
            told, ledger, kept = ledger.counted(), TokenLedger(), {g for g in saved[1] if chance.random() < 0.8}
            ledger.load_state_dict(saved[0], kept)
            ledger.note_undone(told)
            open_, groups = {}, {g: own for g, own in groups.items() if g in kept}
            saved = as_json(ledger.state_dict()), {*groups}
        elif kind > 0.999:
            saved = as_json(ledger.state_dict()), {*groups}
        elif kind > 0.9 and groups:
            group = chance.choice([*groups])
            ledger.trained(TrainedGroup(group, [chance.randint(0, own) for own in groups.pop(group)]))
        elif kind > 0.85:
            ledger.unanswered(2)
            unreceived += 2
        elif len(open_) > 8 and kind < 0.1:
            chosen = chance.sample([*open_], 2)
            ledger.hold(number, dict(enumerate(chosen)))
            groups[number] = [open_.pop(episode) for episode in chosen]
        elif len(open_) > 8 and kind < 0.3:
            episode = chance.choice([*open_])
            ledger.settle(episode, chance.choice([Fate.FAILED, Fate.RETRIED, Fate.OVERTAKEN, Fate.REJECTED]))
            del open_[episode]
        else:
            episode, tokens = f"{number // 10}.{chance.randrange(4)}", chance.randrange(4)
            ledger.answered(episode, tokens, 0.25)
            open_[episode] = open_.get(episode, 0) + tokens
        if number % 100 == 0:
            assert closes(ledger)
            assert ledger.num_open == sum(open_.values())
    assert closes(ledger)
    assert len(fates(ledger)) == 8
    assert (ledger.unreceived, ledger.unknown) == (unreceived, 0)


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
    assert ledger.counted().fates[fate].tokens == pytest.approx(share * ledger.received, rel=0.15)
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
    assert controller.tokens.counted().fates[Fate.STOPPED].tokens > 0


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
