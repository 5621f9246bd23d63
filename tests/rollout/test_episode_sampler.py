"""How an episode's requests are sampled, where that is not the workflow's choice alone."""

import random
from collections.abc import Sequence

from players import TwoTurns, examples, trained
from virtual_time import run_in_virtual_time

from arl.api.engine import Sampler
from arl.api.scripted import ScriptedEngine
from arl.api.types import Example, ModelRequest, ModelResponse, SamplingParams, Trajectory
from arl.api.workflow import RolloutWorkflow
from arl.rollout.controller import run_examples
from arl.rollout.episode import EpisodeRunner, EpisodeSampler


def noting(asked: list[SamplingParams]) -> ScriptedEngine:
    def answer(request: ModelRequest) -> Sequence[int]:
        asked.append(request.sampling)
        return [1]

    return ScriptedEngine(answer)


def request(**sampling: object) -> ModelRequest:
    return ModelRequest(input_ids=[7], sampling=SamplingParams(**sampling))


async def test_greedy_requests_differ_in_their_temperature_alone() -> None:
    asked: list[SamplingParams] = []
    response = await EpisodeSampler(noting(asked), is_greedy=True).agenerate(
        request(temperature=0.7, max_new_tokens=5, stop=("x",))
    )
    assert asked == [SamplingParams(temperature=0.0, max_new_tokens=5, stop=("x",))]
    assert response.temperature == 1.0  # what its logprobs are at, as trajectories need it


async def test_each_request_of_an_episode_has_its_own_seed_and_gets_it_again() -> None:
    first: list[SamplingParams] = []
    again: list[SamplingParams] = []
    other: list[SamplingParams] = []
    for asked, seed in ((first, "0-1-0"), (again, "0-1-0"), (other, "0-1-1")):
        engine = EpisodeSampler(noting(asked), seed=seed)
        for _ in range(3):
            await engine.agenerate(request(temperature=0.7))
    assert first == again
    assert len({sampling.seed for sampling in first + other}) == 6
    assert all(sampling.temperature == 0.7 for sampling in first)
    assert all(0 <= sampling.seed < 2**31 for sampling in first)


async def test_a_seed_that_the_workflow_chose_stays() -> None:
    asked: list[SamplingParams] = []
    await EpisodeSampler(noting(asked), seed="any").agenerate(request(seed=5))
    assert asked[0].seed == 5


def test_an_episode_can_only_sample_from_the_engine() -> None:
    given: list[object] = []

    class Noting(RolloutWorkflow):
        async def arun_episode(self, engine: Sampler, data: Example) -> None:
            given.append(engine)

    runner = EpisodeRunner(workflow=Noting(), timeout_s=9)
    run_in_virtual_time(run_examples(noting([]), runner, examples(1), max_concurrent=1))
    assert [name for name in dir(given[0]) if not name.startswith("_")] == ["agenerate"]


def seeded_tokens(request: ModelRequest) -> ModelResponse:
    """Three tokens that are a function of the request's seed."""
    assert request.sampling.seed is not None
    noise = random.Random(request.sampling.seed)
    return ModelResponse(
        output_ids=tuple(noise.randrange(1000) for _ in range(3)),
        output_logprobs=(-1.0,) * 3,
        output_versions=(0,) * 3,
        stop_reason="stop",
    )


def tokens_of(seed: int, workflow: RolloutWorkflow | None = None, **settings: object) -> list[list[tuple[int, ...]]]:
    """What a run's first batch was trained on, group by group, with requests seeded."""
    engine, sizes = ScriptedEngine(seeded_tokens), {"batch_size": 4, "group_size": 3, "shuffle": False}
    groups, _ = trained(workflow or TwoTurns(), 1, 9, engine=engine, seed=seed, seed_requests=True, **sizes, **settings)
    return [[t.token_ids for t in group.trajectories] for group in groups]


def test_seeded_requests_make_the_same_run_again_whatever_the_schedule() -> None:
    assert tokens_of(5, max_concurrent_episodes=1) == tokens_of(5, max_concurrent_episodes=30)
    assert tokens_of(5) != tokens_of(6)


def test_no_two_episodes_and_no_two_turns_sample_alike() -> None:
    said = [ids[i : i + 3] for group in tokens_of(5) for ids in group for i in (2, 5)]
    assert len(said) == len(set(said)) == 4 * 3 * 2


def test_a_retry_samples_anew() -> None:
    seen: list[tuple[int, ...]] = []

    class FailingOnce(RolloutWorkflow):
        async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory | None:
            answer = await TwoTurns().arun_episode(engine, data)
            assert answer is not None
            seen.append(answer.token_ids)
            if len(seen) == 1:
                raise RuntimeError("once")
            return answer

    tokens_of(5, workflow=FailingOnce(), episode_retries=1, max_concurrent_episodes=1)
    assert seen[0] != seen[1]


def test_evaluations_ask_for_the_same_tokens_each_time() -> None:
    def evaluated(seed: int | None) -> list[int | None]:
        asked: list[SamplingParams] = []
        rows = examples(2)
        runner = EpisodeRunner(workflow=TwoTurns(), timeout_s=9)
        run_in_virtual_time(run_examples(noting(asked), runner, rows, max_concurrent=2, seed=seed))
        return sorted(sampling.seed for sampling in asked) if seed is not None else [s.seed for s in asked]

    assert evaluated(1) == evaluated(1) != evaluated(2)
    assert len(set(evaluated(1))) == 4
    assert evaluated(None) == [None] * 4
