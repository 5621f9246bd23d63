"""The start of an engine names servers that are not SGLang, are unwell, or serve different models."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from protocol_server import Server, ask, over

from arl.api.engine import ServedModel
from arl.api.engine_config import ClientConfig
from arl.api.errors import ServerError
from arl.engine.client.sglang import RemoteSGLangEngine


async def refused(*servers: Server, model: ServedModel | None = None) -> str:
    """What the start of an engine over these servers is refused with."""
    with pytest.raises(ServerError) as raised:
        async with RemoteSGLangEngine([server.address for server in servers], ClientConfig(), model=model):
            pytest.fail("it opened")
    return str(raised.value)


NO_SERVERS: list[tuple[str, Any, str]] = [
    ("model_info", "<html>hello</html>", "SGLang server"),
    ("model_info", {"object": "list"}, "SGLang server"),
    ("model_info", 404, "SGLang server"),
    ("model_info", 405, "HTTP 405"),
    ("health", 503, "HTTP 503"),
]


@pytest.mark.parametrize(("path", "told", "named"), NO_SERVERS)
async def test_what_is_no_server_that_is_well_is_named(server: Server, other: Server, path: str, told: Any, named: str):
    other.tells[path] = told
    message = await refused(server, other)
    assert message.startswith(f"no inference server answers at {other.address} (")
    assert named in message
    assert server.address not in message
    assert "engine.addresses" in message


class Once(dict[str, Any]):
    """Tells each thing once."""

    def get(self, key: str, default: Any = None) -> Any:
        return self.pop(key, default)


async def test_a_server_that_failed_one_request_is_greeted_again(server: Server):
    server.tells = Once(model_info=500, health=503)
    async with over(server) as engine:
        assert len((await engine.agenerate(ask(4))).output_ids) == 4


@pytest.mark.parametrize(
    ("path", "one", "two", "named"),
    [
        ("model_info", {"model_type": "qwen3"}, {"model_type": "llama"}, "the model type is qwen3 at"),
        ("model_info", {"architectures": ["A"]}, {"architectures": ["B"]}, r"the architecture is \['A'\] at"),
        ("v1/models", {"data": [{"max_model_len": 64}]}, {"data": [{"max_model_len": 32}]}, "the context length is 64"),
        ("tokenize", {"tokens": [1, 2]}, {"tokens": [1, 3]}, r"the tokenization of .* is \[1, 2\] at"),
    ],
)
async def test_servers_of_different_models_are_named_with_what_differs(
    server: Server, other: Server, path: str, one: dict[str, Any], two: dict[str, Any], named: str
):
    for each, told in ((server, one), (other, two)):
        if path == "model_info":
            each.info |= told
        else:
            each.tells[path] = told
    message = await refused(server, other)
    assert "do not serve the same model" in message
    assert re.search(named, message)
    assert server.address in message
    assert other.address in message


async def test_directories_may_differ_and_what_one_server_does_not_tell_is_not_compared(server: Server, other: Server):
    server.info["model_type"] = "qwen3"
    server.tells["tokenize"] = {"tokens": [1, 2]}
    other.tells["tokenize"] = 400
    other.info["model_path"] = "/elsewhere/m"
    async with over(server, other) as engine:
        assert (await engine.agenerate(ask())).output_ids


@pytest.mark.parametrize(("told", "num_ranks"), [({"tp_size": 4}, 4), ({"tp_size": None}, 1), (404, 1)])
async def test_the_ranks_of_a_server_are_its_tensor_parallel_size(server: Server, told: Any, num_ranks: int):
    server.tells["server_info"] = told
    async with over(server) as engine:
        assert [s.client.num_ranks for s in engine._pool.servers] == [num_ranks]


@pytest.mark.parametrize(
    ("told", "named"),
    [
        ({"model_type": "llama"}, "the model type is qwen3 at /m .the model to serve., but llama at http"),
        ({"vocab_size": 32}, "the vocabulary's size is 31 at"),
        ({"sizes": {"hidden_size": 64}}, "the hidden_size is 32 at"),
        ({"sizes": {"text_config": {"hidden_size": 64}}}, "the hidden_size is 32 at"),
    ],
)
async def test_servers_of_another_model_than_the_trainers_are_refused(
    server: Server, tmp_path: Path, told: dict[str, Any], named: str
):
    if sizes := told.get("sizes"):
        (tmp_path / "config.json").write_text(json.dumps(sizes))
        server.info["model_path"] = str(tmp_path)
    server.info |= told
    model = ServedModel(name="/m", vocab_size=31, model_type="qwen3", shape={"hidden_size": 32})
    message = await refused(server, model=model)
    assert re.search(named, message)
    assert server.address in message
    assert "Start all with the model of this run" in message


async def test_a_server_of_the_model_at_another_path_or_of_which_nothing_is_known_is_taken(
    server: Server, other: Server, tmp_path: Path
):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 32, "num_hidden_layers": 7}))
    server.info |= {"model_path": str(tmp_path), "model_type": "qwen3", "vocab_size": 31}
    other.info["model_path"] = "Qwen/Qwen3-0.6B"
    model = ServedModel(name="/m", vocab_size=31, model_type="qwen3", shape={"hidden_size": 32, "vocab_size": 31})
    async with over(server, other, model=model) as engine:
        assert (await engine.agenerate(ask())).output_ids


@pytest.mark.parametrize(
    ("setting", "advice"),
    [
        ("dp_size", "start one server for each replica"),
        ("pp_size", "tensor parallelism"),
        ("tokenizer_worker_num", "leave the option out"),
    ],
)
async def test_servers_that_updates_do_not_reach_as_a_whole_are_refused(server: Server, setting: str, advice: str):
    server.tells["server_info"] = {"tp_size": 2, setting: 2}
    message = await refused(server)
    assert f"would not reach all of {server.address}, which runs with {setting}=2: " in message
    assert advice in message
