"""Tools that return images: the model sees them, and the trainer computes what the sampler did."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from embedded_server import server_here
from PIL import Image as Pictures
from scripted_answers import TOKENIZER, calling
from sighted import SEEING_FAMILIES, SEEING_SHAPE, SeeingReference, write_sighted
from sighted_chats import SMALL, TALL, WIDE, seeing

from arl.api.errors import ImageError
from arl.api.fakes import ScriptedEngine
from arl.api.images import Image
from arl.api.settings.engines import ClientConfig, TrainConfig
from arl.api.train_engine import TrainSequence
from arl.api.types import SamplingParams, Trajectory
from arl.engine.client.remote_engine import RemoteInferenceEngine
from arl.engine.fsdp.train_engine import FSDPTrainEngine
from arl.engine.model_files import load_tokenizer, served_model
from arl.rewards.adapt import InlineReward
from arl.workflow.call_formats import ParsedAnswer, ToolCall
from arl.workflow.messages import ToolSpecs, image_part, text_part
from arl.workflow.tool_agent import ToolAgentWorkflow
from arl.workflow.tools import Tool, ToolLimits, arun_tools, content_of_result

SEES = seeing("qwen3_vl")


def crop(side: int) -> Any:
    """A part of the picture."""
    return Pictures.new("RGB", (side, side), "red")


def describe() -> Any:
    """The picture, with words."""
    return ["this: ", TALL, {"n": 1}]


async def screenshot() -> Any:
    """What is on the screen."""
    return WIDE


def awaited() -> Any:
    """The same, awaitable."""
    return asyncio.sleep(0, [SMALL])


RED = Image.of(Pictures.new("RGB", (16, 16), "red"))


@pytest.mark.parametrize(
    ("tool", "arguments", "content"),
    [
        (crop, {"side": 16}, [image_part(RED)]),
        (describe, {}, [text_part("this: "), image_part(TALL), text_part('{"n":1}')]),
        (screenshot, {}, [image_part(WIDE)]),
        (awaited, {}, [image_part(SMALL)]),
    ],
)
async def test_a_result_has_its_texts_and_images(tool: Any, arguments: dict[str, Any], content: list[Any]) -> None:
    (result,) = await arun_tools([ToolCall(name=tool.__name__, arguments=arguments)], [Tool.of(tool)])
    assert (result.content, result.failure) == (content, None)
    assert result.message["content"] == content


@dataclass
class Shot:
    image: Any


@pytest.mark.parametrize(
    "result", [{"image": SMALL}, [["a", RED]], Shot(TALL), {"page": [{"image": Pictures.new("RGB", (8, 8))}]}]
)
def test_an_image_that_lies_deeper_in_a_result_is_an_error(result: Any) -> None:
    """Else the model would read the text of its file."""
    with pytest.raises(ImageError, match="the tool look returned an image within a"):
        content_of_result(result, "look")


async def test_texts_beside_images_are_cut_together() -> None:
    def tell() -> Any:
        """Tell."""
        return ["12345", SMALL, "67890", "abc"]

    (result,) = await arun_tools([ToolCall(name="tell", arguments={})], [Tool.of(tell)], ToolLimits(max_output_chars=7))
    cut = "67\n[cut here: 3 more characters]", "\n[cut here: 3 more characters]"
    assert result.content == [text_part("12345"), image_part(SMALL), *map(text_part, cut)]


def deep() -> Any:
    """A picture with 16 bits a channel."""
    return Pictures.new("I;16", (8, 8))


def agent(tokenizer: Any, *tools: Any, **fields: Any) -> ToolAgentWorkflow:
    return ToolAgentWorkflow(tokenizer, InlineReward(lambda answer, data: 1.0), tools=tools, **fields)


@pytest.mark.parametrize(
    ("tokenizer", "tool", "reason"),
    [
        (TOKENIZER, describe, "the result of the tool .describe. has an image, and the chat template of"),
        (SEES, deep, "the tool deep returned an image that cannot be shown: the image is of mode I;16"),
    ],
)
async def test_an_image_that_the_model_cannot_see_fails_the_episode_with_the_tools_name(
    tokenizer: Any, tool: Any, reason: str
) -> None:
    engine = ScriptedEngine.saying(tokenizer, calling(tool.__name__), "done")
    with pytest.raises(ImageError, match=reason):
        await agent(tokenizer, tool).arun_episode(engine, {"question": "?"})


async def test_an_agent_sees_its_question_and_what_its_tools_return() -> None:
    engine = ScriptedEngine.saying(SEES, f"{calling('crop', side=16)}{calling('describe')}", "done")
    (made,) = await agent(SEES, crop, describe).arun_episode(engine, {"question": "<image>?", "image": WIDE})
    assert [placed.image for placed in made.images] == [WIDE, RED, TALL]
    seen = SEES.decode(engine.requests[1].input_ids)
    pad = "<|vision_start|>{}<|vision_end|>"
    first, second = (pad.format("<|image_pad|>" * (placed.stop - placed.start)) for placed in made.images[1:])
    results = (f"<tool_response>\n{shown}\n</tool_response>" for shown in (first, "this: " + second + '{"n":1}'))
    assert "user\n" + "\n".join(results) + "<|im_end|>" in seen


@pytest.fixture(scope="module", params=SEEING_FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = replace(SEEING_SHAPE, context_length=2048)
    return write_sighted(tmp_path_factory.mktemp(request.param) / "model", request.param, shape=shape)


@pytest.fixture
def url(directory: Path) -> Iterator[str]:
    with server_here(str(directory), "--context-length", "2048") as url:
        yield url


class CallsTwice:
    """Takes the first two answers, whatever they are, for calls of a tool."""

    def __init__(self) -> None:
        self.left = [ToolCall(name="describe", arguments={}), ToolCall(name="crop", arguments={"side": 24})]

    def parse(self, text: str, tools: ToolSpecs = ()) -> ParsedAnswer:
        return ParsedAnswer(content=text, calls=(self.left.pop(),) if self.left else ())


def sequence_of(trajectory: Trajectory) -> TrainSequence:
    return TrainSequence(
        token_ids=torch.from_numpy(np.array(trajectory.token_ids)).long(),
        loss_mask=torch.from_numpy(np.array(trajectory.loss_mask)),
        images=trajectory.images,
        temperature=trajectory.temperature,
    )


async def test_the_trainer_computes_the_logprobs_with_which_an_episode_was_sampled(directory: Path, url: str) -> None:
    """Over turns with images of the question and of tools, by a real server."""
    workflow = agent(
        load_tokenizer(str(directory)),
        crop,
        describe,
        call_format=CallsTwice(),
        sampling=SamplingParams(max_new_tokens=12, temperature=0.8),
    )
    async with RemoteInferenceEngine(
        [url], ClientConfig(request_timeout_s=60.0), model=served_model(directory)
    ) as engine:
        made = await workflow.arun_episode(engine, {"question": "<image> or <image>?", "images": [SMALL, WIDE]})
    assert {placed.image for placed in made[-1].images} == {SMALL, WIDE, TALL, Image.of(crop(24))}
    assert sum(trajectory.num_trained_tokens for trajectory in made) >= 3
    trainer = FSDPTrainEngine(directory, TrainConfig())
    try:
        computed = trainer.forward([sequence_of(trajectory) for trajectory in made])
    finally:
        trainer.close()
    for trajectory, logprobs in zip(made, computed, strict=True):
        trained = np.array(trajectory.loss_mask)
        assert np.abs(logprobs.numpy() - trajectory.behavior_logprobs)[trained].max() < 1e-4
        first = int(trained.argmax())
        ids = [int(token) for token in trajectory.token_ids]
        reference = SeeingReference(directory).logprobs_of(trajectory.images, ids[:first], ids[first:], 0.8)
        there = torch.from_numpy(trained[first:])
        assert (reference[there] - logprobs[first:][there]).abs().max() < 1e-4


@pytest.mark.parametrize("pixels", [np.zeros((4, 4, 3), np.uint8), torch.zeros(4, 4, 1, dtype=torch.uint8)])
def test_an_array_of_pixels_is_no_text(pixels: Any) -> None:
    for returned in (pixels, ["see:", pixels]):
        with pytest.raises(ImageError, match=r"the tool render returned an array of pixels.*Image\.fromarray"):
            content_of_result(returned, "render")
    assert content_of_result(np.zeros((2, 2), np.uint8), "count") == "[[0 0]\n [0 0]]"
