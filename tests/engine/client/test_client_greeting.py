"""Who the servers are: what is no SGLang server, and servers of different models, are told at the start."""

import re
from typing import Any

import pytest
from protocol_server import Server, ask, over

from arl.api.engine_config import ClientConfig
from arl.api.errors import ServerError
from arl.engine.client.sglang import RemoteSGLangEngine


async def refused(*servers: Server) -> str:
    """What the start of an engine over these servers is refused with."""
    with pytest.raises(ServerError) as raised:
        async with RemoteSGLangEngine([server.address for server in servers], ClientConfig()):
            pytest.fail("it opened")
    return str(raised.value)


@pytest.mark.parametrize("told", ["<html>hello</html>", {"object": "list"}, 404, 405])
async def test_something_else_than_sglang_is_named_with_its_address(server: Server, told: Any):
    server.tells["model_info"] = told
    message = await refused(server)
    assert message.startswith(f"no inference server answers at {server.address} (")
    assert "SGLang server" in message or "HTTP 405" in message
    assert "engine.addresses" in message


async def test_a_server_that_is_unwell_is_named_with_its_address(server: Server, other: Server):
    other.tells["health"] = 503
    message = await refused(server, other)
    assert f"{other.address} (" in message
    assert "HTTP 503" in message
    assert server.address not in message


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
