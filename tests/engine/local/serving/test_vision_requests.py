"""Requests with images to an embedded server, over HTTP and in frames: what it takes, sends once, and refuses."""

import asyncio
import base64
import struct
import zlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from embedded_server import server_here
from protocol_client import Client
from reference import close
from sighted import SEEING_FAMILIES, Part, SeeingReference, laid_out, noise, write_sighted

from arl.api.errors import PromptTooLongError, RefusedRequestError
from arl.api.images import Image, PlacedImage
from arl.api.settings.engines import ClientConfig
from arl.api.types import ModelRequest, ModelResponse, SamplingParams
from arl.engine.client.remote_engine import RemoteInferenceEngine
from arl.engine.client.sglang_client import SGLangClient
from arl.engine.frames import Call, calls_of
from arl.engine.local import frame_server
from arl.engine.model_files import served_model

ONE, WIDE = noise(40, 25, 0), noise(120, 64, 2)
SHORT = SamplingParams(max_new_tokens=12, ignore_eos=True)
LIMIT = 256


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sighted(tmp_path_factory.mktemp("sighted") / "a", SEEING_FAMILIES[1])


@pytest.fixture(scope="module")
def reference(directory: Path) -> SeeingReference:
    return SeeingReference(directory)


@pytest.fixture(scope="module")
def url(directory: Path) -> Iterator[str]:
    with server_here(str(directory), "--context-length", str(LIMIT), "--weight-version", "v0") as url:
        yield url


@pytest.fixture
async def client(url: str) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(url) as session:
        yield Client(session)


@pytest.fixture
async def engine(url: str, directory: Path) -> AsyncIterator[RemoteInferenceEngine]:
    config = ClientConfig(request_timeout_s=60.0)
    async with RemoteInferenceEngine([url], config, model=served_model(directory)) as engine:
        yield engine


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Those that reach the server in frames."""
    arrived = list[Call]()

    def noted(message: bytes) -> Iterator[Any]:
        for frame in calls_of(message):
            if isinstance(frame, Call):
                arrived.append(frame)
            yield frame

    monkeypatch.setattr(frame_server, "calls_of", noted)
    return arrived


def request(reference: SeeingReference, *parts: Part, **fields: Any) -> ModelRequest:
    tokens, placed = laid_out(reference.processor, *parts)
    return ModelRequest(**{"input_ids": tokens, "images": placed, "sampling": SHORT, **fields})


def check(reference: SeeingReference, request: ModelRequest, response: ModelResponse) -> None:
    wanted = reference.logprobs_of(request.images, list(request.input_ids), response.output_ids)
    close(response.output_logprobs, wanted)


async def test_an_image_travels_once_and_every_turn_sees_it(
    engine: RemoteInferenceEngine, reference: SeeingReference, calls: list[Call]
) -> None:
    first = request(reference, [5, 6], ONE, [7], session_id="episode")
    begun = await engine.agenerate(first)
    more, placed = laid_out(reference.processor, [8], WIDE, ONE)
    ids = [*first.input_ids, *begun.output_ids]
    moved = [replace(p, start=p.start + len(ids), stop=p.stop + len(ids)) for p in placed]
    second = replace(first, input_ids=[*ids, *more], images=(*first.images, *moved))
    check(reference, first, begun)
    check(reference, second, await engine.agenerate(second))
    assert [[len(image.data) for image in call.images] for call in calls] == [[len(ONE.data)], [0, len(WIDE.data), 0]]


async def test_an_image_that_the_server_keeps_no_more_is_sent_again(
    engine: RemoteInferenceEngine, reference: SeeingReference, calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    once, between = noise(30, 30, 4), noise(30, 30, 5)
    await engine.agenerate(request(reference, once, [3]))
    monkeypatch.setattr("arl.engine.local.vision._FILE_BYTES", 1)
    await engine.agenerate(request(reference, between, [3]))
    asked = request(reference, [1], once, [4])
    check(reference, asked, await engine.agenerate(asked))
    sizes = [[len(image.data) for image in call.images] for call in calls]
    assert sizes == [[len(once.data)], [len(between.data)], [0], [len(once.data)]]


async def test_an_image_that_was_sent_wrongly_can_be_sent_again(
    engine: RemoteInferenceEngine, reference: SeeingReference
) -> None:
    right = noise(30, 30, 8)
    wrong = Image(ONE.data, right.digest, right.width, right.height)
    asked = request(reference, [1], right, [4])
    with pytest.raises(RefusedRequestError, match="and was sent as"):
        await engine.agenerate(replace(asked, images=(replace(asked.images[0], image=wrong),)))
    check(reference, asked, await engine.agenerate(asked))


async def test_the_server_counts_the_images_that_its_tower_computed(
    engine: RemoteInferenceEngine, reference: SeeingReference, client: Client
) -> None:
    async def count() -> int:
        return (await client.get("/server_info")).body["internal_states"][0]["images_computed"]

    before, asked = await count(), request(reference, [5], noise(33, 33, 6), [7])
    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(engine.agenerate(asked))
    assert await count() == before + 1


async def test_http_and_frames_give_the_same(
    engine: RemoteInferenceEngine, reference: SeeingReference, client: Client
) -> None:
    greedy = SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True)
    placeholder = reference.processor.image_token_id
    asked = request(reference, [5, placeholder], ONE, [7], WIDE, sampling=greedy)
    framed = await engine.agenerate(asked)
    speaker = engine._pool.servers[0].client
    assert isinstance(speaker, SGLangClient)
    speaker.takes_frames = False
    assert (await engine.agenerate(asked)).output_ids == framed.output_ids
    body = {"input_ids": list(asked.input_ids), "sampling_params": {"max_new_tokens": 12, "temperature": 0}}
    files = [ONE.data_url, base64.b64encode(WIDE.data).decode()]
    answer = await client.generate(**body, image_data=files)
    assert tuple(answer["output_ids"]) == framed.output_ids
    assert answer["meta_info"]["prompt_tokens"] == len(asked.input_ids)


async def test_a_response_that_was_interrupted_goes_on_with_its_images(
    engine: RemoteInferenceEngine, reference: SeeingReference, client: Client
) -> None:
    asked = request(reference, [5], ONE, [7], sampling=SamplingParams(max_new_tokens=200, ignore_eos=True))
    running = asyncio.create_task(engine.agenerate(asked))
    await client.until_running(1)
    await client.until_gained(5)
    await client.post("/pause_generation", {"mode": "abort"})
    engine._pool.servers[0].pauses += 1
    await client.post("/continue_generation")
    response = await running
    assert response.sends > 1
    check(reference, asked, response)


def shifted(request: ModelRequest, start: int, stop: int) -> ModelRequest:
    """Its first image's placeholders begin and end so much later."""
    first = request.images[0]
    return replace(request, images=(replace(first, start=first.start + start, stop=first.stop + stop),))


async def test_images_that_do_not_fit_their_tokens_are_refused_and_not_tried_again(
    engine: RemoteInferenceEngine, reference: SeeingReference, calls: list[Call]
) -> None:
    whole = request(reference, [5, 6], ONE, [7, 8])
    bad = [
        (shifted(whole, 0, -1), "has 3 placeholders among the tokens, and .* needs 4: another processor placed it"),
        (shifted(whole, 1, 1), "lies on tokens other than the placeholder"),
        (replace(whole, images=()), "placeholders .270. where no image was given"),
        (replace(whole, images=(PlacedImage(image=noise(600, 2, 0), start=3, stop=7),)), "cannot see Image.600x2"),
    ]
    for refused, message in bad:
        with pytest.raises(RefusedRequestError, match=message):
            await engine.agenerate(refused)
    assert len(calls) == len(bad)
    check(reference, whole, await engine.agenerate(whole))


def _png_of(width: int, height: int) -> bytes:
    """The beginning of a file that has so many pixels."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head)) + struct.pack(">I", 99) + b"IDAT"
    return b"\x89PNG\r\n\x1a\n" + chunks


async def test_what_is_no_image_is_refused_in_a_sentence(client: Client, reference: SeeingReference) -> None:
    tokens, _ = laid_out(reference.processor, [5], ONE)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"image_data": ["data:image/png;base64,AAAA"]}, "cannot read the image: it is damaged, or not one of PNG"),
        ({"image_data": [base64.b64encode(_png_of(1 << 15, 1 << 15)).decode()]}, "(1073741824 pixels) exceeds limit"),
        ({"image_data": ["http:pictures"]}, "is no base64"),
        ({"image_data": ["http://pictures/1.png"]}, "arl fetches nothing from the web"),
        ({"image_data": ["no image"] * 4000}, "the tokens have placeholders for 1 images, and 4000 were given"),
        ({"image_data": [ONE.data_url], "image_places": [[1, 2], [3, 4]]}, "image_places has 2 entries for 1"),
        ({"image_data": [ONE.data_url], "image_places": [[1, 900]]}, "image 0 has the placeholders [1, 900)"),
        ({"image_data": 3}, "image_data is 3; it must be a list"),
        ({"image_data": [ONE.data_url], "video_data": ["x"]}, 'video_data (here ["x"]): it is not known here'),
    ]
    for fields, message in bad:
        answer = await client.post(
            "/generate", {"input_ids": tokens, "sampling_params": {"max_new_tokens": 4}, **fields}
        )
        assert (answer.status, message in answer.message) == (400, True), answer


async def test_placeholders_count_towards_the_context(
    engine: RemoteInferenceEngine, reference: SeeingReference
) -> None:
    with pytest.raises(PromptTooLongError, match=f"context length of {LIMIT}|length .{LIMIT} tokens"):
        await engine.agenerate(request(reference, *[noise(128, 128, 0)] * 5))


async def test_a_model_of_texts_refuses_images(client: Client, shared_url: str) -> None:
    async with aiohttp.ClientSession(shared_url) as session:
        body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4}, "image_data": [ONE.data_url]}
        answer = await Client(session).post("/generate", body)
    assert (answer.status, "this server's model takes no images" in answer.message) == (400, True)
