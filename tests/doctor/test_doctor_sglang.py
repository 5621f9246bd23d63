"""`arl doctor` on stock SGLang: healthy, and with faults that its own settings make."""

import asyncio
from pathlib import Path

import pytest
from conformance.servers import sglang, sglang_python
from doctor.planted import USUAL, diagnosis_of

from arl.api.config import Config
from arl.api.engine_config import SGLangEngineConfig
from arl.doctor.checked import Diagnosis

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


def diagnosed(model: Path, tmp_path: Path, *options: str) -> Diagnosis:
    sglang_python()
    with sglang(model, tmp_path / "log", *options) as server:
        config = Config(model=str(model), run_dir=tmp_path / "run", engine=SGLangEngineConfig(addresses=(server.url,)))
        return asyncio.run(diagnosis_of(config, USUAL))


def test_healthy_sglang_is_not_accused(model: Path, tmp_path: Path) -> None:
    diagnosis = diagnosed(model, tmp_path, "--context-length", "640")
    assert diagnosis.is_healthy, diagnosis.verdict
    skipped = [one.check for one in diagnosis.checked if one.outcome == "skipped"]
    assert skipped == ["routing"]


def test_logprobs_before_the_temperature_are_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    diagnosis = diagnosed(model, tmp_path, "--context-length", "640")
    assert diagnosis.json_object()["cause"] == "logprobs of another temperature", diagnosis.verdict
