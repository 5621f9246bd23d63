"""`arl doctor` names the fault that was planted in a server."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from observe.doctor.faulty_server import FAULTS, FaultyServer
from observe.doctor.planted import (
    IN_SGLANG,
    NAMED,
    OF_ADAPTERS,
    OF_MIXTURES,
    OF_TRUNCATION,
    OPTIONS,
    SETTINGS_OF_SGLANG,
    TRUNCATED,
    USUAL,
    config_of,
    first_fault,
    planted,
)

from arl.api.settings.engines import AdapterWeightsConfig, LoRAConfig, TrainConfig
from arl.observe.doctor.causes import CAUSES

PAGE = Path(__file__).parents[3] / "docs" / "doctor.md"
QUICK = (
    "template_with_a_default_system_prompt",
    "one_layer_not_updated",
    "packed_linear_layers",
    "labels_change_two_tokens_early",
    "stale_prefix_cache",
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
    in_processes = [name for names in IN_SGLANG.values() for name in names]
    assert rows("Planted in SGLang") == [
        *SETTINGS_OF_SGLANG.items(),
        *((name.replace("_", " "), NAMED[name]) for name in in_processes),
    ]


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
