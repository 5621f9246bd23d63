"""`--dry-run` prints the table, starts nothing and leaves nothing; a real start checks the same and prints it, too."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from engine.client.protocol_server import Server
from engine.weights.loaders import mirror_here
from free_port import free_port
from one_turn import OneTurn
from scripted_launch import small, use_fakes, use_scripted_training

import arl
import arl.run.launch
import arl.run.learner
import arl.run.servers
from arl.api.engine import ServedModel
from arl.api.errors import ConfigError, ProcessLostError, ServerError
from arl.api.events import RunPlaced
from arl.api.fakes import ScriptedEngine, ScriptedTrainEngine
from arl.api.settings.run import Config
from arl.cluster.node_checks import NodeReport
from arl.engine.client.servers_file import SERVERS
from arl.observe.events.run_record import RunRecord
from arl.run.dry_run import _asked, _own_directories, rehearse
from arl.run.engines import check_start
from arl.run.launch import launch
from arl.training.run_dir import RunLock
from arl.training.run_result import how_it_ended


def sglang(*addresses: str) -> dict[str, Any]:
    return {"kind": "sglang", "addresses": addresses}


async def mistakes_of(tmp_path: Path, **settings: Any) -> list[str]:
    table = await rehearse(Config.model_validate({"model": "none", "run_dir": tmp_path / "run", **settings}))
    return table.mistakes


def test_a_script_prints_the_table_and_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arl.run_script(_unreachable, Config, ["--model", "none", "--dry-run", "--run_dir", str(tmp_path / "a" / "run")])
    said = capsys.readouterr().out
    assert "what runs where:\n  controller" in said
    assert f"process {os.getpid()}" in said
    assert said.endswith("no mistakes found; nothing was started\n")
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_ends_it_with_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--dry-run", "--model", "none", "--run_dir", "/proc/run", "--engine.kind", "sglang_processes"]
    with pytest.raises(SystemExit, match="1"):
        arl.run_script(_unreachable, Config, [*flags, "--train.device", "cuda", "--log.format", "json"])
    (line,) = capsys.readouterr().out.splitlines()
    record = json.loads(line)
    assert record["kind"] == "placement"
    assert any(part["part"] == "trainer" and part["device"] == "GPU 0" for part in record["parts"])
    assert any("set engine.first_gpu to 1" in mistake for mistake in record["mistakes"])
    assert any("run_dir is /proc/run" in mistake for mistake in record["mistakes"])


async def _unreachable(config: Config) -> Any:
    raise AssertionError("it ran")


async def test_a_notebook_gets_the_table(tmp_path: Path) -> None:
    table = arl.dry_run(Config(model="<none>", run_dir=tmp_path / "run"))  # while an event loop runs
    assert table.mistakes == []
    assert "controller" in repr(table)
    assert table._repr_html_().startswith("<pre>what runs where")


async def test_servers_are_asked_and_left_as_they_are(tmp_path: Path) -> None:
    async with Server() as server, Server() as other:
        other.info["model_type"] = server.info["model_type"] = "qwen3"
        server.tells["server_info"] = {"device": "cuda", "tp_size": 2, "base_gpu_id": 4}
        gone = f"http://127.0.0.1:{free_port()}"
        settings = {"run_dir": tmp_path / "run", "model": "none", "engine": sglang(server.address, other.address, gone)}
        table = await rehearse(Config.model_validate(settings))
        (silent,) = table.mistakes
        assert silent.startswith(gone)
        assert silent.endswith("start the server, or take it out")
        devices = {part.address: part.device for part in table.parts if part.part == "server"}
        assert devices == {server.address: "GPUs 4-5", other.address: "", gone: ""}
        assert not {"pause_generation", "continue_generation"} & {name for name, _ in server.calls}
        other.info["model_type"] = "llama"
        (_, different) = await mistakes_of(tmp_path, engine=settings["engine"])
        assert "do not serve the same model: the model type is qwen3" in different


async def test_a_servers_file_may_name_servers_that_come_later(tmp_path: Path) -> None:
    run_dir, gone = tmp_path / "run", f"http://127.0.0.1:{free_port()}"
    run_dir.mkdir()
    async with Server() as server:
        (run_dir / SERVERS).write_text(f"{server.address}\n{gone}\n")
        settings: dict[str, Any] = {"model": "none", "run_dir": run_dir, "engine": sglang("http://192.0.2.77:1")}
        table = await rehearse(Config.model_validate(settings))
        assert [part.address for part in table.parts if part.part == "server"] == [server.address, gone]
        assert table.mistakes == []
        assert table.warnings[0].startswith(gone)
        (run_dir / SERVERS).write_text(gone)
        (mistake,) = (await rehearse(Config.model_validate(settings))).mistakes
        assert mistake.startswith(gone)


def test_what_cannot_be_looked_at_from_here_is_said(tmp_path: Path) -> None:
    far = "http://192.0.2.77:1"
    settings: dict[str, Any] = {"model": "none", "run_dir": tmp_path / "run", "engine": sglang(far)}
    shared = Config.model_validate({**settings, "weights": {"directory": tmp_path / "weights"}})
    (_, weights), _ = _own_directories(shared)
    assert list(weights.seen.values()) == ["yes", "not checked (no Ray node there to look from)"]
    assert list(weights.seen)[1] == "192.0.2.77"
    (run_dir,), _ = _own_directories(Config.model_validate(settings))  # where weights for other machines lie by default
    assert run_dir.seen["192.0.2.77"] == "not checked (no Ray node there to look from)"
    report = _asked(Config.model_validate({**settings, "weights": {"transport": "distributed"}}))
    assert "not checked whether it reaches the trainer" in report.notes[far]
    assert list(tmp_path.iterdir()) == []


async def test_mirrors_are_asked(tmp_path: Path) -> None:
    async with Server() as server, mirror_here(tmp_path / "mirror") as mirror:
        gone = f"http://127.0.0.1:{free_port()}"
        engine = sglang(server.address)
        there = {"transport": "delta", "mirrors": {server.address: mirror.address}}
        assert await mistakes_of(tmp_path, engine=engine, weights=there) == []
        config = Config.model_validate(
            {"model": "none", "engine": engine, "weights": there | {"mirrors": {server.address: gone}}}
        )
        with pytest.raises(ConfigError, match=f"the mirror at {gone} does not answer: .*; start it"):
            await check_start(config)


async def test_a_cluster_that_is_not_there_is_a_mistake(tmp_path: Path) -> None:
    (text,) = await mistakes_of(tmp_path, train={"num_ranks": 2, "ray_address": "127.0.0.1:1"})
    assert text.startswith("there is no Ray cluster at train.ray_address=127.0.0.1:1")


async def test_a_run_that_trains_there_is_a_mistake(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "run")
    lock.take()
    try:
        (text,) = await mistakes_of(tmp_path)
        assert f"another run trains in {tmp_path}/run: process {os.getpid()}" in text
    finally:
        lock.release()


async def test_a_run_shows_and_records_what_runs_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_fakes(monkeypatch, ScriptedEngine(lambda request: (7, 8, 9)))
    config = small(tmp_path / "run", log={"console": True})
    async with launch(config, workflow=OneTurn(), dataset=[{"number": 1}] * 4) as trainer:
        async for _ in trainer:
            break
    lines = [line for line in capsys.readouterr().out.splitlines() if " trainer on cpu" in line]
    assert len(lines) == 1
    records = [record for _, record in RunRecord(config.run_dir).files.new_records()]
    (placed,) = [record for record in records if isinstance(record, RunPlaced)]
    assert [part.part for part in placed.parts] == ["controller", "trainer"]  # the fake engine has no servers
    assert placed.parts[1].pid == os.getpid()


async def test_a_start_looks_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arl.run.launch, "open_engines", _unreachable)
    config = small(tmp_path, train={"device": "cuda"}, engine={"kind": "sglang_processes"})
    with pytest.raises(ConfigError, match=r"set engine\.first_gpu to 1.*\n.*--dry-run"):
        async with launch(config, workflow=OneTurn(), dataset=[{"number": 1}]):
            raise AssertionError("it started")


async def test_a_recovery_takes_the_nodes_that_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, losses = list[Config](), [ProcessLostError("a node was lost")]

    def looked(config: Config) -> NodeReport:
        looks.append(config)
        return NodeReport()

    class Lossy(ScriptedTrainEngine):
        def train_batch(self, *args: Any) -> Any:
            if losses:
                raise losses.pop()
            return super().train_batch(*args)

    monkeypatch.setattr(arl.run.learner, "_checked_nodes", looked)
    use_fakes(monkeypatch, ScriptedEngine(lambda request: (7, 8, 9)), load=lambda *_, **__: Lossy())
    async with launch(small(tmp_path), workflow=OneTurn(), dataset=[{"number": 1}] * 4) as trainer:
        assert [step.version async for step in trainer] == [1, 2]
    assert losses == []
    assert len(looks) == 1


async def test_a_run_of_several_machines_that_fails_points_to_the_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_scripted_training(monkeypatch)
    monkeypatch.setattr(arl.run.servers, "served_model", lambda name, **_: ServedModel(name=name))
    config = small(tmp_path, engine=sglang(f"http://127.0.0.1:{free_port()}"))
    with pytest.raises(ServerError):
        async with launch(config, workflow=OneTurn(), dataset=[{"number": 1}]):
            raise AssertionError("it started")
    end = how_it_ended(tmp_path)
    assert end is not None
    assert "--dry-run looks for mistakes in what runs where" in end.what_next
