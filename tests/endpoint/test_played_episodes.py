"""Episodes that programs elsewhere play, in virtual time: whose time runs, and who loses an episode."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from programs import saying
from records import trajectory
from virtual_time import run_in_virtual_time

from arl.api.engine import Sampler
from arl.api.errors import ProgramError
from arl.api.types import Example, Trajectory
from arl.api.workflow import RolloutWorkflow
from arl.endpoint.served_workflow import PlayedEnd, PlayedEpisode, PlayedEpisodes
from arl.endpoint.session import EpisodeSession
from arl.rollout.episode import Episode, EpisodeRunner
from arl.runtime.http.bodies import RequestError

POLICY: Any = None
"""No call of these episodes reaches the model."""
DONE = PlayedEnd(reward=1.0)


class Played(RolloutWorkflow):
    """As ServedWorkflow, whose programs are coroutines of the test."""

    def __init__(self, lease_s: float) -> None:
        self.episodes = PlayedEpisodes()
        self._lease_s = lease_s
        self._names = itertools.count()

    async def arun_episode(self, engine: Sampler, data: Example) -> Sequence[Trajectory]:
        with self.episodes.following(data) as episode:
            episode.session = EpisodeSession(f"/e/{next(self._names)}", engine, POLICY)
            await self.episodes.offer(episode)
            end = await episode.end_within(self._lease_s)
            if end.error:
                raise ProgramError(end.error)
            episode.returned, episode.reward = [trajectory((0,), reward=1.0)], end.reward
            return episode.returned


def plays(program: Any, *, timeout_s: float = 100.0, lease_s: float = 1000.0, retries: int = 0) -> Episode:
    """The episode that `program`, which gets all episodes, plays."""

    async def main() -> Episode:
        workflow = Played(lease_s)
        runner = EpisodeRunner(workflow=workflow, timeout_s=timeout_s, retries=retries)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(runner.run(saying("a"), {}, name="the episode"))
            await program(workflow.episodes)
            return await running

    return run_in_virtual_time(main())


async def taken(episodes: PlayedEpisodes) -> PlayedEpisode:
    episode = await episodes.take(60.0)
    assert episode is not None
    episodes.sent(episode)
    return episode


async def gone(episodes: PlayedEpisodes, episode: PlayedEpisode) -> str:
    with pytest.raises(RequestError) as refused:
        await episodes.end(episode.id, DONE, b"")
    assert refused.value.status == 410
    return refused.value.message


def test_waiting_for_a_program_takes_none_of_an_episodes_time() -> None:
    async def program(episodes: PlayedEpisodes) -> None:
        await asyncio.sleep(5000)
        episode = await taken(episodes)
        assert episode.left_s == 100
        await asyncio.sleep(99)
        assert (await episodes.end(episode.id, DONE, b"")).state == "finished"

    assert plays(program).is_finished


def test_a_program_that_takes_too_long_has_lost_its_episode_for_good() -> None:
    async def program(episodes: PlayedEpisodes) -> None:
        episode = await taken(episodes)
        await asyncio.sleep(101)
        assert "it took longer than rollout.episode_timeout_s" in await gone(episodes, episode)
        assert episodes.counts["waiting"] == 0

    ended = plays(program, retries=3)
    assert (ended.attempts, "took longer than rollout.episode_timeout_s=100" in str(ended.error)) == (1, True)


def test_a_silent_program_loses_its_episode_to_another_which_has_the_time_that_is_left() -> None:
    async def program(episodes: PlayedEpisodes) -> None:
        dead = await taken(episodes)
        await asyncio.sleep(500)
        assert "gave no sign of life for endpoint.lease_s=30" in await gone(episodes, dead)
        episode = await taken(episodes)
        assert (episode.id != dead.id, episode.left_s) == (True, 70)
        await episodes.end(episode.id, DONE, b"")

    ended = plays(program, lease_s=30, retries=1)
    assert (ended.is_finished, ended.attempts) == (True, 2)


def test_a_call_that_runs_one_that_ends_and_a_question_are_signs_of_life() -> None:
    async def program(episodes: PlayedEpisodes) -> None:
        episode = await taken(episodes)
        await asyncio.sleep(29)
        async with episode.session.answering():
            await asyncio.sleep(300)
        await asyncio.sleep(29)
        assert episodes.running(episode.id) is episode
        await asyncio.sleep(29)
        assert (await episodes.end(episode.id, DONE, b"")).state == "finished"

    assert plays(program, timeout_s=1000, lease_s=30).is_finished


def test_an_episode_that_did_not_reach_its_program_is_offered_again_unless_it_has_ended() -> None:
    async def program(episodes: PlayedEpisodes) -> None:
        lost = await episodes.take(60.0)
        assert lost is not None
        episodes.give_back(lost)
        again = await episodes.take(0.0)
        assert again is lost, "no attempt was lost"
        assert (await episodes.end(lost.id, DONE, b"")).state == "finished"
        episodes.give_back(lost)
        assert await episodes.take(0.0) is None

    assert plays(program).attempts == 1


def test_a_program_that_gives_up_waiting_as_it_gets_an_episode_loses_none() -> None:
    async def program(episodes: PlayedEpisodes) -> None:
        first = await episodes.take(60.0)
        assert first is not None
        waiting = asyncio.ensure_future(episodes.take(60.0))
        await asyncio.sleep(0)
        assert episodes.counts["asking"] == 1
        episodes.give_back(first)
        waiting.cancel()  # it has been handed the episode, and has not seen it
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert await taken(episodes) is first
        assert (await episodes.end(first.id, DONE, b"")).state == "finished"

    assert plays(program).attempts == 1
