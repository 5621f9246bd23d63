"""`arl doctor` accuses no healthy server, whatever the settings."""

import asyncio
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from observe.doctor.conftest import served
from observe.doctor.faulty_server import FaultyServer
from observe.doctor.planted import SHAPE, config_of, diagnosis_of, planted

from arl.api.settings.engines import (
    AdapterWeightsConfig,
    DiskWeightsConfig,
    DistributedWeightsConfig,
    LoRAConfig,
    TrainConfig,
    WeightsConfig,
)
from arl.api.types import SamplingParams
from arl.engine.tiny import write_tiny_model

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
    SamplingParams(min_p=0.05, stop=("x",)),
)
PAUSES = ("in_place", "retract", "abort")


@dataclass(frozen=True)
class Case:
    transport: str
    sampling: SamplingParams
    pause: Any
    dtype: Any
    seed: int

    @property
    def train(self) -> TrainConfig:
        lora = LoRAConfig(rank=4, alpha=8) if "adapter" in self.transport else None
        small = 64 if self.seed % 2 else 8192
        return TrainConfig(
            dtype=self.dtype, lora=lora, share_prefixes=bool(self.seed % 3), max_tokens_per_microbatch=small
        )


def cases(count: int) -> list[Case]:
    """Every value of each setting, in changing company."""
    made = zip(
        itertools.cycle(TRANSPORTS),
        itertools.cycle(SAMPLINGS),
        itertools.cycle(PAUSES),
        itertools.cycle(["float32", "float32", "bfloat16", "float32"]),
        range(count),
        strict=False,
    )
    return [Case(*values) for values in made]


def examined(case: Case, model: Path, server: FaultyServer, run_dir: Path) -> None:
    weights: WeightsConfig = TRANSPORTS[case.transport]
    config = config_of(model, server, run_dir, train=case.train, weights=weights, seed=case.seed)
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"pause_mode": case.pause})})
    with planted(server, "", model):
        diagnosis = asyncio.run(diagnosis_of(config, case.sampling))
    assert diagnosis.is_healthy, diagnosis.verdict
    assert sum(one.outcome == "ok" for one in diagnosis.checked) > 15


@pytest.mark.parametrize("case", cases(3), ids=lambda case: f"{case.transport}-{case.dtype}")
def test_no_healthy_server_is_accused(
    case: Case, model: Path, server: FaultyServer, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    is_exact = case.dtype == "float32"
    examined(case, model, server if is_exact else request.getfixturevalue("bfloat16_server"), tmp_path)


def test_a_healthy_server_with_a_context_of_48_tokens_is_not_accused(
    model: Path, server: FaultyServer, tmp_path: Path
) -> None:
    with planted(server, "context_of_48_tokens", model):
        diagnosis = asyncio.run(
            diagnosis_of(config_of(model, server, tmp_path), SamplingParams(temperature=0.8, max_new_tokens=16))
        )
    assert diagnosis.is_healthy, diagnosis.verdict
    assert [one.check for one in diagnosis.checked if one.outcome == "skipped"] == ["routing"]


@pytest.mark.slow
def test_no_healthy_mixture_of_experts_is_accused(mixture: Path, mixture_server: FaultyServer, tmp_path: Path) -> None:
    examined(Case("disk", SAMPLINGS[4], "retract", "float32", 0), mixture, mixture_server, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_healthy_servers_are_not_accused(tmp_path: Path) -> None:
    """Five models, each served in both dtypes."""
    for number in range(5):
        model = write_tiny_model(tmp_path / f"model-{number}", shape=SHAPE, seed=number)
        mine = cases(50)[number::5]
        for dtype in ("float32", "bfloat16"):
            with served(model, "--dtype", dtype) as server:
                for case in mine:
                    if case.dtype == dtype:
                        examined(case, model, server, tmp_path / f"run-{case.seed}")
