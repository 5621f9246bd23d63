"""What Prometheus scrapes: valid OpenMetrics with arl's own numbers, from an endpoint that only reads."""

import asyncio
import re
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from free_port import free_port
from one_turn import OneTurn
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as plain
from training.trainer_run import running

from arl.api.errors import ConfigError
from arl.api.settings.run import LogConfig
from arl.api.version import install_command
from arl.training import prometheus
from arl.training.prometheus import check_metrics_address, gauge_name
from arl.training.trainer import Trainer

OPEN = {"Accept": "application/openmetrics-text; version=1.0.0"}
GUIDE = (Path(__file__).parents[2] / "docs" / "running.md").read_text()


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "_FRESH_S", 0.0)


@asynccontextmanager
async def scraped(run_dir: Path, **settings: Any) -> AsyncIterator[tuple[Trainer, str]]:
    """A run over fakes, and the address of its metrics."""
    address = f"127.0.0.1:{free_port()}"
    log = {"metrics_address": address}
    workflow = OneTurn(lambda _: {"rewards": {"form": 0.25, 'quoted "part"': 1.0}, "metrics": {"turns": 2.0}})
    async with running(run_dir, workflow=workflow, log=log, **settings) as trainer:
        yield trainer, f"http://{address}/metrics"


async def get(url: str, headers: dict[str, str] = OPEN) -> tuple[int, str, str]:
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
        return answer.status, answer.headers["Content-Type"], await answer.text()


async def samples(url: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    _, _, text = await get(url)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in open_metrics(text)
        for sample in family.samples
    }


def named(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


async def test_a_scrape_has_the_last_steps_metrics_and_the_runs_state_under_valid_names(tmp_path: Path) -> None:
    async with scraped(tmp_path, evaluate=True, steps=3) as (trainer, url):
        begun = await samples(url)
        assert begun[named("arl_steps")] == 3
        assert named("arl_reward") not in begun
        steps = [step async for step in trainer]
        evaluation = await trainer.evaluate()
        seen = await samples(url)
    last = steps[-1].metrics
    assert seen[named("arl_reward")] == last["reward"]
    assert seen[named("arl_staleness_max")] == last["staleness/max"]
    assert seen[named("arl_time_wait_seconds")] == last["time/wait_s"]
    assert seen[named("arl_reward_part", part="form")] == 0.25
    assert seen[named("arl_reward_part", part='quoted "part"')] == 1.0
    assert seen[named("arl_episode_metric", metric="turns")] == 2.0
    assert seen[named("arl_episodes_total", outcome="trained")] == 12
    assert seen[named("arl_version")] == seen[named("arl_published_version")] == 3
    assert seen[named("arl_groups_capacity")] == trainer.buffer.capacity
    assert seen[named("arl_evaluation_reward")] == evaluation.reward
    (info,) = (labels for name, labels in seen if name == "arl_run_info")
    assert {("model", "none"), ("run_dir", str(tmp_path)), ("max_staleness", "2")} <= info
    unlike = {name for name in last if named(f"arl_{gauge_name(name)[0]}", **gauge_name(name)[1]) not in seen}
    totals = {name for name in unlike if named(f"arl_{name}_total") in seen}
    renamed = {"weights/version", *(f"episodes_{outcome}" for outcome in ("trained", "rejected", "dropped", "surplus"))}
    assert unlike - totals - renamed == set(), "a metric of the step is missing"


async def test_whatever_a_workflow_calls_its_numbers_the_name_is_a_label_of_its_own(tmp_path: Path) -> None:
    odd = ["ünï", "日本/語", "a b", "a_b", "a/b", "a\nb", "a\n\nb", "a\\nb", "", "\x00", 'a"b', "part", "max"]
    many = [f"of example {number}" for number in range(1500)]
    odd.append("\ud800")
    address = f"127.0.0.1:{free_port()}"
    workflow = OneTurn(lambda _: {"rewards": dict.fromkeys(odd, 0.5), "metrics": dict.fromkeys(many, 2.0)})
    async with running(tmp_path, workflow=workflow, log={"metrics_address": address}, steps=1) as trainer:
        await anext(trainer)
        for parse, headers in ((open_metrics, OPEN), (plain, {})):
            _, _, text = await get(f"http://{address}/metrics", headers)
            seen = [(s.name, tuple(s.labels.items())) for family in parse(text) for s in family.samples]
            assert len(set(seen)) == len(seen)
            parts = [dict(labels)["part"] for name, labels in seen if name == "arl_reward_part"]
            assert parts == [*odd[:-1], "\\ud800"]
            assert sum(name == "arl_episode_metric" for name, _ in seen) == 1000


async def test_counters_and_groups_move_between_two_steps(tmp_path: Path) -> None:
    async with scraped(tmp_path, steps=9) as (trainer, url):
        await anext(trainer)
        trainer.last_step = None  # only what is live
        while trainer.buffer.num_finished < trainer.buffer.capacity:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0)
        seen = await samples(url)
        states = {state: seen[named("arl_groups", state=state)] for state in ("running", "finished", "taken")}
        assert states == {"running": 0, "finished": trainer.buffer.capacity, "taken": 0}
        assert seen[named("arl_groups_finished_total")] == trainer.rollout.counters()["groups_finished"]
        assert seen[named("arl_groups_charged")] == sum(states.values())
        assert seen[named("arl_since_step_seconds")] >= 0


async def test_a_client_that_does_not_ask_for_open_metrics_gets_the_older_text(tmp_path: Path) -> None:
    async with scraped(tmp_path, steps=1) as (trainer, url):
        await anext(trainer)
        status, kind, text = await get(url, {})
        assert (status, kind.partition(";")[0]) == (200, "text/plain")
        assert "arl_reward" in {family.name for family in plain(text)}
        _, kind, text = await get(url)
        assert kind.startswith("application/openmetrics-text; version=1.0.0; charset=utf-8")
        assert text.endswith("# EOF\n")


async def test_the_disk_that_is_used_is_there_after_a_scan(tmp_path: Path) -> None:
    async with scraped(tmp_path, steps=1) as (trainer, url):
        await trainer.save()
        (tmp_path / "logs").mkdir(exist_ok=True)
        (tmp_path / "logs" / "a.log").write_bytes(bytes(500))
        while named("arl_disk_bytes", part="logs") not in (seen := await samples(url)):  # noqa: ASYNC110 - a scrape asks
            await asyncio.sleep(0)
        assert seen[named("arl_disk_bytes", part="logs")] == sum(
            f.stat().st_size for f in (tmp_path / "logs").iterdir()
        )


async def test_a_key_is_asked_for_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARL_METRICS_KEY", "secret")
    async with scraped(tmp_path) as (_, url):
        for sent in ({}, {"Authorization": "Bearer wrong"}):
            assert (await get(url, {**OPEN, **sent}))[0] == 401
        status, _, text = await get(url, {**OPEN, "Authorization": "Bearer secret"})
        assert (status, "secret" in text) == (200, False)


async def test_a_scrape_that_fails_changes_nothing_for_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "_add_live", lambda *_: {}["no such number"])
    async with scraped(tmp_path, steps=2) as (trainer, url):
        await anext(trainer)
        assert (await get(url))[0] == 500
        assert (await anext(trainer)).version == 2


@pytest.mark.parametrize("address", ["9400", "127.0.0.1", "127.0.0.1:0", "a:99999", "http://a:9400", "u@a:9400", "a:b"])
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    with pytest.raises(ValueError, match=r"write HOST:PORT, such as 127\.0\.0\.1:9400"):
        LogConfig(metrics_address=address)
    assert LogConfig(metrics_address="[::1]:9400").metrics_host_and_port == ("::1", 9400)


async def test_a_taken_port_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = "{}:{}".format(*taken.getsockname())
        with pytest.raises(ConfigError, match=rf"log\.metrics_address: cannot listen on {address}: Address already in"):
            async with running(tmp_path, log={"metrics_address": address}):
                pass


def test_an_address_beyond_loopback_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    log = LogConfig(metrics_address=f"0.0.0.0:{free_port()}")
    with pytest.raises(ConfigError, match=r"open to other machines; set ARL_METRICS_KEY"):
        check_metrics_address(log)
    monkeypatch.setenv("ARL_METRICS_KEY", "secret")
    check_metrics_address(log)
    check_metrics_address(LogConfig())


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=re.escape(install_command("prometheus"))):
        check_metrics_address(LogConfig(metrics_address="127.0.0.1:9400"))


async def test_the_guides_table_names_what_is_live(tmp_path: Path) -> None:
    """The others are the step's metrics by another name."""
    async with scraped(tmp_path, evaluate=True, steps=1) as (trainer, url):
        await trainer.evaluate()
        await get(url)
        live = {name for name, _ in await samples(url)}
        await trainer.save()
    listed = set(re.findall(r"`(arl_\w+)", GUIDE[GUIDE.index("## Prometheus") : GUIDE.index("## How a run ended")]))
    counters = {name for name in live if name.removeprefix("arl_").removesuffix("_total") in trainer.rollout.counters()}
    assert live - counters - listed - {"arl_event_loop_lag_seconds", "arl_disk_bytes"} == set()
    assert {name for name in listed if name not in live} <= {
        "arl_reward", "arl_staleness_max", "arl_time_wait_seconds", "arl_samples_per_second", "arl_reward_part",
        "arl_episode_metric", "arl_by_staleness_ratio", "arl_servers", "arl_servers_fences_total", "arl_disk_bytes",
        "arl_task_reward", "arl_servers_failed_requests_total", "arl_servers_restarts_total",
    }  # fmt: skip
