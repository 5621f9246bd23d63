"""The client against the embedded server: interruptions that leave no mark but versions."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from embedded_server import server_here

from arl.api.engine import DiskWeights
from arl.api.engine_config import ClientConfig, PauseMode
from arl.api.errors import PromptTooLongError
from arl.api.types import ModelRequest, ModelResponse, SamplingParams
from arl.engine.client.sglang import RemoteSGLangEngine
from arl.engine.tiny import TinyShape, write_tiny_model

PROMPT = (30, 40, 50, 60)
NUM_TOKENS = 400
GREEDY = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=1.0, ignore_eos=True, seed=7)


@dataclasses.dataclass(frozen=True)
class Models:
    """Two directories of the same architecture with different weights."""

    one: Path
    two: Path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    # Weights large enough that the next token is never nearly a tie.
    shape = TinyShape(hidden_size=64, intermediate_size=128, num_heads=2, num_kv_heads=2, initializer_range=0.3)
    return Models(*(write_tiny_model(root / name, shape=shape, seed=i) for i, name in enumerate(("one", "two"))))


@pytest.fixture(scope="module")
def address(models: Models) -> Iterator[str]:
    with server_here(str(models.one), "--context-length", "1000") as url:
        yield url


@asynccontextmanager
async def engine_at(*addresses: str, mode: PauseMode = "in_place") -> AsyncIterator[RemoteSGLangEngine]:
    async with RemoteSGLangEngine(addresses, ClientConfig(pause_mode=mode, request_timeout_s=60.0)) as engine:
        yield engine


def request(sampling: SamplingParams, prompt: tuple[int, ...] = PROMPT) -> ModelRequest:
    return ModelRequest(input_ids=prompt, sampling=sampling)


async def interrupted(engine: RemoteSGLangEngine, sampling: SamplingParams, directory: Path) -> ModelResponse:
    """A response during which the weights are updated from this directory, several times."""
    async with asyncio.TaskGroup() as group:
        call = group.create_task(engine.agenerate(request(sampling)))
        for _ in range(5):
            await asyncio.sleep(0.1)
            if call.done():
                break
            await engine.update_weights(DiskWeights(version=engine.version + 1, directory=directory))
    return call.result()


def assert_same(response: ModelResponse, plain: ModelResponse) -> None:
    assert response.output_ids == plain.output_ids
    assert response.stop_reason == plain.stop_reason
    assert response.output_logprobs == pytest.approx(plain.output_logprobs, abs=1e-4)


@pytest.mark.parametrize(
    ("mode", "sampling"),
    [("in_place", GREEDY), ("retract", GREEDY), ("abort", GREEDY), ("abort", SEEDED)],
    ids=["in_place", "retract", "abort", "abort-seeded"],
)
async def test_updates_to_the_same_weights_leave_no_mark_but_the_versions(
    address: str, models: Models, mode: PauseMode, sampling: SamplingParams
):
    async with engine_at(address, mode=mode) as engine:
        await engine.update_weights(DiskWeights(version=1, directory=models.one))
        plain = await engine.agenerate(request(sampling))
        response = await interrupted(engine, sampling, models.one)
    assert_same(response, plain)
    assert set(plain.output_versions) == {1}
    assert list(response.output_versions) == sorted(response.output_versions)
    assert len(set(response.output_versions)) > 1


async def test_a_new_turn_does_not_see_the_cache_of_old_weights(address: str, models: Models):
    async with engine_at(address) as engine:
        await engine.update_weights(DiskWeights(version=1, directory=models.two))
        expected = await engine.agenerate(request(GREEDY))
        await engine.update_weights(DiskWeights(version=2, directory=models.one))
        await engine.agenerate(request(GREEDY))
        await engine.update_weights(DiskWeights(version=3, directory=models.two))
        again = await engine.agenerate(request(GREEDY))
    assert_same(again, expected)


async def test_a_prompt_longer_than_the_context_is_told(address: str):
    async with engine_at(address) as engine:
        with pytest.raises(PromptTooLongError, match="1000 tokens"):
            await engine.agenerate(request(GREEDY, PROMPT * 300))
