"""DiskTransport: what is written where, under which names, and when it is gone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from arl.api.config import AdapterWeightsConfig, Config
from arl.api.engine import UpdateStats, WeightUpdate
from arl.api.errors import ServerError, TransportError
from arl.api.scripted import ScriptedEngine, ScriptedTrainEngine
from arl.engine.client.processes import adapter_options
from arl.engine.weights.disk import DiskTransport


@dataclass
class Adapters:
    """A snapshot with an adapter."""

    version: int
    is_released: bool = False

    def write(self, directory: Path) -> int:
        directory.mkdir()
        return (directory / "adapter_config.json").write_text(f"of version {self.version}")

    def release(self) -> None:
        self.is_released = True


class Engine(ScriptedTrainEngine):
    """A train engine with adapters; it keeps its snapshots."""

    def __init__(self) -> None:
        super().__init__()
        self.snapshots: list[Adapters] = []

    def snapshot_adapter(self) -> Adapters:
        self.snapshots.append(Adapters(len(self.snapshots)))
        return self.snapshots[-1]


@dataclass
class Servers(ScriptedEngine):
    """An inference engine of one server, which notes what it is given, and may refuse it."""

    address: str = "http://server"
    loaded: dict[str, str] = field(default_factory=dict[str, str])
    directories: list[Path] = field(default_factory=list[Path])
    refuses: bool = False

    def __post_init__(self) -> None:
        super().__init__(lambda request: ())

    async def update_weights(self, update: WeightUpdate) -> UpdateStats:
        await update.prepare(self)  # pyright: ignore[reportArgumentType]
        return await super().update_weights(update)

    async def load_adapter(self, name: str, directory: Path) -> None:
        if self.refuses:
            raise ServerError("its rank is too large")
        self.directories.append(directory)
        self.loaded[name] = (directory / "adapter_config.json").read_text()


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[DiskTransport]:
    transport = DiskTransport(AdapterWeightsConfig(directory=tmp_path / "weights"), tmp_path)
    yield transport
    transport.close()


async def test_each_version_is_an_adapter_of_its_own_name(transport: DiskTransport) -> None:
    engine, servers = Engine(), Servers()
    updates = [transport.snapshot(engine) for _ in range(3)]
    for update in updates:
        await transport.deliver(update, servers)
    (run,) = {name.rpartition("-v")[0] for name in servers.loaded}
    assert servers.loaded == {f"{run}-v{version}": f"of version {version}" for version in range(3)}
    assert [update.adapter for update in updates] == list(servers.loaded)
    assert updates[0].num_bytes == len("of version 0")
    assert all(snapshot.is_released for snapshot in engine.snapshots)


async def test_two_runs_have_no_name_in_common(transport: DiskTransport, tmp_path: Path) -> None:
    other = DiskTransport(AdapterWeightsConfig(directory=tmp_path), tmp_path)
    assert transport.snapshot(Engine()).adapter != other.snapshot(Engine()).adapter
    other.close()


async def test_files_stay_for_servers_that_come_later_until_a_newer_version_is_delivered(
    transport: DiskTransport,
) -> None:
    engine, servers = Engine(), Servers()
    for version in range(2):
        await transport.deliver(transport.snapshot(engine), servers)
        assert [directory.exists() for directory in servers.directories] == [False] * version + [True]
    transport.close()
    assert not any(directory.exists() for directory in servers.directories)


async def test_files_of_a_version_that_was_refused_stay_for_the_next_try(transport: DiskTransport) -> None:
    engine, servers = Engine(), Servers(refuses=True)
    update = transport.snapshot(engine)
    with pytest.raises(ServerError, match="its rank is too large"):
        await transport.deliver(update, servers)
    servers.refuses = False
    await servers.update_weights(update)
    assert list(servers.loaded.values()) == ["of version 0"]


async def test_a_snapshot_that_is_not_delivered_is_let_go_of(transport: DiskTransport) -> None:
    engine = Engine()
    update = transport.snapshot(engine)
    transport.discard(update)
    transport.discard(update)
    assert engine.snapshots[0].is_released


def test_an_engine_without_adapters_is_an_error_that_names_the_setting(transport: DiskTransport) -> None:
    with pytest.raises(TransportError, match=r"ScriptedTrainEngine has no adapters to publish; train with train\.lora"):
        transport.snapshot(ScriptedTrainEngine())


@pytest.mark.parametrize(
    ("lora", "targets"),
    [({"rank": 8}, ["all"]), ({"rank": 8, "target_modules": ["v_proj", "self_attn.q_proj"]}, ["q_proj", "v_proj"])],
)
def test_sglang_servers_are_started_for_the_runs_adapters(lora: dict[str, object], targets: list[str]) -> None:
    settings = {"model": "m", "engine": {"kind": "sglang_processes"}, "train": {"lora": lora}}
    config = Config.model_validate({**settings, "weights": {"transport": "adapter"}, "rollout": {"max_staleness": 4}})
    expected = [
        "--enable-lora",
        "--max-lora-rank",
        "8",
        "--lora-target-modules",
        *targets,
        "--max-loras-per-batch",
        "7",
    ]
    assert adapter_options(config) == expected
    on_cpu = config.model_copy(update={"engine": config.engine.model_copy(update={"gpus_per_server": 0})})
    assert adapter_options(on_cpu) == [*expected, "--lora-backend", "torch_native"]
    assert adapter_options(Config.model_validate(settings)) == []


SGLANG = {"kind": "sglang", "addresses": ["http://a"]}
IMPOSSIBLE = [
    ({"train": {}}, "train.lora is unset, so there are none; set train.lora, or use weights.transport=disk"),
    ({"engine": {"pause_mode": "abort"}}, "engine.pause_mode is abort, but weights.transport=adapter pauses nothing"),
    ({"engine": SGLANG, "train": {"lora": {"target_modules": ["q_proj", "k_proj"]}}}, "lacks v_proj: SGLang holds it"),
    ({"engine": SGLANG, "train": {"lora": {"target_modules": ["mlp.up_proj"]}}}, "lacks gate_proj: SGLang holds it"),
]


@pytest.mark.parametrize(("settings", "sentence"), IMPOSSIBLE, ids=[sentence[:30] for _, sentence in IMPOSSIBLE])
def test_settings_that_cannot_publish_adapters_are_errors(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Config.model_validate({"model": "m", "train": {"lora": {}}, "weights": {"transport": "adapter"}, **settings})


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"], ["gate_proj"], ["o_proj"]])
def test_targets_that_sglang_takes_are_none(targets: object) -> None:
    train = {"lora": {"target_modules": targets}}
    Config.model_validate({"model": "m", "engine": SGLANG, "train": train, "weights": {"transport": "adapter"}})
