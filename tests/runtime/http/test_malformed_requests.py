"""Malformed requests at each of arl's servers: every answer is one of the sender's faults, and the servers go on.

ARL_MALFORMED_REQUESTS is the number of requests to each server, ARL_MALFORMED_SEED the seed.
"""

import asyncio
import logging
import os
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from embedded_server import server_here
from engine.weights.mirrors import mirror_here
from malformed import Sound, malformed
from workflow.scripted_answers import TOKENIZER, saying

from arl.api.settings.endpoint import EndpointConfig
from arl.api.types import SamplingParams
from arl.endpoint import episodes_api
from arl.endpoint.proxy import OpenAIProxy
from arl.endpoint.served_workflow import ServedWorkflow
from arl.engine.tiny import TinyShape, write_tiny_model
from arl.engine.weights.delta_format import BLOCK_HEADER, MAGIC, PREAMBLE, Replica, block_digest, file_digest
from arl.observe.view.view_server import ViewServer
from arl.observe.view.viewed_run import ViewedRun
from arl.runtime.http.server import bind, serving

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
        patched.setattr(episodes_api, "_WRONG_KEY_S", 0.0)
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


async def ask(port: int, request: bytes) -> bytes:
    """The answer; empty if the server waits for more of the request, and then for none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        with suppress(ConnectionError):
            writer.write(request)
            try:
                async with asyncio.timeout(PATIENCE_S):
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
        after = await ask(door.port, door.sound[0].to_bytes())
    assert wrong == []
    assert after.startswith(b"HTTP/1.1 200 OK\r\n")
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
