"""ScriptedEngine behaves as a real engine does where a workflow can tell."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from arl.api.engine import DiskWeights
from arl.api.fakes import ScriptedEngine
from arl.api.types import ModelRequest, SamplingParams
from arl.engine.tiny import tiny_tokenizer

REQUEST = ModelRequest(input_ids=(1, 2), sampling=SamplingParams(max_new_tokens=3))


@pytest.mark.parametrize(("said", "output_ids", "reason"), [([7, 8], (7, 8), "stop"), ([7] * 9, (7, 7, 7), "length")])
async def test_bare_tokens_become_a_response_of_the_current_version_cut_to_what_was_asked_for(
    said: list[int], output_ids: tuple[int, ...], reason: str
) -> None:
    response = await ScriptedEngine(lambda request: said, version=5).agenerate(REQUEST)
    assert (response.output_ids, response.stop_reason) == (output_ids, reason)
    assert response.output_versions == (5,) * len(output_ids)


async def test_a_weight_update_during_a_request_does_not_change_its_version() -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    async def script(request: ModelRequest) -> Sequence[int]:
        asked.set()
        await answer.wait()
        return [7]

    engine = ScriptedEngine(script)
    async with asyncio.TaskGroup() as tasks:
        call = tasks.create_task(engine.agenerate(REQUEST))
        await asked.wait()
        await engine.update_weights(DiskWeights(version=1, directory=Path("/nowhere")))
        answer.set()
    assert call.result().output_versions == (0,)
    assert engine.version == 1


async def test_a_paused_engine_starts_no_request() -> None:
    engine = ScriptedEngine(lambda request: [7])
    await engine.pause()
    async with asyncio.TaskGroup() as tasks:
        call = tasks.create_task(engine.agenerate(REQUEST))
        await asyncio.sleep(0)
        assert not engine.requests
        await engine.resume()
    assert call.result().output_ids == (7,)


async def test_it_says_the_texts_it_is_given_and_says_when_there_are_no_more() -> None:
    tokenizer = tiny_tokenizer()
    engine = ScriptedEngine.saying(tokenizer, "a", "b")
    sampling = SamplingParams(max_new_tokens=10)
    for text in ("a", "b"):
        response = await engine.agenerate(ModelRequest(input_ids=(1,), sampling=sampling))
        assert response.output_ids == (*tokenizer.encode(text), tokenizer.eos_token_id)
        assert response.stop_reason == "stop"
    with pytest.raises(AssertionError, match="another answer, but it was given only 2"):
        await engine.agenerate(REQUEST)
