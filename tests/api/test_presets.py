"""Presets are complete, valid, cited, and changed field by field."""

import re
from typing import Any

import pytest

from arl.api.algorithm import AlgorithmConfig, preset
from arl.api.errors import ConfigError
from arl.api.presets import BASE, PRESETS

CONSTANTS: list[tuple[str, str, Any]] = [
    ("grpo", "kl.coefficient", 0.04),
    ("dr_grpo", "advantage.scale", "none"),
    ("dapo", "loss.clip_high", 0.28),
    ("dapo", "overlong.buffer_tokens", 4096),
    ("gspo", "loss.clip_low", 3e-4),
    ("gspo", "loss.clip_high", 4e-4),
    ("gmpo", "loss.clip_high", 0.4),
    ("cispo", "loss.clip_low", None),
    ("sapo", "loss.tau_negative", 1.05),
    ("rloo", "advantage.baseline", "leave_one_out"),
    ("reinforce++", "advantage.scale", "batch_std"),
    ("ppo", "advantage.lam", 0.95),
    ("m2po", "selection.limit", 0.04),
    ("icepop", "correction.lower", 0.5),
    ("tis", "correction.upper", 2.0),
    ("mis", "correction.level", "sequence"),
    ("clip_cov", "selection.share", 2e-4),
    ("kl_cov", "selection.share", 2e-3),
    ("dppo_tv", "loss.delta", 0.15),
    ("gigpo", "advantage.turn_discount", 0.95),
]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_every_field_is_valid_names_its_paper_and_says_in_a_sentence_what_it_is_for(name: str) -> None:
    about = PRESETS[name]
    assert about.settings.keys() == AlgorithmConfig.model_fields.keys() - {"preset"}
    assert preset(name).preset == name
    assert re.fullmatch(r"\d{4}\.\d{5}|\w+ et al\. \d{4}", about.paper)
    assert re.fullmatch(r"[^\n]{20,115}\.", about.about)


@pytest.mark.parametrize(("name", "path", "value"), CONSTANTS)
def test_a_preset_has_the_constants_of_its_paper(name: str, path: str, value: Any) -> None:
    section, field = path.split(".")
    assert getattr(getattr(preset(name), section), field) == value


def test_presets_differ_from_each_other() -> None:
    said: dict[str, str] = {}
    for name in PRESETS:
        settings = preset(name).model_dump_json(exclude={"preset"})
        assert settings not in said, f"{name} is {said[settings]}"
        said[settings] = name


def test_the_default_is_a_preset_that_differs_nowhere_from_the_base() -> None:
    assert AlgorithmConfig.model_validate({}) == preset("decoupled_ppo")
    assert PRESETS["decoupled_ppo"].settings == BASE


def test_a_field_beside_a_preset_changes_that_field_alone() -> None:
    changed = preset("dapo", loss={"clip_low": 0.1}, epochs=2)
    expected = preset("dapo").model_dump()
    expected["loss"]["clip_low"], expected["epochs"] = 0.1, 2
    assert changed.model_dump() == expected


def test_a_section_of_another_kind_than_the_presets_has_its_own_defaults() -> None:
    defaults = {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
    assert preset("gspo", loss={"kind": "ppo"}).loss.model_dump() == defaults


@pytest.mark.parametrize(
    ("name", "close"), [("gropo", "did you mean grpo"), ("reinforce+", "reinforce"), (3, "named 3")]
)
def test_a_preset_that_does_not_exist_is_an_error_that_names_close_ones(name: Any, close: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(close)):
        preset(name)
