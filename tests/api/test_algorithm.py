"""Settings of an algorithm that contradict each other are refused with the reason; presets are complete and cited."""

import re
from typing import Any

import pytest
from pydantic import ValidationError

from arl.api.errors import ConfigError
from arl.api.settings.algorithm import AlgorithmConfig, preset
from arl.api.settings.presets import BASE, PRESETS
from arl.api.settings.run import Config

IN_REWARD = {"coefficient": 0.1, "place": "reward"}
WHOLE: dict[str, Any] = {"aggregation": "sequence_mean", "weights": ["none"], "rejections": []}
PAIRS = {**WHOLE, "loss": {"kind": "dpo"}, "advantage": {"kind": "pairs"}}
LABELS = {**WHOLE, "loss": {"kind": "kto"}, "advantage": {"kind": "labels"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"advantage": {"kind": "gae"}}, "gae, which needs a critic's values"),
    ({"critic": {}}, "critic is set, but advantage.kind=returns does not use it"),
    ({"reward_model": {}, "advantage": {"kind": "rejection"}}, "advantage.kind=rejection does not use its process"),
    ({"reward_model": {}, "advantage": {"separate_rewards": True}}, "which advantage.separate_rewards ignores"),
    ({"proximal": "bypassed"}, "to weigh by; set weights=[] and rejections=[]"),
    (
        {"proximal": "bypassed", "weights": [], "rejections": [{"level": "sequence", "upper": 2}]},
        "rejections has a part of level sequence, but with proximal=bypassed",
    ),
    ({"weights": []}, "weights is empty, but with proximal=recomputed a token counts by exp(p - b); use weights"),
    ({"weights": [{"level": "token"}, {"level": "none"}]}, "a part of level none beside others"),
    ({"weights": [{"level": "token"}, {"level": "token", "upper": 2}]}, "has two parts of level token, whose product"),
    ({"weights": [{"level": "none", "upper": 2}]}, "weights[0]: level is none, whose weight is 1; it takes no bounds"),
    ({"rejections": ["token"]}, "rejections[0]: 'token' was given for a part of a list; each part is a mapping, such"),
    (
        {"proximal": "approximated", "minibatches": 2, "selection": {"kind": "second_moment"}},
        "selection.kind is second_moment, and",
    ),
    ({"proximal": "approximated", "minibatches": 2, "kl": IN_REWARD}, "kl.place is reward, and proximal=approximated"),
    ({"advantage": {"kind": "rejection"}, "kl": IN_REWARD}, "advantage.kind=rejection compares rewards as they are"),
    ({"kl": IN_REWARD, "advantage": {"separate_rewards": True}}, "scales its coefficient away"),
    ({"dynamic_sampling": True, "advantage": {"baseline": "none"}}, "groups of equal rewards teach something"),
    ({"advantage": {"baseline": "greedy", "separate_rewards": True}}, "a greedy baseline has only one reward"),
    ({"selection": {"kind": "kl_cov"}}, "selection.kind is kl_cov, which holds tokens back by c - p"),
    ({"loss": {"kind": "mirror_descent"}}, "loss.kind is mirror_descent, which pulls back by c - p"),
    ({"proximal": "approximated"}, "with one update per batch p is c, which costs nothing"),
    ({"proximal": "approximated", "minibatches": 2, "advantage": {"kind": "distillation"}}, "advantage.kind is dist"),
    ({"kl": {"coefficient": 0.1, "estimator": "k1"}}, "kl.estimator is k1 in the loss, whose gradient ignores the ref"),
    ({"kl": IN_REWARD, "overlong": {"mask_truncated": True}}, "what overlong.mask_truncated leaves out has no KL"),
    ({"kl": IN_REWARD, "dynamic_sampling": True}, "a group of equal rewards is not equal"),
    ({"weights": [{"level": "token", "lower": 6, "upper": 5}]}, "lower is 6.0; it must be at most upper, which is 5.0"),
    ({"rejections": [{"level": "token"}]}, "neither lower nor upper is set, so nothing is rejected"),
    ({"rejections": [{"level": "geometric", "upper": 2, "veto": True}]}, "level=geometric rejects whole trajectories"),
    (
        {"rejections": [{"level": "sequence", "upper": 2, "outward": True}]},
        "outward is set, which looks at the advantage of single tokens",
    ),
    ({"rejections": [{"level": "token", "upper": 2, "outward": True, "veto": True}]}, "level=token without veto"),
    (
        {"rejections": [{"level": "token", "lower": 1.5, "upper": 2, "outward": True}]},
        "bounds 1.5 and 2.0; 1, where p is b, must lie between them",
    ),
    ({"advantage": {"reward_weights": {"right": 2.0}}}, "reward_weights is set, but separate_rewards is not"),
    ({"advantage": {"kind": "max_likelihood"}, "kl": IN_REWARD}, "advantage.kind=max_likelihood compares rewards as"),
    ({"overlong": {"penalty": 0.5}}, "penalty is 0.5, but max_tokens is not set; set it too"),
    ({"overlong": {"buffer_tokens": 5, "max_tokens": 4}}, "it must be at most max_tokens, 4"),
    ({"loss": {"kind": "gspo", "dual_clip": 3.0}}, "dual_clip is 3.0, which is for kind=ppo; kind is gspo"),
    ({"loss": {"kind": "sapo", "dual_clip": 3.0}}, "loss.dual_clip is not a setting with loss.kind=sapo; allowed"),
    ({"kl": {"estimator": "k2"}}, "kl.estimator is k2, but kl.coefficient is 0"),
    ({"sequence_tokens": 9}, "sequence_tokens is 9, but aggregation=token_mean does not divide by it"),
    ({"loss": {"clip_high": 0.3}}, "loss.clip_high is 0.3, which holds tokens back by c - p, but with one update per"),
    ({"advantage": {"kind": "pairs"}}, "loss.kind is ppo, advantage.kind pairs; dpo and pairs need each other"),
    ({"loss": {"kind": "kto"}}, "loss.kind is kto, advantage.kind returns; kto and labels need each other"),
    ({**PAIRS, "aggregation": "token_mean"}, "loss.kind=dpo is one number for each pair, whatever its length; use agg"),
    ({**PAIRS, "weights": ["token"]}, "a part of level token, but loss.kind=dpo is one number for each pair"),
    ({**PAIRS, "selection": {"kind": "second_moment"}}, "which chooses among losses of tokens, but loss.kind=dpo has"),
    ({**LABELS, "kl": IN_REWARD}, "advantage.kind=labels compares rewards as they are"),
    ({**LABELS, "proximal": "approximated", "minibatches": 2}, "whose reference point is a KL at p, and proximal=appr"),
    (
        {**LABELS, "advantage": {"kind": "labels", "threshold": 0.5}, "dynamic_sampling": True},
        "groups of equal rewards",
    ),
    ({"loss": {"kind": "cispo", "level": "turn"}}, "level is turn, which is for kind=gspo and gmpo; kind is cispo"),
    ({"loss": {"kind": "dppo_tv", "delta": 0.1}}, "loss.delta is 0.1, which holds tokens back by c - p"),
]


@pytest.mark.parametrize(("settings", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_contradicting_settings_are_refused_with_the_reason(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        preset("decoupled_ppo", **settings)
    assert reason in str(error.value)


ALLOWED: list[tuple[str, dict[str, Any]]] = [
    ("rloo", {"kl": {"coefficient": 0}}),
    ("rloo", {"kl": {"coefficient": 0, "estimator": "k3", "place": "loss"}}),
    ("dapo", {"minibatches": 1}),
    ("gspo", {"minibatches": 1, "loss": {"clip_low": 3e-4, "clip_high": 4e-4}}),
    ("dapo", {"minibatches": 1, "loss": {"clip_low": None, "clip_high": None}}),
    ("dr_grpo", {"aggregation": "token_mean"}),
    ("mis", {"proximal": "bypassed", "weights": [], "rejections": []}),
    ("decoupled_ppo", {"loss": {"clip_high": 0.3}, "epochs": 2}),
    ("decoupled_ppo", {"loss": {"clip_high": 0.3}, "proximal": "bypassed", "weights": [], "rejections": []}),
    ("decoupled_ppo", {"loss": {"kind": "cispo"}}),
    ("decoupled_ppo", {"weights": ["none"], "rejections": [{"level": "geometric", "lower": 0.99}]}),
    ("decoupled_ppo", {"aggregation": "sequence_sum", "sequence_tokens": 9}),
    ("online_dpo", {"proximal": "recomputed", "weights": [{"level": "sequence", "upper": 2}], "loss": {"beta": 0.3}}),
    ("online_dpo", {"kl": {"update_every": 10}, "dynamic_sampling": True}),
    ("kto", {"kl": {"coefficient": 0.01, "estimator": "k2"}, "minibatches": 4}),
    ("ppo", {"advantage": {"level": "turn"}}),
    ("gspo", {"loss": {"level": "turn"}}),
]


@pytest.mark.parametrize(("name", "settings"), ALLOWED, ids=str)
def test_settings_with_an_effect_are_allowed_and_without_one_if_the_preset_or_a_default_has_them(
    name: str, settings: dict[str, Any]
) -> None:
    preset(name, **settings)


@pytest.mark.parametrize(
    ("algorithm", "rollout", "reason"),
    [
        ({}, {"group_size": 1}, "rollout.group_size is 1, but algorithm.preset=decoupled_ppo compares the episodes"),
        (
            {"preset": "online_dpo"},
            {"group_size": 1},
            "online_dpo compares the episodes of a group: all advantages would be 0. Set group_size to 2 or more [",
        ),
        ({"preset": "pass_at_k"}, {"group_size": 4}, "advantage.k is 4; it must be below rollout.group_size=4"),
        ({"minibatches": 3}, {}, "algorithm.minibatches is 3; it must divide rollout.batch_size=32"),
    ],
)
def test_settings_that_do_not_fit_the_groups_are_refused(
    algorithm: dict[str, Any], rollout: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValidationError) as error:
        Config.model_validate({"model": "m", "algorithm": algorithm, "rollout": rollout})
    assert reason in str(error.value)


CONSTANTS: list[tuple[str, str, Any]] = [
    ("grpo", "kl.coefficient", 0.04),
    ("dr_grpo", "advantage.scale", "none"),
    ("dapo", "loss.clip_high", 0.28),
    ("dapo", "overlong.buffer_tokens", 4096),
    ("gspo", "loss.clip_low", 3e-4),
    ("gspo", "loss.clip_high", 4e-4),
    ("gmpo", "loss.clip_high", 0.4),
    ("cispo", "loss.clip_low", None),
    ("rloo", "advantage.baseline", "leave_one_out"),
    ("reinforce++", "advantage.scale", "batch_std"),
    ("ppo", "advantage.lam", 0.95),
    ("m2po", "selection.limit", 0.04),
    ("decoupled_ppo", "weights.0.upper", 5.0),
    ("tis", "weights.0.upper", 2.0),
    ("mis", "weights.0.upper", None),
    ("mis", "rejections.0.level", "sequence"),
    ("mis", "rejections.0.upper", 2.0),
    ("icepop", "rejections.0.lower", 0.5),
    ("icepop", "rejections.0.upper", 5.0),
    ("naive", "weights", []),
    ("clip_cov", "selection.share", 2e-4),
    ("kl_cov", "selection.share", 2e-3),
    ("dppo_tv", "loss.delta", 0.15),
    ("gigpo", "advantage.turn_discount", 0.95),
    ("online_dpo", "loss.beta", 0.1),
    ("kto", "loss.beta", 0.1),
    ("turn_ppo", "advantage.discount", 0.99),
    ("turn_ppo", "advantage.lam", 0.9),
    ("turn_ppo", "loss.clip_high", 0.2),
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
    found: Any = preset(name).model_dump(mode="json")
    for field in path.split("."):
        found = found[int(field) if isinstance(found, list) else field]
    assert found == value


def test_presets_differ_from_each_other() -> None:
    said: dict[str, str] = {}
    for name in PRESETS:
        settings = preset(name).model_dump_json(exclude={"preset"})
        assert settings not in said, f"{name} is {said[settings]}"
        said[settings] = name


def test_the_default_is_a_preset_that_differs_from_the_base_in_its_rejections_alone() -> None:
    assert AlgorithmConfig.model_validate({}) == preset("decoupled_ppo")
    assert {**PRESETS["decoupled_ppo"].settings, "rejections": ()} == BASE


def test_a_field_beside_a_preset_changes_that_field_alone() -> None:
    changed = preset("dapo", loss={"clip_low": 0.1}, epochs=2)
    expected = preset("dapo").model_dump()
    expected["loss"]["clip_low"], expected["epochs"] = 0.1, 2
    assert changed.model_dump() == expected


@pytest.mark.parametrize(
    ("name", "close"), [("gropo", "did you mean grpo"), ("reinforce+", "reinforce"), (3, "named 3")]
)
def test_a_preset_that_does_not_exist_is_an_error_that_names_close_ones(name: Any, close: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(close)):
        preset(name)
