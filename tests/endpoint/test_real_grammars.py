"""The endpoint before a real server: what an untrained model says under a grammar, and what the trainer is told."""

import json
from pathlib import Path

import openai
import pytest
from embedded_server import server_here
from programs import ADD, opened
from workflow.scripted_answers import TOKENIZER

from arl.api.settings.engines import ClientConfig
from arl.api.types import SamplingParams
from arl.engine.client.remote_engine import RemoteInferenceEngine
from arl.engine.tiny import TinyShape, write_tiny_model

SHAPE = TinyShape(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=2)


async def test_an_untrained_model_calls_a_tool_and_a_grammar_that_cannot_be_compiled_is_the_fields_fault(
    tmp_path: Path,
) -> None:
    model = write_tiny_model(tmp_path / "model", shape=SHAPE)
    with server_here(str(model)) as url:
        async with (
            RemoteInferenceEngine([url], ClientConfig()) as engine,
            opened(engine, sampling=SamplingParams(max_new_tokens=400)) as episode,
        ):
            said = (await episode.ask(tools=[ADD], tool_choice="required", parallel_tool_calls=False, seed=1)).choices[
                0
            ]
            with pytest.raises(openai.BadRequestError, match="regex cannot be honoured here") as refused:
                await episode.ask(extra_body={"regex": "(a"})
            schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "objekt"}}}
            with pytest.raises(openai.BadRequestError, match="response_format cannot be honoured here"):
                await episode.ask(response_format=schema)
            (made,) = episode.session.trajectories(1.0)
    (call,) = said.message.tool_calls
    assert (call.function.name, said.finish_reason) == ("add", "tool_calls")
    assert set(json.loads(call.function.arguments)) <= {"a", "b"}
    assert (refused.value.param, episode.session.counts.refused) == ("regex", 2)
    assert made.kept_ids is not None
    assert (made.kept_ids.index[made.loss_mask] >= 0).all(), "each sampled token has what it was sampled among"
    assert made.kept_ids.allows(made.token_ids)[made.loss_mask].all()
    assert TOKENIZER.decode(made.token_ids[made.loss_mask].tolist()).startswith('<tool_call>\n{"name": "add"')
