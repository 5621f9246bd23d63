"""One episode: time limit, retries, malformed returns, who is to blame, and how its requests are sampled."""

import asyncio
import gc
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import ref

import numpy as np
import pytest
from players import Scripted, TwoTurns, engine_with_latency, examples, trained
from records import trajectory
from virtual_time import run_in_virtual_time

from arl.api.engine import Sampler
from arl.api.errors import ArlError, RoleError, TrajectoryError, first_error
from arl.api.fakes import ScriptedEngine
from arl.api.grammar import Grammar
from arl.api.images import Image, PlacedImage
from arl.api.routed_experts import Routes
from arl.api.sampling_mask import KeptIds
from arl.api.settings.engines import PolicyRoles
from arl.api.train_engine import ModelLimits
from arl.api.types import Example, ModelRequest, ModelResponse, SamplingParams, Trajectory
from arl.api.workflow import RolloutWorkflow
from arl.rollout.controller import run_examples
from arl.rollout.episode import Episode, EpisodeRunner, TrainedPolicies
from arl.rollout.episode_events import FailureLog
from arl.runtime.clocks import off_the_clock

ONE = trajectory((0,), reward=1.0)


def episode(
    act: object, *, timeout_s: float = 10.0, retries: int = 0, oldest_allowed: int = 0, **bounds: object
) -> Episode:
    runner = EpisodeRunner(workflow=Scripted(act), timeout_s=timeout_s, retries=retries, **bounds)
    running = runner.run(engine_with_latency(), {"number": 0}, name="the episode", oldest_allowed=oldest_allowed)
    return run_in_virtual_time(running)


def fails(times: int) -> object:
    """An act that raises so many times and then returns a trajectory."""
    failures = iter(range(times))

    def act(_: int) -> object:
        if next(failures, None) is not None:
            raise ValueError("bad luck")
        return ONE

    return act


def test_one_trajectory_or_several_are_kept_in_order_and_a_role_that_branched_counts_once_in_the_reward() -> None:
    other, critic = trajectory((0, 0), reward=3.0), replace(ONE, role="critic", reward=0.0)
    assert episode(lambda _: ONE).trajectories == (ONE,)
    assert episode(lambda _: [other, ONE]).trajectories == (other, ONE)
    assert episode(lambda _: [other, ONE]).reward == 2.0
    assert episode(lambda _: [critic, critic, critic, ONE]).reward == 0.5


def test_none_rejects_the_episode_and_is_no_error() -> None:
    ended = episode(lambda _: None, retries=3)
    assert ended.is_rejected
    assert (ended.error, ended.attempts, ended.reward) == (None, 1, 0.0)


class Noted(FailureLog):
    """Keeps what is told to it."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def note(self, error: Exception, which: str, what_next: str) -> None:
        self.lines.append(f"{which} failed with {error!r}; {what_next}")


@pytest.mark.parametrize(("failures", "is_finished"), [(2, True), (3, False)])
def test_a_failed_episode_is_run_again_until_its_retries_end_and_each_failure_is_noted_once(
    failures: int, is_finished: bool
) -> None:
    ended = episode(fails(failures), retries=2, failures=(noted := Noted()))
    assert (ended.is_finished, ended.is_rejected, ended.attempts) == (is_finished, False, 3)
    assert noted.lines == [
        f"the episode (attempt {attempt} of 3) failed with ValueError('bad luck'); {then}"
        for attempt, then in [(1, "it runs again"), (2, "it runs again"), (3, "it does not run again")][:failures]
    ]


async def slow_failure() -> None:
    await asyncio.sleep(3)
    raise ValueError


async def stubborn() -> object:
    try:
        await asyncio.sleep(100)
    except asyncio.CancelledError:
        return ONE


async def impatient() -> None:
    async with asyncio.timeout(1):
        await asyncio.sleep(2)


async def awaits_a_cancelled_task() -> None:
    task = asyncio.ensure_future(asyncio.sleep(1))
    task.cancel()
    await task


TIMED_OUT = "EpisodeTimeoutError: Scripted took longer than rollout.episode_timeout_s=5"


@pytest.mark.parametrize(
    ("act", "retries", "said", "attempts", "elapsed_s"),
    [
        (asyncio.Event().wait, 3, TIMED_OUT, 1, 5.0),
        (slow_failure, 9, TIMED_OUT, 2, 5.0),
        (stubborn, 9, TIMED_OUT, 1, 5.0),
        (impatient, 0, "TimeoutError: ", 1, 1.0),
        (awaits_a_cancelled_task, 0, "RuntimeError: arun_episode raised CancelledError, but nobody cancelled it", 1, 0),
    ],
    ids=["hangs", "retries count", "swallows its cancellation", "its own limit", "its own cancellation"],
)
def test_a_time_limit_ends_an_episode_and_all_else_is_the_workflows_own_error(
    act: Callable[[], object], retries: int, said: str, attempts: int, elapsed_s: float
) -> None:
    ended = episode(lambda _: act(), timeout_s=5, retries=retries)
    assert f"{type(ended.error).__name__}: {ended.error}" == said
    assert (ended.attempts, ended.elapsed_s) == (attempts, elapsed_s)


def test_time_in_which_an_episode_waits_for_a_place_does_not_count() -> None:
    async def waits(*, works_s: float, fails: bool = False) -> object:
        with off_the_clock():
            await asyncio.sleep(100)
        await asyncio.sleep(works_s)
        if fails:
            raise ValueError("bad luck")
        return ONE

    ended = episode(lambda _: waits(works_s=4), timeout_s=5)
    assert (ended.trajectories, ended.elapsed_s) == ((ONE,), 104.0)
    assert str(episode(lambda _: waits(works_s=6), timeout_s=5).error) == TIMED_OUT.partition(": ")[2]
    acts = iter((waits(works_s=2, fails=True), waits(works_s=2, fails=True), waits(works_s=2)))
    ended = episode(lambda _: next(acts), timeout_s=5, retries=2)
    assert (str(ended.error), ended.attempts, ended.elapsed_s) == (TIMED_OUT.partition(": ")[2], 3, 305.0)


@pytest.mark.parametrize("cleanup_fails", [False, True])
async def test_a_cancellation_from_outside_passes_and_runs_nothing_again(cleanup_fails: bool) -> None:
    runs: list[int] = []

    async def waits() -> None:
        runs.append(1)
        try:
            await asyncio.sleep(9)
        finally:
            if cleanup_fails:
                raise ConnectionError("the sandbox is gone")

    runner = EpisodeRunner(workflow=Scripted(lambda _: waits()), timeout_s=99, retries=1)
    task = asyncio.ensure_future(runner.run(engine_with_latency(), {"number": 0}, name="the episode"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert runs == [1]


async def test_what_a_cancelled_episode_held_is_freed_without_the_garbage_collector() -> None:
    class Held(dict[str, int]):
        """An example that can be watched."""

    example = Held(number=0)
    watched = ref(example)
    runner = EpisodeRunner(workflow=Scripted(lambda _: asyncio.sleep(9)), timeout_s=99)
    task = asyncio.ensure_future(runner.run(engine_with_latency(), example, name="the episode"))
    await asyncio.sleep(0)
    gc.disable()
    try:
        task.cancel()
        await asyncio.wait([task])
        del task, example
        assert watched() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        ({"input_ids": [1]}, "returned a dict;"),
        (1.0, "returned a float;"),
        ("text", "returned a str;"),
        ([], "returned an empty sequence; return a Trajectory, several, or None to reject"),
        ([ONE, None], "returned a sequence with a NoneType;"),
        (trajectory((2, 3)), "a token of version 2, but its group was admitted at version 3"),
    ],
)
def test_a_malformed_return_is_a_failure_that_says_what_is_wrong(returned: object, named: str) -> None:
    error = episode(lambda _: returned, oldest_allowed=3).error
    assert isinstance(error, TrajectoryError)
    assert named in str(error)


class Exit(BaseException):
    """As the panics of libraries in Rust, and test frameworks' own endings."""


@pytest.mark.parametrize("raised", [SystemExit(3), Exit("panicked")], ids=repr)
def test_what_is_no_exception_in_a_workflow_is_its_failure_too(raised: BaseException) -> None:
    def act(_: int) -> None:
        raise raised

    ended = episode(act, retries=1)
    assert (str(ended.error), ended.attempts) == (f"arun_episode raised {raised!r}", 2)


def test_a_keyboard_interrupt_ends_the_run_without_stopping_the_event_loop() -> None:
    def act(number: int) -> object:
        if number == 3:
            raise KeyboardInterrupt
        return ONE

    with pytest.raises(ExceptionGroup) as ended:
        trained(Scripted(act), num_versions=9, shuffle=False)
    assert isinstance(error := first_error(ended.value), ArlError)
    assert str(error) == "Scripted raised KeyboardInterrupt: the run ends"


@pytest.mark.parametrize("raised", [SystemExit(1), KeyboardInterrupt()], ids=repr)
def test_a_filter_that_exits_ends_the_run_with_its_name(raised: BaseException) -> None:
    def keep(_: object) -> bool:
        raise raised

    with pytest.raises(ExceptionGroup) as ended:
        trained(Scripted(lambda _: ONE), keep=keep)
    assert str(first_error(ended.value)) == f"the filter given as keep raised {raised!r}"


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (trajectory((4, 999)), "arun_episode returned a token of version 999, but the newest weights are of version 4"),
        (
            replace(ONE, token_ids=(1, 200)),
            "arun_episode returned a trajectory with token_ids[1] = 200, but the model has 100 tokens (0 to 99)",
        ),
        (
            trajectory((4,) * 20),
            "arun_episode returned a trajectory with 21 tokens up to the last trained one, but the model has room",
        ),
    ],
    ids=["a version from the future", "a token beyond the vocabulary", "more tokens than the context"],
)
def test_what_the_model_cannot_have_seen_or_sampled_fails_the_episode(made: Trajectory, said: str) -> None:
    limits = ModelLimits(vocab_size=100, context_length=9)
    newest = iter([3, 4])
    ended = episode(lambda _: (ONE, made), limits=limits, newest_version=lambda: next(newest), retries=1)
    assert isinstance(ended.error, TrajectoryError)
    assert str(ended.error).startswith(said)
    fits = replace(made, loss_mask=(0,) * len(made.loss_mask), token_ids=(1,) * len(made.token_ids))
    assert episode(lambda _: fits, limits=limits, newest_version=lambda: 4).is_finished, "untrained"


def seeded_tokens(request: ModelRequest) -> list[int]:
    """Three tokens that are a function of the request's seed, which every server takes."""
    seed = request.sampling.seed
    assert seed is not None
    assert 0 <= seed < 2**31
    return random.Random(seed).choices(range(1000), k=3)


def tokens_of(seed: int, workflow: RolloutWorkflow | None = None, **settings: object) -> list[list[tuple[int, ...]]]:
    """What a run's first batch was trained on, group by group, with requests seeded."""
    engine, sizes = ScriptedEngine(seeded_tokens), {"batch_size": 4, "group_size": 3, "shuffle": False}
    groups, _ = trained(workflow or TwoTurns(), 1, 9, engine=engine, seed=seed, seed_requests=True, **sizes, **settings)
    return [[tuple(t.token_ids) for t in group.trajectories] for group in groups]


def test_seeded_requests_make_the_same_run_again_whatever_the_schedule_and_no_two_turns_sample_alike() -> None:
    tokens = tokens_of(5, max_concurrent_episodes=1)
    assert tokens == tokens_of(5, max_concurrent_episodes=30) != tokens_of(6)
    said = [ids[i : i + 3] for group in tokens for ids in group for i in (2, 5)]
    assert len(said) == len(set(said)) == 4 * 3 * 2


def test_a_retry_samples_anew_from_an_engine_that_can_do_nothing_else() -> None:
    seen: list[tuple[int, ...]] = []

    class FailingOnce(RolloutWorkflow):
        async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory | None:
            assert [name for name in dir(engine) if not name.startswith("_")] == ["agenerate"]
            answer = await TwoTurns().arun_episode(engine, data)
            assert answer is not None
            seen.append(tuple(answer.token_ids))
            if len(seen) == 1:
                raise RuntimeError("once")
            return answer

    tokens_of(5, workflow=FailingOnce(), episode_retries=1, max_concurrent_episodes=1)
    assert seen[0] != seen[1]


def test_evaluations_ask_for_the_same_tokens_each_time() -> None:
    def evaluated(seed: int | None) -> list[int | None]:
        engine, runner = ScriptedEngine(lambda _: [1]), EpisodeRunner(workflow=TwoTurns(), timeout_s=9)
        run_in_virtual_time(run_examples(engine, runner, examples(2), max_concurrent=1, seed=seed))
        return [request.sampling.seed for request in engine.requests]

    assert evaluated(1) == evaluated(1) != evaluated(2)
    assert len(set(evaluated(1))) == 4
    assert evaluated(None) == [None] * 4


LETTERS = Grammar(kind="regex", text="[ab]+")
IN_LETTERS = SamplingParams(grammar=LETTERS)
FREE = ModelResponse(output_ids=(5, 6), output_logprobs=(-1.0, -2.0), output_versions=(0, 0), stop_reason="stop")
CONSTRAINED = replace(FREE, output_logprobs=(-0.5, -0.25), kept_ids=KeptIds.of([[5, 8], [6, 9]]))


class ByHand(RolloutWorkflow):
    """Two responses, one of them under a grammar, made into a trajectory by hand."""

    def __init__(self, kept_ids: KeptIds | None, mask: tuple[int, ...] = (0, 1, 1, 0, 1, 1)) -> None:
        self.kept_ids = kept_ids
        self.mask = mask
        self.routes: Routes | None = None

    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory:
        free = await engine.agenerate(ModelRequest(input_ids=(1,)))
        constrained = await engine.agenerate(ModelRequest(input_ids=(1, 5, 6, 2), sampling=IN_LETTERS))
        return Trajectory(
            token_ids=(1, *free.output_ids, 2, *constrained.output_ids),
            loss_mask=self.mask,
            behavior_logprobs=(0.0, *free.output_logprobs, 0.0, *constrained.output_logprobs),
            versions=(-1, 0, 0, -1, 0, 0),
            reward=1.0,
            kept_ids=self.kept_ids,
            routes=self.routes,
        )


def by_hand(workflow: RolloutWorkflow, constrained: ModelResponse = CONSTRAINED) -> Episode:
    engine = ScriptedEngine(lambda request: constrained if request.sampling.grammar else FREE)
    runner = EpisodeRunner(workflow=workflow, timeout_s=10.0)
    return run_in_virtual_time(runner.run(engine, {}, name="the episode"))


def test_a_response_under_a_grammar_is_not_trained_without_its_kept_ids() -> None:
    assert CONSTRAINED.kept_ids is not None
    whole = KeptIds.joined([4, CONSTRAINED.kept_ids])
    half = KeptIds.of([None] * 5 + [[6, 9]])
    assert by_hand(ByHand(whole)).is_finished
    assert by_hand(ByHand(None, mask=(0, 1, 1, 0, 0, 0))).is_finished, "it is seen, and not trained"
    for flawed in (ByHand(None), ByHand(half), ByHand(None, mask=(0, 0, 0, 0, 0, 1))):
        error = by_hand(flawed).error
        assert isinstance(error, TrajectoryError)
        assert "tokens from 4 on were sampled under a grammar, top_p, top_k or min_p, but without" in str(error)


PHOTO = PlacedImage(image=Image.kept(b"\x89PNG", 4, 2), start=1, stop=3)
LATER = replace(PHOTO, start=4, stop=6)


class Photographed(RolloutWorkflow):
    """One response to a prompt with an image, made into a trajectory by hand, whose prompt may begin later."""

    def __init__(self, *images: PlacedImage, offset: int = 0, mask: tuple[int, int] = (1, 1), start: int = 1) -> None:
        self.images, self.offset, self.mask, self.start = images, offset, mask, start

    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory:
        response = await engine.agenerate(ModelRequest(input_ids=(self.start, 9, 9, 2), images=(PHOTO,)))
        given = 4 + self.offset
        return Trajectory(
            token_ids=(*[7] * self.offset, 1, 9, 9, 2, *response.output_ids),
            loss_mask=(*[0] * given, *self.mask),
            behavior_logprobs=(*[0.0] * given, *response.output_logprobs),
            versions=(*[-1] * given, 0, 0),
            reward=1.0,
            images=self.images,
        )


def test_a_response_to_images_is_not_trained_without_them() -> None:
    """Nor with others, nor with the same elsewhere: the trainer would see another prompt than the sampler."""
    other = replace(PHOTO, image=Image.kept(b"\x89PNG2", 4, 2))
    for right in (Photographed(PHOTO), Photographed(LATER, offset=3), Photographed(mask=(0, 0)), Photographed(start=8)):
        assert by_hand(right).is_finished
    elsewhere = (Photographed(PHOTO, offset=3), Photographed(replace(PHOTO, stop=2)))
    for flawed in (Photographed(), Photographed(other), *elsewhere, Photographed(mask=(0, 1))):
        error = by_hand(flawed).error
        assert isinstance(error, TrajectoryError)
        assert "were sampled with images in view, but without all of these in their places" in str(error)


def test_responses_with_routes_are_not_trained_without_them() -> None:
    """Of a mixture of experts, a trajectory made by hand needs them too."""
    routes = Routes.of(np.zeros((6, 2, 1), np.uint8))
    routed = replace(CONSTRAINED, routes=routes)
    whole = ByHand(KeptIds.joined([4, CONSTRAINED.kept_ids]))
    assert "without the routes of its responses" in str(by_hand(whole, routed).error)
    whole.routes = routes
    assert by_hand(whole, routed).is_finished


def test_an_engine_that_answers_under_a_grammar_must_say_among_which_ids() -> None:
    silent = replace(CONSTRAINED, kept_ids=None)
    assert "its response has no kept_ids" in str(by_hand(ByHand(None), silent).error)
    engine = ScriptedEngine(lambda request: [5, 6])
    runner = EpisodeRunner(workflow=ByHand(None), timeout_s=10.0)
    assert run_in_virtual_time(runner.run(engine, {}, name="the episode")).is_finished, "it plays the whole vocabulary"


POLICIES = TrainedPolicies(
    roles=PolicyRoles({"author": "writer", "editor": "writer", "critic": "reader"}),
    limits={"writer": ModelLimits(vocab_size=2), "reader": ModelLimits(vocab_size=10)},
)


class Asks(RolloutWorkflow):
    """Asks in some roles, and returns these trajectories."""

    def __init__(self, asked: tuple[str, ...], *made: Trajectory) -> None:
        self.asked, self.made, self.num_runs = asked, made, 0

    async def arun_episode(self, engine: Sampler, data: Example) -> Any:
        self.num_runs += 1
        for role in self.asked:
            await engine.agenerate(ModelRequest(input_ids=[1], role=role))
        return self.made


async def run(workflow: Asks) -> Episode:
    runner = EpisodeRunner(workflow=workflow, timeout_s=5, retries=1, policies=POLICIES)
    return await runner.run(ScriptedEngine(lambda _: [1]), {}, name="an episode")


async def test_roles_of_one_policy_may_share_trajectories() -> None:
    made = trajectory(role="author")
    assert (await run(Asks(("editor",), made))).trajectories == (made,)


async def test_tokens_that_another_policy_sampled_end_the_run_and_name_both_roles() -> None:
    workflow = Asks(("author",), trajectory(role="critic"))
    with pytest.raises(RoleError, match=r"role 'critic', but asked for author alone: the policy reader would be"):
        await run(workflow)
    assert workflow.num_runs == 1, "another try would not mend the settings"


async def test_a_role_of_no_policy_ends_the_run() -> None:
    with pytest.raises(RoleError, match="no policy plays the role 'judge'"):
        await run(Asks(("author",), trajectory(role="judge")))


async def test_tokens_that_are_not_trained_may_be_of_any_policy() -> None:
    seen = trajectory(role="critic", loss_mask=(0, 0, 0))
    assert (await run(Asks(("author",), seen, trajectory(role="author")))).trajectories[0] == seen


async def test_each_policys_trajectories_have_the_limits_of_its_model() -> None:
    long = {"token_ids": (1, 5, 5)}
    assert (await run(Asks(("critic",), trajectory(role="critic", **long)))).error is None
    error = (await run(Asks(("author",), trajectory(role="author", **long)))).error
    assert isinstance(error, TrajectoryError)
    assert "the model has 2 tokens" in str(error)
