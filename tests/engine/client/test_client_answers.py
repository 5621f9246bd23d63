"""What servers say is checked before it is believed: each answer, and at the start who they are and what they serve."""

import asyncio
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from protocol_server import Server, ask, assert_seamless, over
from scripted_weights import weights

from arl.api.engine import ServedModel
from arl.api.errors import ServerError, TrajectoryError
from arl.api.settings.engines import ClientConfig
from arl.api.types import ModelRequest
from arl.engine.client.remote_engine import RemoteInferenceEngine

Answer = dict[str, Any]
MODEL = ServedModel(name="m", vocab_size=31)


def meta(**changes: Any) -> Any:
    return lambda answer: answer["meta_info"].update(changes)


def tokens(*entries: list[Any], **changes: Any) -> Any:
    """The answer with other tokens."""

    def change(answer: Answer) -> None:
        answer["output_ids"] = [entry[1] for entry in entries]
        answer["meta_info"] |= {"output_token_logprobs": list(entries), "weight_versions": [], **changes}

    return change


def halve(answer: Answer) -> None:
    del answer["meta_info"]["output_token_logprobs"][2:]


GOOD = [-0.5, 5, None]
MALFORMED = {
    "logprobs for half of the tokens": (halve, "2 logprobs for 4 output_ids"),
    "more tokens than asked for": (tokens(*[GOOD] * 204), "204 tokens, but was asked for at most 4"),
    "a logprob that is not a number": (tokens([math.nan, 5, None]), "logprob nan"),
    "a logprob of minus infinity": (tokens([-math.inf, 5, None]), "logprob -inf"),
    "a logprob above 0": (tokens([0.5, 5, None]), "logprob 0.5"),
    "a logprob of null": (tokens([None, 5, None]), "logprob None"),
    "a token id that is a text": (tokens([-0.5, "5", None]), "token id '5'"),
    "a token id below 0": (tokens([-0.5, -1, None]), "token id -1"),
    "a token id beyond the vocabulary": (tokens([-0.5, 31, None]), "token id 31.*31 tokens"),
    "no logprobs": (lambda answer: answer["meta_info"].pop("output_token_logprobs"), "output_token_logprobs"),
    "a span that ends before it begins": (meta(weight_versions=[{"version": "0", "start": 3, "end": 1}]), "span"),
    "a span of parts of tokens": (meta(weight_versions=[{"version": "0", "start": 0, "end": 1.5}]), "span"),
    "a span of text": (meta(weight_versions=[{"version": "0", "start": "0", "end": "1"}]), "'int' and 'str'"),
    "an unknown end": (meta(finish_reason={"type": "bored"}), "bored"),
    "no object": (lambda answer: answer.clear(), "meta_info"),
}


@pytest.mark.parametrize(("distort", "words"), MALFORMED.values(), ids=MALFORMED.keys())
async def test_a_malformed_answer_is_thrown_away_and_its_server_fenced_with_the_reason(
    server: Server, other: Server, distort: Any, words: str
):
    async with over(server, other, model=MODEL) as engine:
        server.tells["model_info"] = 503
        server.distortions.append(distort)
        assert_seamless(await engine.agenerate(ask(session="s")), 4)
        assert [len(each.requests) for each in (server, other)] == [1, 1]
        assert [s.address for s in engine._pool.in_service] == [other.address]
        assert re.search(words, engine._pool.report())


async def test_a_server_that_comes_back_and_fails_again_is_probed_less_and_less_until_it_answers_well(
    server: Server, other: Server, monkeypatch: pytest.MonkeyPatch
):
    for name in ("_FIRST_BACKOFF_S", "_MAX_BACKOFF_S"):
        monkeypatch.setattr(f"arl.engine.client.health.{name}", 600.0)
    async with over(server, other) as engine:

        async def fail() -> None:
            server.distortions.append(halve)
            assert_seamless(await engine.agenerate(ask()), 4)

        for num_fences in (1, 2):  # a good answer in between forgets the failure
            await fail()
            while len(engine._pool.in_service) < 2:
                await engine._pool.changed()
            await engine.agenerate(ask())
            assert len(server.requests) == 2 * num_fences
        await fail()
        while len(engine._pool.in_service) < 2:
            await engine._pool.changed()
        await fail()
        for _ in range(20):
            await engine.agenerate(ask())
        assert len(server.requests) == 6
        assert engine.counters()["servers/fences"] == 4


@pytest.mark.parametrize("sends_spans", [True, False])
@pytest.mark.parametrize("num_updates", [0, 2])
async def test_a_version_that_nobody_sent_is_not_believed(
    server: Server, other: Server, sends_spans: bool, num_updates: int
):
    server.sends_spans = sends_spans
    async with over(server, other) as engine:
        for version in range(1, num_updates + 1):
            await engine.update_weights(weights(version))
        server.load_gate.clear()
        server.label = "999"
        response = await engine.agenerate(ask(session="s"))
        assert response.output_versions == (num_updates,) * 4
        assert [len(each.requests) for each in (server, other)] == [1, 1]
        report = engine._pool.report()
        assert "version 999" in report
        assert "another training seems to update this server" in report
        server.load_gate.set()


async def test_a_version_that_is_being_sent_is_believed(server: Server, other: Server):
    other.load_gate.clear()
    server.is_automatic = False
    async with over(server, other) as engine, asyncio.TaskGroup() as group:
        call = await server.begin(group, engine.agenerate(ask()))
        server.advance(2)
        running = group.create_task(engine.update_weights(weights(7)))
        await server.until(lambda: server.label == "7")
        server.advance(2)
        assert (await call).output_versions == (0, 0, 7, 7)
        other.load_gate.set()
        await running


@pytest.mark.parametrize("token_id", [31, -1])
async def test_a_prompt_with_a_token_that_the_model_lacks_is_refused_and_not_sent(server: Server, token_id: int):
    async with over(server, model=MODEL) as engine:
        with pytest.raises(TrajectoryError, match=rf"token id {token_id} at position 1.*31 tokens"):
            await engine.agenerate(ModelRequest(input_ids=[9, token_id]))
    assert server.requests == []


async def refused(*servers: Server, model: ServedModel | None = None) -> str:
    """What the start of an engine over these servers is refused with."""
    with pytest.raises(ServerError) as raised:
        async with RemoteInferenceEngine([server.address for server in servers], ClientConfig(), model=model):
            pytest.fail("it opened")
    return str(raised.value)


NO_SERVERS: list[tuple[str, Any, str]] = [
    ("", None, "could not be reached"),
    ("model_info", "<html>hello</html>", "SGLang server"),
    ("model_info", {"object": "list"}, "SGLang server"),
    ("model_info", 404, "SGLang server"),
    ("model_info", 405, "HTTP 405"),
    ("health", 503, "HTTP 503"),
]


@pytest.mark.parametrize(("path", "told", "named"), NO_SERVERS)
async def test_what_is_no_server_that_is_well_is_named(server: Server, other: Server, path: str, told: Any, named: str):
    other.tells[path] = told
    if not path:
        await other.stop()
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
    server.tells["tokenize"], other.tells["tokenize"] = {"tokens": [1, 2]}, 400
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
