"""What goes wrong behind the endpoint, or before it: each a recorded outcome, an answer that says it, and no more."""

import asyncio
import json
import logging

import aiohttp
import openai
import pytest
from programs import ADD, ASK, Opened, opened, post, saying
from workflow.chat_templates import tokenizer_of
from workflow.scripted_answers import decode, ended

from arl.api.errors import EngineClosedError, PromptTooLongError, RequestTimeoutError, ServerError
from arl.api.scripted import ScriptedEngine
from arl.api.types import ModelRequest
from arl.web.server import EventStream
from arl.workflow.proxy import exchange
from arl.workflow.proxy import openai_proxy as server

BODY = json.dumps({"model": "m", "messages": ASK}).encode()
AGAIN = {"x-stainless-retry-count": "1"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (PromptTooLongError("9 tokens, and 8 fit"), 400, "context_length_exceeded"),
        (RequestTimeoutError("slow"), 504, "timeout"),
        (ServerError("all gone"), 503, "engine_unavailable"),
        (EngineClosedError("closed"), 503, "engine_unavailable"),
        (RuntimeError("a bug"), 500, "internal_error"),
    ],
)
async def test_the_program_gets_the_engines_error_and_its_sdk_does_not_retry(
    error: Exception, status: int, code: str, stream: bool
) -> None:
    engine = saying(error)
    async with opened(engine) as episode:
        with pytest.raises(openai.APIStatusError) as told:
            await episode.ask(stream=stream)
        assert (told.value.status_code, told.value.code) == (status, code)
        assert str(error) in told.value.message
        assert len(engine.requests) == 1, "the SDK would have called again"
        counts = episode.session.counts
        assert (counts.refused, counts.failed) == ((1, 0) if status == 400 else (0, 1))
        assert episode.session.errors == ([] if status == 400 else [error])
        assert episode.session.is_truncated == (code == "context_length_exceeded")
        assert episode.session.turns() == ()


async def test_a_bug_is_logged_with_its_traceback_once(caplog: pytest.LogCaptureFixture) -> None:
    async with opened(saying(RuntimeError("a bug"))) as episode:
        with pytest.raises(openai.InternalServerError):
            await episode.ask()
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.exc_info
    assert "a bug" in str(record.exc_info[1])


async def test_an_episode_goes_on_after_a_call_that_failed() -> None:
    async with opened(saying(ServerError("gone"), "back")) as episode:
        with pytest.raises(openai.InternalServerError):
            await episode.ask()
        await episode.ask()
        (made,) = episode.session.trajectories(1.0)
    assert (made.metrics["calls"], made.metrics["calls_failed"]) == (1, 1)


async def test_one_sample_that_fails_fails_the_call_and_nothing_is_kept() -> None:
    async with opened(saying("a", ServerError("gone"))) as episode:
        with pytest.raises(openai.InternalServerError, match="gone"):
            await episode.ask(n=3)
        assert episode.session.turns() == ()


async def test_tools_that_the_model_cannot_be_shown_are_refused() -> None:
    async with opened(saying("never"), tokenizer_of("chatml")) as episode:
        with pytest.raises(openai.BadRequestError, match="tool"):
            await episode.ask(tools=[ADD])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "?"}], "temperature": NaN}',
        b"[" * 100_000,
        b'{"messages": ' + b"[" * 100_000,
    ],
)
async def test_a_body_that_cannot_be_read_is_refused(body: bytes) -> None:
    engine = saying("never")
    async with opened(engine) as episode:
        status, answer = await sent(episode, body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert (engine.requests, episode.session.counts.refused) == ([], 1)


async def test_a_body_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MAX_BODY_BYTES", 1000)
    async with opened(saying("fine")) as episode:
        status, answer = await sent(episode, b" " * 1001)
        assert (status, answer["error"]["message"]) == (413, "the body is too large")
        assert (await episode.ask()).choices[0].message.content == "fine"


async def sent(episode: Opened, body: bytes, **headers: str) -> tuple[int, dict[str, dict[str, str]]]:
    headers["Authorization"] = f"Bearer {episode.session.api_key}"
    return await post(f"{episode.session.base_url}/chat/completions", body, headers)


class Gated:
    """An engine whose calls wait, and tell that they began and how they ended."""

    def __init__(self) -> None:
        self.began = asyncio.Semaphore(0)
        self.gate = asyncio.Event()
        self.cancelled = asyncio.Semaphore(0)
        self.engine = ScriptedEngine(self._answer)

    async def _answer(self, request: ModelRequest) -> list[int]:
        self.began.release()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.release()
            raise
        return ended("late")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_program_that_hangs_up_ends_its_call(stream: bool) -> None:
    gated = Gated()
    async with opened(gated.engine) as episode:
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(episode.ask(stream=stream))
            await gated.began.acquire()
            asking.cancel()
        await gated.cancelled.acquire()
        gated.gate.set()
        await episode.ask()
        counts = episode.session.counts
        assert (counts.cancelled, counts.answered, len(episode.session.turns())) == (1, 1, 1)


async def test_an_sdk_that_gives_up_waiting_and_calls_again_is_answered_once() -> None:
    gated = Gated()
    async with opened(gated.engine) as episode:
        client = episode.client.with_options(timeout=0.3, max_retries=20)
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(client.chat.completions.create(model="m", messages=ASK))
            await gated.cancelled.acquire()
            gated.gate.set()
        assert asking.result().choices[0].message.content == "late"
        counts = episode.session.counts
        assert (counts.repeated, counts.answered) == (0, 1)
        assert counts.cancelled >= 1
        assert len(episode.session.turns()) == 1


async def test_an_answer_that_an_sdk_asks_for_again_is_forgotten() -> None:
    async with opened(saying("lost", "read")) as episode:
        await sent(episode, BODY)
        await sent(episode, BODY, **AGAIN)
        (turn,) = episode.session.turns()
        (made,) = episode.session.trajectories(1.0)
    assert turn.text == "read"
    assert (made.metrics["calls"], made.metrics["calls_repeated"]) == (1, 1)


async def test_the_same_call_made_twice_without_a_repeat_is_two_branches() -> None:
    async with opened(saying("one", "two")) as episode:
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(episode.ask())
        assert sorted(turn.text for turn in episode.session.turns()) == ["one", "two"]


async def test_a_repeat_of_a_call_that_failed_forgets_no_other_answer() -> None:
    """Two agents made the same call; the one whose call failed makes it again."""
    async with opened(saying("a", ServerError("gone"), "a")) as episode:
        assert [(await sent(episode, BODY))[0] for _ in range(2)] == [200, 503]
        await sent(episode, BODY, **AGAIN)
        assert len(episode.session.turns()) == 2


async def test_an_answer_that_something_follows_is_not_forgotten() -> None:
    async with opened(saying("one", "two", "three")) as episode:
        await sent(episode, BODY)
        await episode.ask([*ASK, {"role": "assistant", "content": "one"}, {"role": "user", "content": "?"}])
        await sent(episode, BODY, **AGAIN)
        assert [turn.text for turn in episode.session.turns()] == ["one", "two", "three"]


async def test_an_answer_that_nobody_takes_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection closes after the model has spoken, before its answer is written."""
    gone = asyncio.Event()

    async def hang_up(exchange: exchange.Exchange, content: object, *rest: object) -> None:
        gone.set()
        raise ConnectionResetError

    async with opened(saying("lost", "read")) as episode:
        with monkeypatch.context() as patched:
            patched.setattr(exchange.Exchange, "respond", hang_up)
            with pytest.raises(openai.APIConnectionError):
                await episode.client.with_options(max_retries=0).chat.completions.create(model="m", messages=ASK)
        assert gone.is_set()
        assert (episode.session.turns(), episode.session.counts.cancelled) == ((), 1)
        await episode.ask()
        assert [turn.text for turn in episode.session.turns()] == ["read"]


async def test_an_error_that_the_program_does_not_read_is_not_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def hang_up(exchange: exchange.Exchange, *rest: object) -> None:
        raise ConnectionResetError

    async with opened(saying(ServerError("gone"))) as episode:
        monkeypatch.setattr(exchange.Exchange, "respond", hang_up)
        with pytest.raises(openai.APIConnectionError):
            await episode.client.with_options(max_retries=0).chat.completions.create(model="m", messages=ASK)
        assert episode.session.counts.failed == 1
    assert not caplog.records


async def test_an_error_after_the_stream_has_begun_is_told_in_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "KEEP_ALIVE_S", 0.01)
    begun = asyncio.Event()
    send = EventStream.send

    async def sends(self: EventStream, events: str) -> None:
        await send(self, events)
        begun.set()

    async def answer(request: ModelRequest) -> list[int]:
        await begun.wait()
        raise ServerError("gone")

    monkeypatch.setattr(EventStream, "send", sends)
    async with opened(ScriptedEngine(answer)) as episode:
        stream = await episode.ask(stream=True)
        with pytest.raises(openai.APIError, match="gone"):
            [chunk async for chunk in stream]
        assert episode.session.turns() == ()


async def test_a_stream_begins_with_a_comment_where_the_answer_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "KEEP_ALIVE_S", 0.01)
    gated = Gated()
    async with opened(gated.engine) as episode:
        body = json.dumps({"model": "m", "messages": ASK, "stream": True}).encode()
        headers = {"Authorization": f"Bearer {episode.session.api_key}"}
        url = f"{episode.session.base_url}/chat/completions"
        async with aiohttp.ClientSession() as client, client.post(url, data=body, headers=headers) as response:
            assert (await response.content.readline()).startswith(b":")
            gated.gate.set()
            rest = (await response.content.read()).decode()
    assert rest.endswith("data: [DONE]\n\n")


async def test_long_messages_are_read_beside_the_event_loop() -> None:
    words = "many words " * 3000
    engine = saying("short")
    async with opened(engine) as episode:
        await episode.ask([{"role": "user", "content": words}])
    assert decode(engine.requests[0].input_ids).count("many words") == 3000
