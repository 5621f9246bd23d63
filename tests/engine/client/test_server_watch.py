"""No server is lost in silence: log lines, metrics, signs of life, restarts, and a floor that ends the run."""

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from protocol_server import Server, ask, assert_seamless, over
from scripted_weights import weights
from virtual_time import run_in_virtual_time

from arl.api.errors import ServerError
from arl.api.settings.engines import ClientConfig, LocalEngineConfig
from arl.engine.client import server_processes
from arl.engine.client.remote_engine import RemoteInferenceEngine
from arl.engine.client.server_pool import ServerPool
from arl.engine.client.server_processes import started_here
from arl.engine.client.sglang_client import SGLangClient
from arl.engine.client.watchdog import ServerWatch


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of watching become a tenth of them, or less."""
    for name, value in (("_LISTEN_EVERY_S", 0.02), ("_SILENCE_S", 0.3), ("_HUNG_S", 0.3)):
        monkeypatch.setattr(f"arl.engine.client.watchdog.{name}", value)
    monkeypatch.setattr("arl.engine.client.health._PROBE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(server_processes, "_FIRST_BACKOFF_S", 0.01)


def lines(caplog: pytest.LogCaptureFixture, server: Server) -> list[str]:
    return [record.getMessage() for record in caplog.records if server.address in record.getMessage()]


async def test_a_fence_and_its_end_are_logged_and_counted_and_one_that_flaps_floods_no_log(
    server: Server, other: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("arl.engine.client.health._MAX_BACKOFF_S", 0.01)
    caplog.set_level(logging.INFO)
    async with over(server, other) as engine:
        assert engine.counters() == {
            "servers/serving": 2, "servers/fenced": 0, "servers/fences": 0, "servers/failed_requests": 0,
        }  # fmt: skip
        for _ in range(4):
            server.is_healthy = False
            engine._upkeep.fence(server=engine._pool.servers[0], reason="its GPU fell off the bus")
            assert engine.counters()["servers/serving"] == engine.counters()["servers/fenced"] == 1
            await server.until(lambda: len(server.calls) > 1)
            server.is_healthy = True
            while engine.counters()["servers/fenced"]:
                await engine._pool.changed()
                await asyncio.sleep(0)
            server.calls.clear()
        assert engine.counters()["servers/fences"] == 4
    fence, end = lines(caplog, server)
    assert "is fenced, and gets no requests until it has recovered: its GPU fell off the bus" in fence
    assert "serves again after" in end
    assert lines(caplog, other) == []


async def test_a_fence_that_lasts_is_told_again_with_the_reason_and_the_time(
    server: Server, other: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("arl.engine.client.watchdog._QUIET_S", 0.0)
    monkeypatch.setattr("arl.engine.client.health._MAX_BACKOFF_S", 0.01)
    async with over(server, other) as engine:
        await server.stop()
        await engine.update_weights(weights(1))
        async with asyncio.timeout(5):
            while len(lines(caplog, server)) < 3:  # noqa: ASYNC110 - a log sets no event
                await asyncio.sleep(0.01)
    assert all("could not be reached" in line for line in lines(caplog, server))
    assert "has been fenced for" in lines(caplog, server)[1]


async def test_a_server_that_falls_silent_is_fenced_and_what_it_runs_goes_elsewhere(
    server: Server, other: Server, quick: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("arl.engine.client.health._PROBE_TIMEOUT_S", 600.0)  # it does not take failed probes
    server.faults.extend(["hang", "hang"])
    async with over(server, other, request_timeout_s=600.0) as engine, asyncio.TaskGroup() as group:
        calls = [await server.begin(group, engine.agenerate(ask(session="s"))) for _ in range(2)]
        server.is_silent = True
        for call in calls:
            assert_seamless(await call, 4)
        assert "gives no sign of life" in engine._pool.report()
        server.is_silent = False


async def test_a_server_whose_sign_of_life_was_lost_on_the_way_is_asked_again_and_keeps_its_requests(
    server: Server, other: Server, quick: None, monkeypatch: pytest.MonkeyPatch
):
    async with over(server, other) as engine, asyncio.TaskGroup() as group:
        server.is_automatic = False
        call = await server.begin(group, engine.agenerate(ask(session="s")))
        server.lost.append("model_info")
        await server.until(lambda: not server.lost)
        monkeypatch.setattr("arl.engine.client.watchdog._SILENCE_S", 600.0)  # what is asked from now on is answered
        await server.until(lambda: server.names(without=()).count("model_info") > 20)
        server.advance(4)
        await call
        assert engine.counters()["servers/fences"] == 0
        assert len(other.requests) == 0


async def test_too_few_servers_for_too_long_end_the_run_with_each_servers_reason(server: Server, other: Server):
    async def run() -> None:
        async with over(server, other, update_timeout_s=0.2, min_servers=2) as engine:
            await server.stop()
            engine._upkeep.fence(engine._pool.servers[0], "it burned")
            await asyncio.Event().wait()

    with pytest.raises(ServerError, match=r"1 of 2 servers serve, .* than engine\.min_servers=2, .* 0\.2 s") as raised:
        await run()
    assert f"{server.address} is fenced (it burned; now: " in str(raised.value)


def test_a_short_loss_of_servers_ends_nothing_and_a_long_one_the_run():
    async def hold(lost_s: float) -> None:
        pool, config = ServerPool(0), ClientConfig(min_servers=2)
        servers = [pool.join(SGLangClient(cast(Any, None), f"http://127.0.0.1:{i}")) for i in range(2)]
        for server in servers:
            pool.admit(server)
        async with asyncio.TaskGroup() as group:
            floor = group.create_task(ServerWatch(pool, config, None).hold_floor())
            for _ in range(3):
                await asyncio.sleep(1)
                pool.fence(servers[0], "it burned")
                await asyncio.sleep(lost_s)
                pool.admit(servers[0])
            await asyncio.sleep(10 * config.absence_timeout_s)
            floor.cancel()

    longest_s = ClientConfig().absence_timeout_s
    run_in_virtual_time(hold(longest_s - 1))
    with pytest.raises(ExceptionGroup) as raised:
        run_in_virtual_time(hold(longest_s + 10))
    assert "1 of 2 servers serve" in str(raised.value.exceptions[0])


SERVER = """
import http.server, json, sys, time
class Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/update_weights_from_disk": time.sleep(600)
        body = json.dumps({"model_path": "m"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    do_POST = do_GET
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""


@pytest.fixture
def play(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """SERVER stands for arl's own servers. It never ends a load."""

    def command(model: str, config: LocalEngineConfig, host: str, port: int) -> list[str]:
        return [sys.executable, "-c", SERVER, str(port)]

    monkeypatch.setattr(server_processes, "_local_command", command)


@pytest.mark.parametrize("is_hung", [True, False])
async def test_a_started_server_that_hangs_is_killed_and_started_again_unless_it_hangs_for_a_moment(
    tmp_path: Path, play: None, monkeypatch: pytest.MonkeyPatch, is_hung: bool
):
    if not is_hung:
        monkeypatch.setattr("arl.engine.client.watchdog._HUNG_S", 600.0)
    async with started_here("m", LocalEngineConfig(num_servers=2), tmp_path) as servers:
        config = ClientConfig(min_servers=2)
        async with RemoteInferenceEngine(servers.addresses, config, processes=servers) as engine, asyncio.timeout(20):
            process = servers._servers[0].process
            assert process is not None
            os.kill(process.pid, signal.SIGSTOP)
            while not engine.counters()["servers/fenced"]:
                await engine._pool.changed()
            if not is_hung:
                while not engine._pool.servers[0].probed:  # noqa: ASYNC110 - a failed probe sets no event
                    await asyncio.sleep(0.01)
                os.kill(process.pid, signal.SIGCONT)
            while engine.counters()["servers/fenced"]:
                await engine._pool.changed()
                await asyncio.sleep(0)
            if is_hung:
                assert "SIGKILL" in process.how_it_ended()
            assert engine.counters()["servers/restarts"] == is_hung
            assert engine.counters()["servers/serving"] == 2


async def test_a_started_server_that_loads_too_slowly_each_time_is_given_up_with_the_setting_to_change(
    server: Server, tmp_path: Path, play: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server_processes, "_MAX_RESTARTS", 1)
    # Nor does it earn new restarts by living on behind its fence.
    monkeypatch.setattr(server_processes, "_STEADY_S", 0.0)
    remedy = r"every server that arl started died(.|\n)*did not load version 1 within 0\.3 s.*engine\.update_timeout_s"

    async def run() -> None:
        async with started_here("m", LocalEngineConfig(), tmp_path) as servers:
            addresses, config = [*servers.addresses, server.address], ClientConfig(update_timeout_s=0.3)
            async with RemoteInferenceEngine(addresses, config, processes=servers) as engine:
                await engine.update_weights(weights(1))
                await asyncio.Event().wait()

    with pytest.raises(ServerError, match=remedy):
        await run()
