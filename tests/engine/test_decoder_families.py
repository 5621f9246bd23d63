"""A family of each kind is trained, adapted, served and published as by its own code; `make models` tries all."""

from pathlib import Path

import pytest
from decoder_families import write_family
from measured_families import adapting, publishing, serving, training

KINDS = {
    "qwen3": ("packed", "slots"),
    "gpt_oss": ("packed", "slots"),  # windows and sinks
    "gemma2": ("packed", "slots"),  # both soft-caps
    "deepseek_v3": ("packed", "slots"),  # latent attention, and a saved bias of its routers
    "phi": ("packed", "slots"),  # a head with a bias
    "qwen3_next": ("mixed", "states"),
    "nemotron_h": ("mixed", "states"),
    "lfm2": ("mixed", "states"),
    "mamba2": ("mixed", "states"),  # no attention at all
    "stablelm": ("mixed", "slots"),  # keyword arguments do not reach its attention
    "llama4_text": ("apart", "own"),  # chunks that its mask alone has
    "bloom": ("apart", "own"),  # attention of its own
    "mistral3": ("packed", "slots"),  # a model that sees, of texts
    "qwen3_5": ("mixed", "states"),
}


@pytest.mark.parametrize("family", KINDS)
def test_a_family_is_trained_adapted_served_and_published_as_its_own_code_computes(family: str, tmp_path: Path):
    write_family(family, directory := tmp_path / "model")
    trained, served = training(directory), serving(directory)
    assert (trained.way, served.way.split()[0]) == KINDS[family]
    assert trained.nats <= 1e-4
    assert trained.gradient is not None
    assert trained.gradient <= 1e-4
    assert served.nats <= 1e-3
    assert adapting(directory).nats <= 1e-4
    assert publishing(directory).nats <= 1e-4
