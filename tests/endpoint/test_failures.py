"""What goes wrong behind the endpoint, or before it: each a recorded outcome, an answer that says it, and no more."""

import asyncio
import json
import logging

import aiohttp
import httpx
import openai
import pytest
from programs import ADD, ASK, CERTIFICATES, Gated, Opened, client_of, opened, post, saying
from workflow.chat_templates import tokenizer_of

from arl.api.errors import EngineClosedError, PromptTooLongError, RequestTimeoutError, ServerError
from arl.endpoint import exchange
from arl.endpoint import proxy as server


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
async def test_the_program_gets_the_engines_error_its_sdk_does_not_retry_and_the_episode_goes_on(
    error: Exception, status: int, code: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = saying(error, "back")
    async with opened(engine) as episode:
        with pytest.raises(openai.APIStatusError) as told:
            await episode.ask(stream=stream)
        assert (told.value.status_code, told.value.code) == (status, code)
        assert str(error) in told.value.message
        assert len(engine.requests) == 1, "the SDK would have called again"
        assert episode.session.errors == ([] if status == 400 else [error])
        assert episode.session.is_truncated == (code == "context_length_exceeded")
        assert episode.session.turns() == ()
        await episode.ask()
        (made,) = episode.session.trajectories(1.0)
    counted = (made.metrics["calls"], made.metrics["calls_refused"], made.metrics["calls_failed"])
    assert counted == ((1, 1, 0) if status == 400 else (1, 0, 1))
    logged = [record.exc_info and record.exc_info[1] for record in caplog.records if record.levelno >= logging.ERROR]
    assert logged == ([error] if status == 500 else [])


async def test_one_sample_that_fails_and_tools_that_the_model_cannot_be_shown_fail_the_call() -> None:
    async with opened(saying("a", ServerError("gone")), tokenizer_of("chatml")) as episode:
        with pytest.raises(openai.InternalServerError, match="gone"):
            await episode.ask(n=3)
        with pytest.raises(openai.BadRequestError, match="tool"):
            await episode.ask(tools=[ADD])
        assert episode.session.turns() == ()


async def sent(episode: Opened, body: bytes, **headers: str) -> tuple[int, dict[str, dict[str, str]]]:
    headers["Authorization"] = f"Bearer {episode.session.api_key}"
    return await post(f"{episode.session.base_url}/chat/completions", body, headers)


async def test_a_body_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MAX_BODY_BYTES", 1000)
    async with opened(saying("fine")) as episode:
        status, answer = await sent(episode, b" " * 1001)
        assert (status, "the body is too large: Maximum request body size 1000" in answer["error"]["message"]) == (
            413,
            True,
        )
        assert (await episode.ask()).choices[0].message.content == "fine"


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
    """It gives up until a call has reached the model, and then has time."""
    gated = Gated()

    async def has_time(request: httpx.Request) -> None:
        if not gated.began.locked():
            request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), 60.0)

    async with opened(gated.engine) as episode:
        http = openai.DefaultAsyncHttpxClient(verify=CERTIFICATES, event_hooks={"request": [has_time]})
        impatient = client_of(episode.session, timeout=0.3, max_retries=20, http_client=http)
        async with impatient as client, asyncio.TaskGroup() as group:
            asking = group.create_task(client.chat.completions.create(model="m", messages=ASK))
            await gated.cancelled.acquire()
            gated.gate.set()
        assert asking.result().choices[0].message.content == "late"
        counts = episode.session.counts
        assert (counts.repeated, counts.answered, len(episode.session.turns())) == (0, 1, 1)
        assert counts.cancelled >= 1


FOLLOWING = [*ASK, {"role": "assistant", "content": "one"}, {"role": "user", "content": "?"}]
FIRST, NEXT = (json.dumps({"model": "m", "messages": messages}).encode() for messages in (ASK, FOLLOWING))


@pytest.mark.parametrize(
    ("said", "before", "kept", "calls", "num_repeated"),
    [
        (["lost", "read"], [FIRST], ["read"], 1, 1),
        (["one", ServerError("gone"), "two"], [FIRST, FIRST], ["one", "two"], 2, 0),  # the failed call is repeated
        (["one", "two", "three"], [FIRST, NEXT], ["one", "two", "three"], 2, 1),  # the program has read the first
    ],
)
async def test_an_answer_that_an_sdk_asks_for_again_is_forgotten_unless_it_was_read(
    said: list[str | Exception], before: list[bytes], kept: list[str], calls: int, num_repeated: int
) -> None:
    async with opened(saying(*said)) as episode:
        for body in before:
            await sent(episode, body)
        await sent(episode, FIRST, **{"x-stainless-retry-count": "1"})
        assert [turn.text for turn in episode.session.turns()] == kept
        metrics = episode.session.metrics
        assert (metrics["calls"], metrics["calls_repeated"]) == (calls, num_repeated)


@pytest.mark.parametrize(("said", "counted"), [("lost", "cancelled"), (ServerError("gone"), "failed")])
async def test_an_answer_that_nobody_takes_is_forgotten_and_an_error_is_not_logged(
    said: str | Exception, counted: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection closes after the model has spoken, before its answer is written."""

    async def hang_up(exchange: exchange.Exchange, *rest: object) -> None:
        raise ConnectionResetError

    async with opened(saying(said, "read")) as episode:
        with monkeypatch.context() as patched:
            patched.setattr(exchange.Exchange, "respond", hang_up)
            with pytest.raises(openai.APIConnectionError):
                await episode.client.with_options(max_retries=0).chat.completions.create(model="m", messages=ASK)
        assert (episode.session.turns(), getattr(episode.session.counts, counted)) == ((), 1)
        await episode.ask()
        assert [turn.text for turn in episode.session.turns()] == ["read"]
    assert not caplog.records


@pytest.mark.parametrize(
    ("said", "ending"), [("late", "data: [DONE]\n\n"), (ServerError("gone"), '"code":"engine_unavailable"}}\n\n')]
)
async def test_a_stream_begins_with_a_comment_while_the_model_speaks_and_may_end_with_an_error(
    said: str | Exception, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "KEEP_ALIVE_S", 0.01)
    model = Gated(said)
    async with opened(model.engine) as episode:
        body = json.dumps({"model": "m", "messages": ASK, "stream": True}).encode()
        headers = {"Authorization": f"Bearer {episode.session.api_key}"}
        url = f"{episode.session.base_url}/chat/completions"
        async with aiohttp.ClientSession() as client, client.post(url, data=body, headers=headers) as response:
            assert (await response.content.readline()).startswith(b":")
            model.gate.set()
            assert (await response.content.read()).decode().endswith(ending)
        assert [turn.text for turn in episode.session.turns()] == [said] * (said == "late")
