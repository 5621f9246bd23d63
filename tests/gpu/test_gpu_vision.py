"""A step with images on a GPU is the step that a CPU takes."""

from pathlib import Path
from typing import Any

import pytest
from engine.fsdp.train_models import MakeEngine
from engine.fsdp.train_sequences import LOSS, assert_same_rows
from engine.fsdp.vision_sequences import FAMILIES, seeing_sequences, write_seeing_model

from arl.data.image_processor import ImageProcessor


@pytest.mark.parametrize("options", [{}, {"freeze_vision_tower": True}, {"cpu_offload": True}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_with_images_on_a_gpu_equals_one_on_a_cpu(
    make_engine: MakeEngine, tmp_path: Path, family: Any, options: dict[str, Any]
) -> None:
    model = write_seeing_model(tmp_path / "model", family)
    sequences = seeing_sequences(ImageProcessor(model))
    on_cpu = {name: value for name, value in options.items() if name != "cpu_offload"}
    ours, theirs = make_engine(model, **options), make_engine(model, device="cpu", **on_cpu)
    for _ in range(2):
        metrics, expected = (engine.train_batch([sequences], LOSS) for engine in (ours, theirs))
        assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert_same_rows(ours.forward(sequences), theirs.forward(sequences), 1e-3)
