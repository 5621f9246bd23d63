"""Weights that are published as adapters: which one a request names, and what its tokens' versions are."""

import asyncio
from pathlib import Path

import pytest
from protocol_server import Server, ask, assert_seamless, over

from arl.api.engine import DiskWeights
from arl.api.errors import ServerError


def adapter(version: int) -> DiskWeights:
    return DiskWeights(version=version, adapter=f"run-v{version}", directory=Path(f"/adapters/{version}"))


def named(server: Server) -> list[str | None]:
    """The adapters that the server's requests named, in order."""
    return [body.get("lora_path") for body in server.requests]


async def test_requests_name_the_published_adapter_and_their_tokens_are_of_its_version(server: Server):
    async with over(server) as engine:
        for version in (0, 1):
            await engine.update_weights(adapter(version))
            assert engine.version == version
            assert (await engine.agenerate(ask())).output_versions == (version,) * 4
        assert named(server) == ["run-v0", "run-v1"]
        assert len({body["extra_key"] for body in server.requests}) == 2
        assert server.label == "default"
        assert server.adapters == {"run-v0": "/adapters/0", "run-v1": "/adapters/1"}
    assert server.adapters == {}
    assert not {"pause_generation", "update_weights_from_disk"} & set(server.names())


async def test_a_request_that_was_cut_short_goes_on_under_the_newest_adapter(server: Server):
    server.is_automatic = False
    async with over(server) as engine, asyncio.TaskGroup() as group:
        await engine.update_weights(adapter(0))
        call = await server.begin(group, engine.agenerate(ask()))
        server.advance(2)
        await engine.update_weights(adapter(1))
        server.abort_running()
        await server.until(lambda: len(server.requests) == 2)
        await server.until(lambda: len(server.running) == 1)
        server.advance(2)
        response = await call
        assert_seamless(response, 4)
        assert response.output_versions == (0, 0, 1, 1)
        assert named(server) == ["run-v0", "run-v1"]


async def test_an_adapter_is_unloaded_when_two_newer_ones_are_there_and_no_request_names_it(server: Server):
    server.is_automatic = False
    async with over(server) as engine, asyncio.TaskGroup() as group:
        await engine.update_weights(adapter(0))
        call = await server.begin(group, engine.agenerate(ask()))
        for version in (1, 2, 3):
            await engine.update_weights(adapter(version))
        await server.until(lambda: "run-v1" not in server.adapters)
        assert list(server.adapters) == ["run-v0", "run-v2", "run-v3"]
        server.advance(4)
        assert (await call).output_versions == (0, 0, 0, 0)
        await engine.update_weights(adapter(4))
        await server.until(lambda: len(server.adapters) == 2)
        assert list(server.adapters) == ["run-v3", "run-v4"]


async def test_an_adapter_whose_load_was_given_up_and_came_about_all_the_same_is_unloaded(server: Server):
    async with over(server) as engine:
        await engine.update_weights(adapter(0))
        server.load_works = False
        with pytest.raises(ServerError, match=r"no server took version 1.*its rank is too large"):
            await engine.update_weights(adapter(1))
        server.adapters["run-v1"] = "/adapters/1"
    assert server.adapters == {}


async def test_a_server_that_does_not_take_the_adapter_is_fenced_until_it_does(server: Server, other: Server):
    async with over(server, other) as engine:
        await engine.update_weights(adapter(0))
        server.load_works = False
        await engine.update_weights(adapter(1))
        assert engine.version == 1
        assert "its rank is too large" in engine._pool.report()
        for _ in range(3):
            assert (await engine.agenerate(ask())).output_versions == (1, 1, 1, 1)
        assert named(server) == []
        server.load_works = True
        await server.until(lambda: "run-v1" in server.adapters)
        while engine._pool.report() != "every server serves":
            await engine._pool.changed()
        other.is_healthy = False
        other.faults.append(500)
        assert (await engine.agenerate(ask())).output_versions == (1, 1, 1, 1)


async def test_a_server_that_was_started_again_gets_the_adapter_before_it_serves(server: Server):
    async with over(server) as engine:
        await engine.update_weights(adapter(0))
        await engine.update_weights(adapter(1))
        server.adapters.clear()
        response = await engine.agenerate(ask())
        assert_seamless(response, 4)
        assert response.output_versions == (1, 1, 1, 1)
        assert named(server) == ["run-v1", "run-v1"], "the first was refused, the second was not sent before the load"
        assert list(server.adapters) == ["run-v1"]


async def test_a_server_that_joins_gets_the_adapter_before_it_serves(server: Server, other: Server):
    async with over(server) as engine:
        await engine.update_weights(adapter(3))
        await engine.add_server(other.address)
        assert list(other.adapters) == ["run-v3"]
        await engine.remove_server(server.address)
        assert server.adapters == {}
        assert (await engine.agenerate(ask())).output_versions == (3, 3, 3, 3)


async def test_a_removal_that_is_cancelled_while_adapters_are_unloaded_leaves_the_server_as_it_was(
    server: Server, other: Server
):
    async with over(server, other) as engine:
        await engine.update_weights(adapter(3))
        other.lost.append("unload_lora_adapter")
        leaving = asyncio.create_task(engine.remove_server(other.address))
        await other.until(lambda: "unload_lora_adapter" in other.names())
        leaving.cancel()
        await asyncio.wait([leaving])
        await asyncio.gather(*(engine.agenerate(ask()) for _ in range(4)))
        assert named(other) == ["run-v3"] * 2


async def test_an_adapter_that_is_there_already_is_not_loaded_again(server: Server):
    server.adapters["run-v0"] = "/adapters/0"
    async with over(server) as engine:
        await engine.update_weights(adapter(0))
        assert "load_lora_adapter" not in server.names()
        assert (await engine.agenerate(ask())).output_versions == (0, 0, 0, 0)


@pytest.mark.parametrize("label", ["7", "mixture"])
async def test_a_server_that_holds_another_runs_weights_takes_no_adapter(label: str, server: Server):
    server.label = label
    async with over(server) as engine:
        with pytest.raises(ServerError, match=f"serves weights '{label}'.*start it again"):
            await engine.update_weights(adapter(0))


async def test_an_answer_over_a_model_that_was_exchanged_is_thrown_away(server: Server, other: Server):
    async with over(server, other) as engine:
        await engine.update_weights(adapter(0))
        server.label = "7"
        for _ in range(3):
            assert (await engine.agenerate(ask())).output_versions == (0, 0, 0, 0)
        assert len(server.requests) == 1
        assert "it serves weights '7', but it began with 'default'" in engine._pool.report()
