"""Images: what each kind of server samples after them is what plain transformers computes."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reference import close
from servers import Server
from sighted import SEEING_FAMILIES, SEEING_WIDE, WIDE_VISION, Part, SeeingReference, laid_out, noise, write_sighted

from arl.api.engine import DiskWeights
from arl.api.types import ModelRequest, ModelResponse, SamplingParams
from arl.engine.client.remote_engine import RemoteInferenceEngine
from arl.engine.model_files import served_model

ONE, SAME_SIZE, WIDE = noise(75, 40, 0), noise(75, 40, 1), noise(120, 64, 2)
TEXT, MORE = list(b"What is this"), list(b"?!")
MARKS: dict[str, Any] = {
    "embedded": [],
    "sglang": [pytest.mark.sglang, pytest.mark.timeout(300)],
    "vllm": [pytest.mark.vllm, pytest.mark.timeout(300)],
}

TOLERANCES = {"embedded": 1e-4, "sglang": 3e-4, "vllm": 3e-4}
"""Images that a server scales itself change logprobs by up to 0.3, other images or weights by units."""

pytestmark = pytest.mark.parametrize(
    "server",
    [pytest.param(f"{kind}-{family}", marks=marks) for family in SEEING_FAMILIES for kind, marks in MARKS.items()],
    indirect=True,
)


@pytest.fixture
def seen(server: Server, request: pytest.FixtureRequest) -> SeeingReference:
    family = request.node.callspec.params["server"].partition("-")[2]
    return SeeingReference(request.getfixturevalue(f"{family}_model"), TOLERANCES[server.kind])


@pytest.fixture
async def engine(server: Server, seen: SeeingReference) -> AsyncIterator[RemoteInferenceEngine]:
    model = served_model(seen.processor.model)
    async with RemoteInferenceEngine([server.url], server.config(), model=model) as engine:
        yield engine


def request_of(seen: SeeingReference, *parts: Part) -> ModelRequest:
    """Greedy, so that each time the same tokens are compared: tiny models magnify roundings, at some tokens more."""
    tokens, placed = laid_out(seen.processor, *parts)
    sampling = SamplingParams(max_new_tokens=8, temperature=0, ignore_eos=True)
    return ModelRequest(input_ids=tokens, images=placed, sampling=sampling)


def check(seen: SeeingReference, request: ModelRequest, response: ModelResponse) -> None:
    wanted = seen.logprobs_of(request.images, list(request.input_ids), response.output_ids)
    close(response.output_logprobs, wanted, atol=seen.tolerance)


async def test_every_turn_sees_its_images(engine: RemoteInferenceEngine, seen: SeeingReference) -> None:
    asked = request_of(seen, TEXT, ONE, MORE)
    for image in (WIDE, ONE):
        response = await engine.agenerate(asked)
        check(seen, asked, response)
        begun = [*asked.input_ids, *(i for i in response.output_ids if i != seen.processor.image_token_id)]
        tokens, placed = laid_out(seen.processor, image, MORE)
        moved = [replace(p, start=p.start + len(begun), stop=p.stop + len(begun)) for p in placed]
        asked = replace(asked, input_ids=[*begun, *tokens], images=(*asked.images, *moved))
    check(seen, asked, await engine.agenerate(asked))


async def test_equal_tokens_with_other_images_are_another_prompt(
    engine: RemoteInferenceEngine, seen: SeeingReference
) -> None:
    for image in (ONE, SAME_SIZE, ONE, SAME_SIZE):
        asked = request_of(seen, TEXT * 3, image, TEXT)
        check(seen, asked, await engine.agenerate(asked))


async def test_new_weights_see_otherwise(
    engine: RemoteInferenceEngine, seen: SeeingReference, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    family = request.node.callspec.params["server"].partition("-")[2]
    directory = write_sighted(tmp_path / "other", family, seed=1, shape=SEEING_WIDE, vision=WIDE_VISION)
    other = SeeingReference(directory, seen.tolerance)
    asked = request_of(seen, TEXT, WIDE, MORE)
    check(seen, asked, await engine.agenerate(asked))
    for version, reference in ((1, other), (2, seen)):
        await engine.update_weights(DiskWeights(version=version, directory=Path(reference.processor.model)))
        check(reference, asked, await engine.agenerate(asked))
