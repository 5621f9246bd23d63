"""Episodes behind one server: each has its URL and its key, for as long as its block lasts, and its roles."""

import asyncio
import json

import openai
import pytest
from programs import ASK, Gated, client_of, opened, post, saying
from workflow.scripted_answers import TOKENIZER, decode, replying

from arl.api.errors import ArlError, TrajectoryError
from arl.endpoint.proxy import OpenAIProxy
from arl.endpoint.session import CallCounts, EpisodeSession


async def status_of(url: str, headers: dict[str, str]) -> int:
    status, answer = await post(url, json.dumps({"model": "m", "messages": ASK}).encode(), headers)
    assert status == 200 or answer["error"]["message"]
    return status


async def test_its_own_key_alone_opens_an_episode_as_either_sdk_sends_it_and_while_it_lasts() -> None:
    engine = saying("a")
    async with OpenAIProxy(TOKENIZER) as proxy:
        async with proxy.episode(engine) as mine, proxy.episode(engine) as theirs:
            url = f"{mine.base_url}/chat/completions"
            bearers = ("Bearer ", "Bearer arl-wrong", "Bearer clé", "Basic YTpi", f"Bearer {theirs.api_key}")
            for headers in ({}, {"x-api-key": "arl-wrong"}, *({"Authorization": bearer} for bearer in bearers)):
                for path in (url, f"{mine.base_url}/no/such/path", f"{mine.url}x/v1/chat/completions"):
                    assert await status_of(path, headers) == 401
            assert (engine.requests, mine.counts, theirs.counts) == ([], CallCounts(), CallCounts())
            right = ({"authorization": f"bearer {mine.api_key}"}, {"x-api-key": mine.api_key})
            assert [await status_of(url, headers) for headers in right] == [200, 200]
        assert [await status_of(url, headers) for headers in right] == [401, 401]
        assert len(mine.trajectories(1.0)) == len(engine.requests) == 2, "what was said is there still"


async def test_the_end_of_an_episode_ends_its_calls() -> None:
    model = Gated()

    async def ask(session: EpisodeSession, stream: bool) -> None:
        async with client_of(session) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model="m", messages=ASK, stream=stream)

    async with OpenAIProxy(TOKENIZER) as proxy, asyncio.TaskGroup() as group:
        async with proxy.episode(model.engine) as session:
            group.create_task(ask(session, stream=False))
            group.create_task(ask(session, stream=True))
            await model.began.acquire()
            await model.began.acquire()
        assert not model.cancelled.locked()
        assert (session.counts.cancelled, session.turns()) == (2, ())


async def test_episodes_at_the_same_time_are_kept_apart() -> None:
    engine = replying(lambda said: said.removeprefix("user\n").upper())

    async def run(proxy: OpenAIProxy, name: str) -> str:
        async with proxy.episode(engine) as session, client_of(session) as client:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": name}])
            (made,) = session.trajectories(1.0)
            return decode(made.token_ids)

    names = [f"episode {i}" for i in range(20)]
    async with OpenAIProxy(TOKENIZER) as proxy, asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(proxy, name)) for name in names]
    assert len({request.session_id for request in engine.requests}) == 20, "a server for each episode"
    for task, name in zip(tasks, names, strict=True):
        assert task.result().endswith(f"{name}<|im_end|>\n<|im_start|>assistant\n{name.upper()}<|im_end|>")


async def test_agents_with_roles_make_trajectories_of_their_own() -> None:
    engine = saying("a")
    async with opened(engine) as episode:
        for role in ("solver", "checker", "solver"):
            async with client_of(episode.session, base_url=episode.session.base_url_of(role)) as client:
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": role}])
        made = episode.session.trajectories({"solver": 1.0, "checker": 0.5}, {"rounds": 2})
        with pytest.raises(TrajectoryError, match="the role 'solver' has no reward; there are rewards for checker"):
            episode.session.trajectories({"checker": 0.5})
    told = [(trajectory.role, trajectory.reward, trajectory.metrics.get("rounds")) for trajectory in made]
    assert told == [("solver", 1.0, 2), ("solver", 1.0, None), ("checker", 0.5, None)]
    assert [request.role for request in engine.requests] == ["solver", "checker", "solver"]


@pytest.mark.parametrize("role", ["v1", "a/b", "", "a b", "ä"])
async def test_a_role_that_no_path_can_have_is_refused(role: str) -> None:
    async with opened(saying("a")) as episode:
        with pytest.raises(ValueError, match="role"):
            episode.session.base_url_of(role)


@pytest.mark.parametrize("path", ["v1/images/generations", "v1/chat/completions/1", "a%20b/v1/chat/completions", ""])
async def test_an_unknown_path_is_answered_with_404_and_what_there_is(path: str) -> None:
    async with opened(saying("a")) as episode:
        headers = {"Authorization": f"Bearer {episode.session.api_key}"}
        url = f"{episode.session.url}/{path}"
        status, answer = await post(url, b"", headers)
    assert (status, answer["error"]["code"]) == (404, "not_found")
    assert "POST /v1/chat/completions" in answer["error"]["message"]


async def test_a_program_that_calls_nothing_has_nothing_to_train_on() -> None:
    async with opened(saying("a")) as episode:
        with pytest.raises(TrajectoryError, match="made no call that reached"):
            episode.session.trajectories(1.0)
        with pytest.raises(openai.BadRequestError):
            await episode.ask(logit_bias={"1": 1})
        with pytest.raises(TrajectoryError, match="no call of the program was answered: 1 were refused"):
            episode.session.trajectories(1.0)


async def test_parallel_agents_of_one_role_do_not_mix() -> None:
    """Two sub-agents with prompts of their own, by turns."""
    engine = replying(str.upper)
    async with opened(engine) as episode:

        async def converse(topic: str) -> None:
            messages = [{"role": "user", "content": topic}]
            for _ in range(3):
                answer = (await episode.ask(messages)).choices[0].message.content
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"{topic}?"}]

        async with asyncio.TaskGroup() as group:
            group.create_task(converse("cats"))
            group.create_task(converse("dogs"))
        made = episode.session.trajectories(1.0)
    assert len({request.session_id for request in engine.requests}) == 1
    texts = [decode(trajectory.token_ids) for trajectory in made]
    assert [len(trajectory.turns) for trajectory in made] == [3, 3]
    assert [("cats" in text, "dogs" in text) for text in sorted(texts)] == [(True, False), (False, True)]


async def test_a_proxy_is_open_while_anybody_uses_it_and_opens_again() -> None:
    proxy = OpenAIProxy(TOKENIZER)
    with pytest.raises(ArlError, match="async with"):
        async with proxy.episode(saying("a")):
            pass
    for _ in range(2):
        async with proxy:
            async with proxy:
                pass
            async with proxy.episode(saying("a")) as session, client_of(session) as client:
                await client.chat.completions.create(model="m", messages=ASK)
