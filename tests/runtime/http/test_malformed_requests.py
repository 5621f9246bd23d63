"""Malformed requests at each of arl's servers: every answer is one of the sender's faults, and the servers go on.

They are bytes as a socket gets them, made from sound requests by one to three changes, from a seed.

ARL_MALFORMED_REQUESTS is the number of requests to each server, ARL_MALFORMED_SEED the seed.
"""

import asyncio
import gzip
import json
import logging
import os
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from embedded_server import server_here
from engine.weights.loaders import mirror_here
from workflow.scripted_answers import TOKENIZER, saying

from arl.api.settings.endpoint import EndpointConfig
from arl.api.types import SamplingParams
from arl.endpoint import served_workflow
from arl.endpoint.proxy import OpenAIProxy
from arl.endpoint.served_workflow import ServedWorkflow
from arl.engine.tiny import TinyShape, write_tiny_model
from arl.engine.weights.delta import BLOCK_HEADER, MAGIC, PREAMBLE, Replica, block_digest, file_digest
from arl.observe.view.view_server import ViewServer
from arl.observe.view.viewed_run import ViewedRun
from arl.runtime.http.server import bind, serving

# What is malformed

_DEEP = 5000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sound:
    """A request that a server answers."""

    method: str
    path: str
    body: Any = None
    """JSON."""
    framed: Callable[[bytes], bytes] = bytes
    """Puts the JSON into the bytes that the server takes."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    def to_bytes(self) -> bytes:
        body = b"" if self.body is None else json.dumps(self.body).encode()
        return self.around(body).to_bytes()

    def around(self, body: bytes) -> "Raw":
        framed = self.framed(body)
        headers = {"Host": "a", "Connection": "close", **self.headers}
        encoded = tuple((name.encode(), value.encode()) for name, value in headers.items())
        return Raw(self.method.encode(), self.path.encode(), encoded, framed)


@dataclass(frozen=True, slots=True)
class Raw:
    """A request on its way to bytes."""

    method: bytes
    path: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    def to_bytes(self) -> bytes:
        names = {name for name, _ in self.headers}
        if not names & {b"Content-Length", b"Transfer-Encoding"}:
            return self.with_header(b"Content-Length", str(len(self.body)).encode()).to_bytes()
        lines = [self.method + b" " + self.path + b" HTTP/1.1", *(name + b": " + value for name, value in self.headers)]
        return b"\r\n".join([*lines, b"", self.body])

    def with_header(self, name: bytes, value: bytes) -> "Raw":
        return replace(self, headers=(*(one for one in self.headers if one[0] != name), (name, value)))


def malformed(sound: Sound, source: random.Random) -> bytes:
    """The bytes of a request like `sound`, with something wrong. Its connection is to be closed after the answer."""
    raw = sound.around(_body(sound.body, source))
    for change in source.sample(_CHANGES, k=source.choice((0, 0, 1, 1, 2, 3))):
        raw = change(raw, source)
    return raw.to_bytes()


def _body(sound: Any, source: random.Random) -> bytes:
    if sound is None:
        return b""
    content = sound
    for _ in range(source.choice((0, 1, 1, 1, 2, 4))):
        content = _changed(content, source)
    raw = content if isinstance(content, bytes) else _written(content)
    return source.choice(_ENCODINGS)(raw, source) if source.random() < 0.3 else raw


def _written(content: Any) -> bytes:
    """JSON, in which a bytes object stands for itself."""
    kept: list[bytes] = []

    def keep(value: Any) -> str:
        kept.append(value)
        return f"@{len(kept) - 1}@"

    raw = json.dumps(content, default=keep).encode()
    for index, value in enumerate(kept):
        raw = raw.replace(f'"@{index}@"'.encode(), value)
    return raw


_ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**30, -(10**30), 1e308, 5e-324, -0.0, "", "a", "0", "\0",
    "é" * 3, "../../etc/passwd", "/" * 300, "x" * 5000, "\U0001f600", "%s%n{}", [], {}, [[]], [None], [{}],
    {"": None}, {"a": {}}, ["a"] * 300, [0] * 5000, [-1], [2**70], {"x" * 300: 1}, {"\0": 1}, {"__class__": 1},
    b"1e999", b"-Infinity", b"NaN", b'"\\ud800"', b'{"\\udfff": 1}', b'"\xff"', b"9" * 5000,
    b"[" * _DEEP + b"]" * _DEEP, b'{"a":' * 200 + b"1" + b"}" * 200, b"[" * 90 + b"]" * 90, b"[" * 990 + b"]" * 990,
    b"1.5", b"-", b"'a'", b"1" * 400 + b".5",
)  # fmt: skip


def _changed(content: Any, source: random.Random) -> Any:
    """The content with one of its nodes replaced, removed, repeated or joined by another."""
    if isinstance(content, dict) and content and source.random() < 0.9:
        name = source.choice(list(content))
        match source.randrange(8):
            case 0:
                return {key: value for key, value in content.items() if key != name}
            case 1:
                return {**content, source.choice(("x", "", "\0", "n", "stream", "model", name.upper())): _odd(source)}
            case _:
                return {**content, name: _changed(content[name], source)}
    if isinstance(content, list) and content and source.random() < 0.7:
        at = source.randrange(len(content))
        match source.randrange(4):
            case 0:
                return content[:at] + content[at + 1 :]
            case 1:
                return content + [content[at]] * source.choice((1, 300))
            case _:
                return [*content[:at], _changed(content[at], source), *content[at + 1 :]]
    return _odd(source)


def _odd(source: random.Random) -> Any:
    return source.choice(_ODD)


_ENCODINGS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    lambda raw, source: raw[: source.randrange(len(raw) + 1)],
    lambda raw, source: raw + source.randbytes(3),
    lambda raw, _: raw.decode(errors="replace").encode("utf-16"),
    lambda raw, _: b"\xef\xbb\xbf" + raw,
    lambda raw, _: b"[" * 100_000 + raw,
    lambda raw, source: source.randbytes(50),
    lambda raw, source: _with_byte(raw, source.randrange(len(raw) + 1), source.randbytes(1)),
    lambda raw, _: raw * 2,
)


def _with_byte(raw: bytes, at: int, byte: bytes) -> bytes:
    return raw[:at] + byte + raw[at + 1 :]


_NAMES = (
    b"Authorization", b"Content-Type", b"X-API-Key", b"X-ARL-Key", b"X-Session-ID", b"x-stainless-retry-count",
    b"Accept", b"Expect", b"Content-Encoding", b"Transfer-Encoding", b"Content-Length", b"Host", b"Cookie", b"Upgrade",
)  # fmt: skip
_VALUES = (
    b"", b"Bearer \xff\xfe", b"\xed\xa0\x80", b"Bearer ", b"application/json; charset=klingon", b"\xe2\x82\xac",
    b"gzip", b"deflate", b"br", b"zstd", b"compress", b"gzip, gzip", b"chunked", b"-1", b"9999999999999", b"0", b"1e3",
    b"100-continue", b"multipart/form-data; boundary=a", b"multipart/form-data", b"text/html; charset=utf-16",
    b"a" * 7000, b"websocket", b"Bearer \xf0\x9f\x98\x80", b"=?utf-8?q?=ff?=",
)  # fmt: skip
_METHODS = (
    b"GET", b"POST", b"PUT", b"HEAD", b"OPTIONS", b"DELETE", b"PATCH", b"CONNECT", b"TRACE", b"BREW", b"get", b"P\xffT",
)  # fmt: skip
_PATHS = (
    b"/", b"*", b"//", b"/%ff", b"/%00", b"/..%2f..", b"http://a/health", b"/\xff\xfe", b"/a?b=%ff&c", b"", b"a",
    b"/" + b"a" * 7000, b"/health/", b"/e/", b"/e/x/v1/models", b"/%ed%a0%80", b"/#\xc3\xa9",
    b"/v1/%2e%2e/models", b"/e/%2f/v1/models",
)  # fmt: skip


def _headers(raw: Raw, source: random.Random) -> Raw:
    return raw.with_header(source.choice(_NAMES), source.choice(_VALUES))


def _compressed(raw: Raw, source: random.Random) -> Raw:
    packed = gzip.compress(raw.body)
    body = source.choice((packed, packed[: len(packed) // 2], packed + b"x", raw.body, b"", packed[:10] + raw.body))
    return replace(raw.with_header(b"Content-Encoding", source.choice((b"gzip", b"deflate", b"br"))), body=body)


def _chunked(raw: Raw, source: random.Random) -> Raw:
    sizes = (f"{len(raw.body):x}".encode(), b"zz", b"-1", b"ffffffffffffffffff", b"1;a=b", b"")
    body = source.choice(sizes) + b"\r\n" + raw.body + source.choice((b"\r\n0\r\n\r\n", b"", b"\r\n0\r\n", b"x"))
    return replace(raw.with_header(b"Transfer-Encoding", b"chunked"), body=body)


def _garbled(raw: Raw, source: random.Random) -> Raw:
    name, value = source.choice(raw.headers)
    return raw.with_header(name, _with_byte(value, source.randrange(len(value) + 1), source.randbytes(1)))


_CHANGES: tuple[Callable[[Raw, random.Random], Raw], ...] = (
    _headers,
    _compressed,
    _chunked,
    _garbled,
    lambda raw, source: replace(raw, method=source.choice(_METHODS)),
    lambda raw, source: replace(raw, path=source.choice(_PATHS)),
    lambda raw, source: replace(raw, path=raw.path + source.choice((b"%", b"/", b"?a=\xff", b"%00", b"\xff", b"#a"))),
)


# The servers

COUNT = int(os.environ.get("ARL_MALFORMED_REQUESTS", "250"))
SEED = int(os.environ.get("ARL_MALFORMED_SEED", "0"))
SHAPE = TinyShape(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=2, context_length=64)
CONNECTIONS = 8
PATIENCE_S = 0.3
"""How long a server may be silent before the request is taken for incomplete."""
ANSWER_S = 30.0
NO_ROOM = 507
"""A mirror's answer to a version larger than the disk."""
KEY = "key-of-this-test"
BEARER = {"Authorization": f"Bearer {KEY}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """A server, and sound requests to it. The first one is asked at the end, and has to be answered with 200."""

    port: int
    sound: Sequence[Sound]


@asynccontextmanager
async def embedded(directory: Path) -> AsyncIterator[Door]:
    model = str(write_tiny_model(directory / "model", shape=SHAPE, seed=0))
    sampling = {"max_new_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "stop": ["a"],
                "stop_token_ids": [1], "sampling_seed": 1, "ignore_eos": True}  # fmt: skip
    sent = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1, 2]], "weight_version": "1", "group_name": "g",
            "load_format": "flattened_bucket"}  # fmt: skip
    joining = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "group_name": "g",
               "backend": "gloo"}  # fmt: skip
    bodies = {
        "/generate": {"input_ids": [1, 2], "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0},
        "/classify": {"input_ids": [1, 2], "rid": "a"},
        "/tokenize": {"prompt": "a b", "add_special_tokens": True},
        "/abort_request": {"rid": "a"},
        "/continue_generation": {},
        "/flush_cache": {},
        "/update_weights_from_disk": {"model_path": str(directory), "weight_version": "1"},
        "/init_weights_update_group": joining,
        "/destroy_weights_update_group": {"group_name": "g"},
        "/begin_weight_update": {},
        "/update_weights_from_distributed": sent,
        "/end_weight_update": {},
        "/load_lora_adapter": {"lora_name": "a", "lora_path": str(directory)},
        "/unload_lora_adapter": {"lora_name": "a"},
    }
    posts = [Sound(method="POST", path=path, body=body, headers=BEARER) for path, body in bodies.items()]
    gets = [
        Sound(method="GET", path=path, headers=BEARER) for path in ("/health", "/model_info", "/v1/models", "/v1/loads")
    ]
    (directory / "key").write_text(KEY)
    with server_here(model, "--api-key-file", str(directory / "key"), "--update-timeout-s", "0.1") as url:
        yield Door(port=int(url.rpartition(":")[2]), sound=[posts[0], *posts, *gets])


MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
    {"role": "assistant", "content": None,
     "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
    {"role": "tool", "tool_call_id": "c", "content": "t"},
]  # fmt: skip
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@asynccontextmanager
async def endpoint(_: Path) -> AsyncIterator[Door]:
    sampling = {"temperature": 0.5, "top_p": 0.9, "stream": False}
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
    chat = {"model": "m", "messages": MESSAGES, "tools": [tool], "max_tokens": 4, "n": 2, "stop": ["x"], "seed": 1}
    responses = {"model": "m", "input": [{"role": "user", "content": [{"type": "input_text", "text": "Why?"}]}],
                 "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}], "max_output_tokens": 4,
                 **sampling}  # fmt: skip
    blocks = [{"type": "text", "text": "Why?"}]
    anthropic = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": blocks}], "system": "s",
                 "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}], **sampling}  # fmt: skip
    async with (
        OpenAIProxy(TOKENIZER, sampling=SamplingParams(max_new_tokens=8)) as proxy,
        proxy.episode(saying("fine", forever=True)) as session,
    ):
        authority, name = session.url.removeprefix("http://").split("/", 1)
        headers = {"Authorization": f"Bearer {session.api_key}"}
        bodies = {"chat/completions": {**chat, **sampling}, "responses": responses, "messages": anthropic}
        posts = [
            Sound(method="POST", path=f"/{name}/v1/{call}", body=body, headers=headers) for call, body in bodies.items()
        ]
        models = Sound(method="GET", path=f"/{name}/v1/models", headers=headers)
        yield Door(port=int(authority.rpartition(":")[2]), sound=[posts[0], *posts, models])


@pytest.fixture(autouse=True)
def operators_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARL_ENDPOINT_KEY", KEY)


@asynccontextmanager
async def episodes(_: Path) -> AsyncIterator[Door]:
    """Where programs open episodes and post their ends; the end of an unknown one, whose body is read first."""
    settings, urls = EndpointConfig(), list[str]()
    proxy = OpenAIProxy(TOKENIZER, endpoint=settings)
    end = {"reward": {"agent": 1.0}, "rewards": {"right": 0.5}, "metrics": {"files": 3}}
    paths = {"/episodes/a/end": end, "/episodes/b/end": {"answer": "a"}}
    posts = [Sound(method="POST", path=path, body=body, headers=BEARER) for path, body in paths.items()]
    counts = Sound(method="GET", path="/episodes", headers=BEARER)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(served_workflow, "_WRONG_KEY_S", 0.0)
        async with ServedWorkflow(proxy=proxy, on_open=urls.append):
            yield Door(port=int(urls[0].removesuffix("/episodes").rpartition(":")[2]), sound=[counts, *posts])


CONTENT = b"abcd"
DIGEST = file_digest([block_digest(CONTENT)])
"""Of the one file in a package."""


def package(header: bytes) -> bytes:
    return PREAMBLE.pack(MAGIC, len(header)) + header + BLOCK_HEADER.pack(3, 0, 0, len(CONTENT)) + CONTENT


@asynccontextmanager
async def mirror(directory: Path) -> AsyncIterator[Door]:
    checksum = Replica(directory=directory, files={"a": (len(CONTENT), DIGEST)}).checksum
    file = {"name": "a", "num_bytes": len(CONTENT), "is_kept": False, "width": 1}
    header = {"version": 1, "checksum": checksum, "base": None, "files": [file]}
    async with mirror_here(directory / "mirror") as opened:
        version = Sound(method="GET", path="/version")
        put = Sound(method="PUT", path="/version", body=header, framed=package)
        yield Door(port=int(opened.address.rpartition(":")[2]), sound=[version, put, put, put])


@asynccontextmanager
async def viewer(directory: Path) -> AsyncIterator[Door]:
    (directory / "metrics.jsonl").write_text('{"version": 1}\n')
    paths = ("", "/0/steps?since=0", "/0/episodes?text=a&sort=step&limit=2", "/0/groups/1/2", "/0/health",
             "/0/episodes/1/2.3?stop=9", "/0/time?from=0&to=1&limit=5", "/0/staleness")  # fmt: skip
    sound = [Sound(method="GET", path=f"/api/runs{path}", headers=BEARER) for path in paths]
    run = ViewedRun(directory, lambda _: None)
    async with serving(ViewServer([run], KEY).app, bind("127.0.0.1", 0)) as port:
        yield Door(port=port, sound=sound)


async def ask(port: int, request: bytes, patience_s: float = PATIENCE_S) -> bytes:
    """The answer; empty if the server waits for more of the request, and then for none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        with suppress(ConnectionError):
            writer.write(request)
            try:
                async with asyncio.timeout(patience_s):
                    return await reader.read()
            except TimeoutError:
                writer.write_eof()
            async with asyncio.timeout(ANSWER_S):
                return await reader.read()
        return b""
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def faults(request: bytes, answer: bytes) -> list[str]:
    """What is wrong with the answer."""
    answer = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1]) if head else 400
    says_why = bool(body) or status < 300 or request.startswith(b"HEAD") or not answer
    return [] if (status < 500 or status == NO_ROOM) and says_why else [f"{request[:700]!r} -> {answer[:700]!r}"]


@pytest.mark.parametrize("opened", [embedded, endpoint, episodes, mirror, viewer])
async def test_every_malformed_request_is_refused_with_a_sentence_and_the_server_goes_on(
    opened: Callable[[Path], AbstractAsyncContextManager[Door]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, wrong = random.Random(f"{SEED} {opened.__name__}"), list[str]()
    async with opened(tmp_path) as door:
        left = iter([malformed(source.choice(door.sound), source) for _ in range(COUNT)])

        async def send() -> None:
            for request in left:
                wrong.extend(faults(request, await ask(door.port, request)))

        async with asyncio.TaskGroup() as group:
            for _ in range(CONNECTIONS):
                group.create_task(send())
        after = await ask(door.port, door.sound[0].to_bytes(), ANSWER_S)
    assert wrong == []
    assert after.startswith(b"HTTP/1.1 200 OK\r\n")
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
