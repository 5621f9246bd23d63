"""Episodes behind one server: each has its URL and its key, for as long as its block lasts, and its roles."""

import asyncio
import json

import openai
import pytest
from programs import ASK, client_of, opened, post, replying, saying, shown
from workflow.scripted_answers import TOKENIZER, decode

from arl.api.errors import ArlError, TrajectoryError
from arl.api.scripted import ScriptedEngine
from arl.api.types import ModelRequest
from arl.workflow.proxy.openai_proxy import OpenAIProxy
from arl.workflow.proxy.session import CallCounts, EpisodeSession

BODY = {"model": "m", "messages": ASK}


async def status_of(url: str, headers: dict[str, str]) -> int:
    status, answer = await post(url, json.dumps(BODY).encode(), headers)
    assert status == 200 or answer["error"]["message"]
    return status


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer arl-wrong"},
        {"Authorization": "Bearer clé"},
        {"Authorization": "Basic YTpi"},
        {"x-api-key": "arl-wrong"},
    ],
)
async def test_a_missing_or_wrong_key_is_answered_with_401_and_touches_nothing(headers: dict[str, str]) -> None:
    engine = saying("never")
    async with opened(engine) as episode:
        assert await status_of(f"{episode.session.base_url}/chat/completions", headers) == 401
        assert await status_of(f"{episode.session.base_url}/no/such/path", headers) == 401
        assert await status_of(f"{episode.session.url}x/v1/chat/completions", headers) == 401
        assert (engine.requests, episode.session.counts) == ([], CallCounts())


async def test_a_key_is_taken_as_openai_or_as_anthropic_sends_it() -> None:
    async with opened(saying("a")) as episode:
        url, key = f"{episode.session.base_url}/chat/completions", episode.session.api_key
        assert await status_of(url, {"authorization": f"bearer {key}"}) == 200
        assert await status_of(url, {"x-api-key": key}) == 200


async def test_the_key_of_another_episode_opens_nothing() -> None:
    engine = saying("never")
    async with OpenAIProxy(TOKENIZER) as proxy, proxy.episode(engine) as mine, proxy.episode(engine) as theirs:
        assert mine.api_key != theirs.api_key
        async with client_of(mine, api_key=theirs.api_key) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model="m", messages=ASK)
        assert (engine.requests, mine.counts, theirs.counts) == ([], CallCounts(), CallCounts())


async def test_a_key_expires_with_its_episode() -> None:
    engine = saying("a")
    async with OpenAIProxy(TOKENIZER) as proxy:
        async with proxy.episode(engine) as session, client_of(session) as client:
            await client.chat.completions.create(model="m", messages=ASK)
        async with client_of(session) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model="m", messages=ASK)
        assert len(engine.requests) == 1
        assert len(session.trajectories(1.0)) == 1, "what was said is there still"


async def test_the_end_of_an_episode_ends_its_calls() -> None:
    began, ended = asyncio.Semaphore(0), asyncio.Event()

    async def hang(request: ModelRequest) -> list[int]:
        began.release()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return []

    async def ask(session: EpisodeSession, stream: bool) -> None:
        async with client_of(session) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model="m", messages=ASK, stream=stream)

    async with OpenAIProxy(TOKENIZER) as proxy, asyncio.TaskGroup() as group:
        async with proxy.episode(ScriptedEngine(hang)) as session:
            group.create_task(ask(session, stream=False))
            group.create_task(ask(session, stream=True))
            await began.acquire()
            await began.acquire()
        assert ended.is_set()
        assert (session.counts.cancelled, session.turns()) == (2, ())


async def test_episodes_at_the_same_time_are_kept_apart() -> None:
    engine = replying(lambda text: text.split("user\n")[1].split("<|im_end|>")[0].upper())

    async def run(proxy: OpenAIProxy, name: str) -> str:
        async with proxy.episode(engine) as session, client_of(session) as client:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": name}])
            (made,) = session.trajectories(1.0)
            return decode(made.token_ids)

    names = [f"episode {i}" for i in range(20)]
    async with OpenAIProxy(TOKENIZER) as proxy, asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(proxy, name)) for name in names]
    for task, name in zip(tasks, names, strict=True):
        assert task.result().endswith(f"{name}<|im_end|>\n<|im_start|>assistant\n{name.upper()}<|im_end|>")


async def test_agents_with_roles_make_trajectories_of_their_own() -> None:
    async with opened(saying("a")) as episode:
        for role in ("solver", "checker", "solver"):
            async with client_of(episode.session, base_url=episode.session.base_url_of(role)) as client:
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": role}])
        made = episode.session.trajectories({"solver": 1.0, "checker": 0.5}, {"rounds": 2})
        with pytest.raises(TrajectoryError, match="the role 'solver' has no reward; there are rewards for checker"):
            episode.session.trajectories({"checker": 0.5})
    assert [(trajectory.role, trajectory.reward) for trajectory in made] == [
        ("solver", 1.0),
        ("solver", 1.0),
        ("checker", 0.5),
    ]
    assert [trajectory.metrics.get("rounds") for trajectory in made] == [2, None, None]


@pytest.mark.parametrize("role", ["v1", "a/b", "", "a b", "ä"])
async def test_a_role_that_no_path_can_have_is_refused(role: str) -> None:
    async with opened(saying("a")) as episode:
        with pytest.raises(ValueError, match="role"):
            episode.session.base_url_of(role)


@pytest.mark.parametrize("path", ["v1/embeddings", "v1/chat/completions/1", "a%20b/v1/chat/completions", ""])
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
    engine = replying(lambda text: f"I was shown {text.count('user')} questions.")
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


async def test_the_turns_of_an_episode_ask_for_one_server() -> None:
    engine = saying("a")
    async with opened(engine) as one, opened(engine) as other:
        for episode in (one, one, other):
            await episode.ask()
    sessions = [request.session_id for request in engine.requests]
    assert sessions[0] == sessions[1] != sessions[2]
    assert shown(engine.requests[0]) == shown(engine.requests[2])
