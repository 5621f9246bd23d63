"""The HTTP kit: bodies read into models, errors in one shape, events, keys, and what a client makes of responses."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

import pytest
from aiohttp import web
from pydantic import Field

from arl.api.errors import NoSuchPathError, RequestTimeoutError, ServerError, ServerFailedError
from arl.web.bodies import BodyError, Integers, RequestBody, RequestError, Strings, parse
from arl.web.client import JsonClient, Reply, new_session
from arl.web.server import DONE, EventStream, bind, boundary, event, json_response, require_key, serving


class Part(RequestBody):
    text: str


class Query(RequestBody, ignored=("user",), only={"penalty": (0,)}, refused={"audio": "the model takes text alone"}):
    parts: Sequence[Part] = ()
    top_k: Annotated[int, Field(ge=1)] = 5
    stop: Strings = ()
    input_ids: Integers = ()


def test_a_body_becomes_a_model_and_null_counts_as_absent() -> None:
    body = b'{"parts": [{"text": "a"}], "top_k": null, "stop": "x", "input_ids": [1], "user": "me", "penalty": 0.0}'
    assert parse(Query, body) == Query(parts=[Part(text="a")], stop=["x"], input_ids=[1])
    assert parse(Query, b"") == Query()


VALUE, UNSUPPORTED = "unsupported_value", "unsupported_parameter"


@pytest.mark.parametrize(
    ("body", "param", "sentence", "code"),
    [
        ("[1]", None, "the request body is [1]; it must be a JSON object", None),
        ('{"top_k": 1.5}', "top_k", "top_k is 1.5; it must be an integer", None),
        ('{"top_k": true}', "top_k", "top_k is true; it must be an integer", None),
        ('{"top_k": 0}', "top_k", "top_k is 0; it must be at least 1", None),
        ('{"parts": [{}]}', "parts[0].text", "parts[0].text is missing", None),
        ('{"parts": ["a"]}', "parts[0]", 'parts[0] is "a"; it must be a JSON object', None),
        ('{"input_ids": [1.5]}', "input_ids", "input_ids is [1.5]; it must be a list of integers", None),
        ('{"stop": [1]}', "stop", "stop is [1]; it must be a string or a list of strings, none of them empty", None),
        *((bad, None, "the request body is not JSON", None) for bad in ("{bad", '{"parts": ' + "[" * 100_000)),
        ('{"top_k": NaN}', None, "NaN is not a JSON number", None),
        (r'{"stop": "\ud800"}', None, "the request body is not JSON", None),
        ('{"penalty": 2}', "penalty", "is 2, which cannot be honoured here; leave it out, or set it to 0", VALUE),
        ('{"audio": {}}', "audio", "audio: the model takes text alone; leave it out", UNSUPPORTED),
        ('{"parts": [{"text": "", "x": 1}]}', "parts[0].x", "it is not known here", UNSUPPORTED),
    ],
)
def test_a_wrong_body_is_one_sentence_naming_the_field(
    body: str, param: str | None, sentence: str, code: str | None
) -> None:
    with pytest.raises(BodyError) as raised:
        parse(Query, body.encode())
    assert sentence in raised.value.message
    assert (raised.value.param, raised.value.code, raised.value.status) == (param, code or "invalid_value", 400)


def in_shape(error: RequestError) -> Any:
    return {"error": {"message": error.message}}


@asynccontextmanager
async def served(*, api_key: str | None = None, **settings: Any) -> AsyncIterator[JsonClient]:
    async def answer(request: web.Request) -> web.StreamResponse:
        match request.path:
            case "/echo":
                return json_response(await request.json())
            case "/refuse":
                raise RequestError("not this", 409)
            case "/conflict":
                raise KeyError("gone")
            case "/hang":
                await asyncio.Event().wait()
            case "/events":
                stream = EventStream(request)
                await stream.send(event({"a": 1}))
                return await stream.end(event({}, "last") + DONE)
            case "/text":
                return web.Response(text="fine")
        raise ValueError("what is this?")

    middlewares = [boundary(in_shape, {KeyError: 410}), *([require_key(api_key)] if api_key else [])]
    app = web.Application(middlewares=middlewares, client_max_size=1 << 10)
    for path in ("echo", "refuse", "conflict", "hang", "events", "text", "fail", "health"):
        app.router.add_route("*", f"/{path}", answer)
    async with serving(app, bind("127.0.0.1", 0)) as port:
        client = JsonClient(f"http://127.0.0.1:{port}", **{"retries": 0, **settings})
        try:
            yield client
        finally:
            await client.aclose()


@pytest.mark.parametrize(
    ("path", "kind", "sentence"),
    [
        ("/refuse", ServerError, "/refuse answered HTTP 409: not this"),
        ("/conflict", ServerError, "HTTP 410: 'gone'"),
        ("/nowhere", NoSuchPathError, "HTTP 404: Not Found"),
        ("/fail", ServerFailedError, r"HTTP 500: internal error: ValueError\('what is this\?'\)"),
        ("/text", ServerError, "something other than JSON: b'fine'"),
    ],
)
async def test_an_error_of_the_server_is_an_exception_of_the_client(
    path: str, kind: type[Exception], sentence: str
) -> None:
    async with served() as client:
        assert await client.ask("/echo", {"a": 1}) == {"a": 1}
        with pytest.raises(kind, match=sentence) as raised:
            await client.ask(path)
        with pytest.raises(ServerError, match="HTTP 413: the body is too large"):
            await client.ask("/echo", {"a": "b" * 2000})
    assert isinstance(raised.value, ServerFailedError) == (kind is ServerFailedError)


def test_an_answer_that_is_nested_without_end_is_no_json() -> None:
    reply = Reply(url="http://server/path", path="/path", status=200, headers={}, body=b"[" * 100_000)
    assert reply.json_object() == {}
    with pytest.raises(ServerError, match="something other than JSON"):
        reply.json()


async def test_every_path_but_probes_needs_the_key() -> None:
    async with served(api_key="secret") as client:
        with pytest.raises(ServerError, match="HTTP 401: Unauthorized; pass the api_key"):
            await client.ask("/text")
        async with new_session() as session:
            for key, status in (("Bearer wrong", 401), ("secret", 401), ("Bearer secret", 200)):
                async with session.get(f"{client.url}/text", headers={"Authorization": key}) as answer:
                    assert answer.status == status
        with pytest.raises(ServerFailedError, match="HTTP 500"):
            await client.ask("/health")


async def test_a_server_that_does_not_answer_in_time_is_a_timeout() -> None:
    async with served(timeout_s=0.05) as client:
        with pytest.raises(RequestTimeoutError, match=r"/hang took longer than timeout_s=0\.05"):
            await client.ask("/hang")


async def test_a_stream_is_events_and_several_clients_may_share_connections() -> None:
    async with served() as client, new_session() as session:
        other = JsonClient(client.url, session=session)
        reply = await other.send("GET", "/events")
        await other.aclose()
        assert not session.closed
    assert reply.body.decode() == 'data: {"a":1}\n\nevent: last\ndata: {}\n\ndata: [DONE]\n\n'
