"""`arl doctor` names the fault that was planted in a server, and accuses no healthy one, whatever the settings."""

import asyncio
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from observe.doctor.conftest import served
from observe.doctor.faulty_server import FAULTS, FaultyServer
from observe.doctor.planted import (
    NAMED,
    OF_ADAPTERS,
    OF_MIXTURES,
    OF_TRUNCATION,
    OPTIONS,
    SETTINGS_OF_SGLANG,
    SHAPE,
    TRUNCATED,
    USUAL,
    config_of,
    diagnosis_of,
    first_fault,
    planted,
)

from arl.api.settings.engines import (
    AdapterWeightsConfig,
    DiskWeightsConfig,
    DistributedWeightsConfig,
    LoRAConfig,
    TrainConfig,
)
from arl.api.types import SamplingParams
from arl.engine.tiny import write_tiny_model
from arl.observe.doctor.causes import CAUSES

PAGE = Path(__file__).parents[3] / "docs" / "doctor.md"
QUICK = (
    "template_with_a_default_system_prompt",
    "one_layer_not_updated",
    "packed_linear_layers",
    "labels_change_two_tokens_early",
    "sampled_at_temperature_1",
)
"""Of each kind one. The others are marked slow: each is a whole examination, of a second or two."""


def rows(heading: str) -> list[tuple[str, ...]]:
    """The cells of the table under a heading of docs/doctor.md, without its head."""
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = re.findall(r"^\| (.+) \|$", section, re.MULTILINE)
    return [tuple(line.split(" | ")) for line in lines[1:]]


def test_the_page_lists_the_planted_faults_and_their_causes() -> None:
    assert {*NAMED} == {*FAULTS, *OPTIONS}
    assert rows("Planted faults") == [(name.replace("_", " "), cause) for name, cause in NAMED.items()]


def test_the_page_lists_what_was_planted_in_sglang() -> None:
    assert rows("Planted in SGLang") == [*SETTINGS_OF_SGLANG.items()]


def test_the_page_lists_all_causes() -> None:
    assert rows("What it can name") == [(one.name, one.means, one.mend) for one in CAUSES.values()]


def cases() -> list[Any]:
    return [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in NAMED]


@pytest.mark.parametrize("name", cases())
def test_the_first_named_cause_is_the_planted_one(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    more: dict[str, Any] = {}
    if name in OF_ADAPTERS:
        more = {"train": TrainConfig(lora=LoRAConfig(rank=4, alpha=8)), "weights": AdapterWeightsConfig()}
    sampling = TRUNCATED if name in OF_TRUNCATION else USUAL
    kind = "bfloat16_server" if name in OPTIONS else "mixture_server" if name in OF_MIXTURES else "server"
    server: FaultyServer = request.getfixturevalue(kind)
    model: Path = request.getfixturevalue("mixture" if name in OF_MIXTURES else "model")
    with planted(server, "" if name in OPTIONS else name, model):
        found = asyncio.run(first_fault(config_of(model, server, tmp_path, **more), sampling))
    assert found is not None
    assert found.cause is not None
    assert found.cause.name == NAMED[name], found


TRANSPORTS: dict[str, Any] = {
    "disk": DiskWeightsConfig(),
    "distributed": DistributedWeightsConfig(),
    "adapter": AdapterWeightsConfig(),
    "merged adapter": DiskWeightsConfig(),
}
SAMPLINGS = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6, max_new_tokens=100),
    SamplingParams(temperature=1.3),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, top_p=0.9),
    SamplingParams(top_k=20),
    SamplingParams(min_p=0.05),
)
PAUSES = ("in_place", "retract", "abort")
DTYPES = ("float32", "float32", "bfloat16", "float32")


def examined(number: int, model: Path, server: FaultyServer, run_dir: Path) -> None:
    """A healthy server, with settings that this number chooses: each value of each, in changing company."""
    transport, sampling, pause, dtype = (
        values[number % len(values)] for values in (list(TRANSPORTS), SAMPLINGS, PAUSES, DTYPES)
    )
    train = TrainConfig(
        dtype=dtype,
        lora=LoRAConfig(rank=4, alpha=8) if "adapter" in transport else None,
        share_prefixes=bool(number % 3),
        max_tokens_per_microbatch=64 if number % 2 else 8192,
    )
    config = config_of(model, server, run_dir, train=train, weights=TRANSPORTS[transport], seed=number)
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"pause_mode": pause})})
    with planted(server, "", model):
        diagnosis = asyncio.run(diagnosis_of(config, sampling))
    assert diagnosis.is_healthy, diagnosis.verdict
    assert sum(one.outcome == "ok" for one in diagnosis.checked) > 8


@pytest.mark.parametrize("number", range(3))
def test_no_healthy_server_is_accused(
    number: int, model: Path, server: FaultyServer, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    is_exact = DTYPES[number] == "float32"
    examined(number, model, server if is_exact else request.getfixturevalue("bfloat16_server"), tmp_path)


def test_a_healthy_server_with_a_context_of_48_tokens_is_not_accused(
    model: Path, server: FaultyServer, tmp_path: Path
) -> None:
    sampling = SamplingParams(temperature=0.8, max_new_tokens=16)
    with planted(server, "context_of_48_tokens", model):
        diagnosis = asyncio.run(diagnosis_of(config_of(model, server, tmp_path), sampling))
    assert diagnosis.is_healthy, diagnosis.verdict
    assert [one.check for one in diagnosis.checked if one.outcome == "skipped"] == ["routing", "truncation"]


@pytest.mark.slow
def test_no_healthy_mixture_of_experts_is_accused(mixture: Path, mixture_server: FaultyServer, tmp_path: Path) -> None:
    examined(4, mixture, mixture_server, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_healthy_servers_are_not_accused(tmp_path: Path) -> None:
    """Five models, each served in both dtypes."""
    for seed, dtype in itertools.product(range(5), ("float32", "bfloat16")):
        model = write_tiny_model(tmp_path / f"model-{seed}-{dtype}", shape=SHAPE, seed=seed)
        with served(model, "--dtype", dtype) as server:
            for number in range(seed, 50, 5):
                if DTYPES[number % len(DTYPES)] == dtype:
                    examined(number, model, server, tmp_path / f"run-{number}")
