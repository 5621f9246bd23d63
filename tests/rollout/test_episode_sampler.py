"""How an episode's requests are sampled, where that is not the workflow's choice alone."""

import random
from dataclasses import replace
from typing import Any

import pytest
from players import TwoTurns, examples, trained
from virtual_time import run_in_virtual_time

from arl.api.engine import Sampler
from arl.api.scripted import ScriptedEngine
from arl.api.types import Example, ModelRequest, SamplingParams, Trajectory
from arl.api.workflow import RolloutWorkflow
from arl.rollout.controller import run_examples
from arl.rollout.episode import EpisodeRunner, EpisodeSampler


@pytest.mark.parametrize(
    ("asked_for", "changed"),
    [({"is_greedy": True}, {"temperature": 0.0}), ({"seed": "any"}, {}), ({}, {})],
    ids=["greedy", "seeds, and the workflow chose one", "nothing"],
)
async def test_a_request_is_changed_in_what_is_asked_for_alone(
    asked_for: dict[str, Any], changed: dict[str, Any]
) -> None:
    engine, wanted = ScriptedEngine(lambda _: [1]), SamplingParams(temperature=0.7, seed=5, stop=("x",))
    await EpisodeSampler(engine, **asked_for).agenerate(ModelRequest(input_ids=[7], sampling=wanted))
    assert [request.sampling for request in engine.requests] == [replace(wanted, **changed)]


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
    return [[t.token_ids for t in group.trajectories] for group in groups]


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
            seen.append(answer.token_ids)
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
