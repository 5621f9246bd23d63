"""Requests with images to servers that expand placeholders themselves: what they are sent, and what they must have made
of it."""

import asyncio
import threading
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from protocol_server import Server, ask, over
from sighted import noise

from arl.api.engine import ServedModel
from arl.api.errors import ImageError, RefusedRequestError
from arl.api.images import PlacedImage
from arl.api.types import ModelRequest, SamplingParams
from arl.data.image_processor import ImageProcessor
from arl.engine.client import server_client
from arl.engine.client.server_client import GenerateCall, ScaledImages
from arl.engine.client.vllm_client import VLLMClient
from arl.engine.tiny import write_tiny_vision_model

PAD, ONE, OTHER = 32, noise(16, 16, 0), noise(16, 16, 1)
IDS = [5, 6, PAD, PAD, PAD, 7, PAD, PAD, 8]
IMAGES = (PlacedImage(image=ONE, start=2, stop=5), PlacedImage(image=OTHER, start=6, stop=8))
CONTRACTED = [5, 6, PAD, 7, PAD, 8]


def seeing(**fields: Any) -> ModelRequest:
    return replace(ask(), **{"input_ids": IDS, "images": IMAGES, **fields})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """Its image processor scales neither ONE nor OTHER."""
    directory = write_tiny_vision_model(tmp_path_factory.mktemp("sees") / "model", family="qwen3_vl")
    return ServedModel(name=str(directory), model_type="qwen3_vl")


def expanded(answer: dict[str, Any]) -> None:
    answer["prompt_token_ids"] = IDS


@pytest.mark.parametrize("is_embedded", [False, True])
async def test_stock_servers_get_images_that_they_need_not_scale_with_one_placeholder_each(
    server: Server, model: ServedModel, is_embedded: bool
) -> None:
    server.info |= {"frames": 0} if is_embedded else {}
    server.distortions.append(expanded)
    images = tuple(replace(placed, image=noise(40, 25, number)) for number, placed in enumerate(IMAGES))
    async with over(server, model=model) as engine:
        await engine.agenerate(seeing(images=images))
    processor = ImageProcessor(model.name)
    shown = [placed.image if is_embedded else processor.scaled(placed.image) for placed in images]
    (sent,) = server.requests
    assert sent["image_data"] == [image.data_url for image in shown]
    assert sent["input_ids"] == (IDS if is_embedded else CONTRACTED)
    assert sent.get("return_prompt_token_ids") is (None if is_embedded else True)


async def test_a_caller_that_gives_up_leaves_others_their_images(model: ServedModel) -> None:
    scaled, others_are_done = ScaledImages(model.name), threading.Event()
    for _ in range(2):  # both threads have other work
        server_client._SCALING.submit(others_are_done.wait)
    given_up, *others = [asyncio.create_task(scaled.of(IMAGES)) for _ in range(3)]
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.sleep(0)
    others_are_done.set()
    assert await asyncio.gather(*others) == [IMAGES, IMAGES]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            [*IDS, PAD],
            "computed 10 tokens where the prompt has 9, with its 2 images: its image processor or the settings",
        ),
        ([*IDS[:-1], 9], "computed other tokens than the prompt has"),
        (CONTRACTED, "computed 6 tokens"),
        (None, "does not say which tokens it computed"),
    ],
)
async def test_a_server_that_made_other_tokens_of_the_prompt_is_named(
    server: Server, model: ServedModel, prompt: list[int] | None, message: str
) -> None:
    server.distortions.append(lambda answer: answer.update(prompt_token_ids=prompt))
    async with over(server, model=model) as engine:
        with pytest.raises(RefusedRequestError, match=message):
            await engine.agenerate(seeing())
    assert len(server.requests) == 1


async def test_an_interrupted_response_goes_on_with_its_images(server: Server, model: ServedModel) -> None:
    def cut(answer: dict[str, Any]) -> None:
        expanded(answer)
        answer["output_ids"] = answer["output_ids"][:1]
        meta = answer["meta_info"]
        meta["output_token_logprobs"] = meta["output_token_logprobs"][:1]
        meta["finish_reason"] = {"type": "abort"}

    def whole(answer: dict[str, Any]) -> None:
        answer["prompt_token_ids"] = [*IDS, server.requests[1]["input_ids"][-1]]

    server.distortions += [cut, whole]
    async with over(server, model=model) as engine:
        response = await engine.agenerate(seeing())
    again = server.requests[1]
    assert again["input_ids"] == [*CONTRACTED, response.output_ids[0]]
    assert again["image_data"] == [ONE.data_url, OTHER.data_url]


async def test_a_placeholder_that_the_model_sampled_is_refused_before_it_is_sent(
    server: Server, model: ServedModel
) -> None:
    async with over(server, model=model) as engine:
        with pytest.raises(RefusedRequestError, match="32, 1 times where no image lies"):
            await engine.agenerate(seeing(input_ids=[*IDS, PAD]))
    assert server.requests == []


async def test_a_model_of_texts_gets_no_images(server: Server, model: ServedModel) -> None:
    async with over(server, model=replace(model, model_type="qwen3")) as engine:
        with pytest.raises(ImageError, match=r"has 2 images, and .*model is a qwen3, which takes none that arl knows"):
            await engine.agenerate(seeing())
    assert server.requests == []


@pytest.mark.parametrize("is_embedded", [False, True])
async def test_a_server_that_would_see_with_old_weights_is_warned_of(
    server: Server, caplog: pytest.LogCaptureFixture, is_embedded: bool
) -> None:
    server.info |= {"has_image_understanding": True} | ({"frames": 0} if is_embedded else {})
    async with over(server):
        pass
    assert ("SGLANG_VLM_CACHE_SIZE_MB=0" in caplog.text) is not is_embedded


def call_of(ids: list[int]) -> GenerateCall:
    return GenerateCall(
        rid="r", input_ids=np.array(ids, np.int32), num_continued=0, sampling=SamplingParams(max_new_tokens=4),
        max_new_tokens=4, cache_key="k", images=IMAGES,
    )  # fmt: skip


def test_vllm_gets_the_same_in_its_words() -> None:
    payload = VLLMClient(cast(Any, None), "http://127.0.0.1:9")._payload(call_of(IDS))
    assert payload["token_ids"].tolist() == CONTRACTED
    assert payload["content_parts"] == [
        {"type": "image_url", "url": image.data_url, "uuid": image.digest} for image in (ONE, OTHER)
    ]
    assert payload["return_token_ids"] is True
