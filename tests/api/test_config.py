"""Each setting that cannot be is refused by name, with what is allowed."""

import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field, ValidationError

from arl.api.settings.engines import (
    DeltaWeightsConfig,
    DiskWeightsConfig,
    EngineConfig,
    OptimizerConfig,
    SGLangEngineConfig,
    TrainConfig,
    WeightsConfig,
)
from arl.api.settings.run import Config
from arl.api.settings.sections import settings_without_keys

IMPOSSIBLE = [
    ({"rollout": {"batch_size": 0}}, "rollout.batch_size", "greater than 0"),
    ({"rollout": {"max_failure_rate": 1.5}}, "rollout.max_failure_rate", "less than or equal to 1"),
    ({"rollout": {"episode_timeout_s": "long"}}, "rollout.episode_timeout_s", "valid number"),
    ({"rollout": {"bach_size": 3}}, "rollout.bach_size", "Extra inputs are not permitted"),
    ({"rollout": {"min_group_size": 9}}, "rollout", "min_group_size is 9; it must be at most group_size 8"),
    ({"rollout": {"replay_groups": 1, "max_staleness": 0}}, "rollout", "Set max_staleness to 1 or more"),
    (
        {"rollout": {"seed_requests": True}, "engine": {"kind": "sglang_processes"}},
        "",
        "servers honour seeds only with --enable-deterministic-inference; add it to engine.arguments",
    ),
    ({"engine": {"kind": "sglang"}}, "engine.sglang", "addresses is empty; name at least one server"),
    ({"engine": {"kind": "local", "addresses": ["x"]}}, "engine.local.addresses", "Extra inputs are not permitted"),
    ({"algorithm": {"loss": {"clip_low": 1.5}}}, "algorithm.loss.ppo.clip_low", "less than or equal to 1"),
    ({"train": {"optimizer": {"lr": math.inf}}}, "train.optimizer.lr", "finite number"),
    ({"train": {"optimizer": {"betas": (1.0, 0.9)}}}, "train.optimizer.betas.0", "less than 1"),
    ({"train": {"optimizer": {"schedule": "cosine"}}}, "train.optimizer", "schedule is cosine; it needs total_steps"),
    ({"weights": {"transport": "pigeon"}}, "weights", "'disk', 'distributed', 'delta'"),
    (
        {"weights": {"transport": "delta"}, "engine": {"kind": "sglang", "addresses": ["http://a:1"]}},
        "",
        "weights.mirrors is empty",
    ),
    ({"weights": {"transport": "delta", "mirrors": {"http://a": "http://b"}}}, "", "use weights.transport=disk"),
    (
        {
            "engine": {"kind": "sglang", "addresses": ["http://a:1", "http://b:1/"]},
            "weights": {"transport": "delta", "mirrors": {"http://a:1/": "x", "http://b:1": "y", "http://c:1": "z"}},
        },
        "",
        "weights.mirrors has a mirror for http://c:1, which is not among engine.addresses: http://a:1, http://b:1/",
    ),
    ({"train": {"num_ranks": 4, "tensor_parallel": 3}}, "train", "it must divide num_ranks=4"),
    ({"train": {"cpu_offload": True}}, "train", "cpu_offload is for train.device=cuda"),
    ({"train": {"ray_address": "auto"}}, "", "train.ray_address is set, but train.num_ranks is 1"),
    ({"engine": {"on_ray": True}}, "", "engine.on_ray is set, but train.ray_address is not"),
    ({"engine": {"kind": "vllm_processes", "on_ray": True}}, "engine.vllm_processes", "vLLM asks for no key"),
    ({"engine": {"on_ray": True, "device": "cuda:1"}}, "engine.local", "Ray chooses GPUs"),
    ({"engine": {"on_ray": True, "colocated": True}}, "engine.local", "share this machine's GPUs"),
    ({"train": {"min_ranks": 1}}, "train", "min_ranks is set, but num_ranks is 1"),
    ({"train": {"num_ranks": 2, "min_ranks": 3}}, "train", "min_ranks is 3, but num_ranks is 2"),
    ({"train": {"num_ranks": 2, "min_ranks": 1, "max_recoveries": 0}}, "train", "but max_recoveries is 0"),
    (
        {"train": {"num_ranks": 4, "min_ranks": 3}, "rollout": {"batch_size": 8}},
        "",
        "no count from 3 to 3 shares rollout.batch_size=8 evenly",
    ),
    ({"train": {"device": "gpu"}}, "train.device", "use cpu, cuda, or one GPU of several as cuda:1"),
    ({"train": {"optimizer": {"min_lr_ratio": 0.1}}}, "train.optimizer", "but schedule is constant"),
    ({"engine": {"update_order": "rolling"}}, "engine.local", "update_order is rolling, but num_servers is 1"),
    ({"engine": {"colocated": True, "pause_mode": "in_place"}}, "engine.local", "leave pause_mode out, or set it to"),
    (
        {"engine": {"colocated": True, "num_servers": 2, "update_order": "rolling"}},
        "engine.local",
        "with colocated all servers let go of their memory together",
    ),
    ({"engine": {"colocated": True}, "weights": {"transport": "distributed"}}, "", "which NCCL refuses; use disk"),
    (
        {"engine": {"colocated": True}, "weights": {"transport": "adapter"}, "train": {"lora": {}}},
        "",
        "but with engine.colocated it needs the model's weights on the servers",
    ),
]


@pytest.mark.parametrize(
    ("settings", "field", "allowed"), IMPOSSIBLE, ids=[field or "whole" for _, field, _ in IMPOSSIBLE]
)
def test_an_impossible_setting_names_its_field_and_what_is_allowed(
    settings: dict[str, object], field: str, allowed: str
) -> None:
    with pytest.raises(ValidationError) as error:
        Config.model_validate({"model": "tiny", **settings})
    (detail,) = error.value.errors()
    assert ".".join(str(part) for part in detail["loc"]) == field
    assert allowed in detail["msg"]


ALLOWED: list[dict[str, Any]] = [
    {"rollout": {"group_size": 1}, "algorithm": {"preset": "reinforce"}},  # smaller than the default minimum
    {"engine": {"kind": "local", "num_servers": 2, "update_order": "rolling"}},
    {"engine": {"kind": "sglang_processes", "num_servers": 2, "update_order": "rolling"}},
    {"engine": {"kind": "sglang", "addresses": ["http://a:1"], "update_order": "rolling"}},  # others may join it
    *({"train": {"device": device}} for device in ("cpu", "cuda", "cuda:1")),
    {
        "rollout": {"seed_requests": True},
        "engine": {"kind": "sglang_processes", "arguments": ["--enable-deterministic-inference"]},
    },
]


@pytest.mark.parametrize("settings", ALLOWED, ids=str)
def test_settings_that_only_look_like_a_contradiction_are_allowed(settings: dict[str, Any]) -> None:
    Config.model_validate({"model": "tiny", **settings})


class TunedConfig(Config):
    engine: EngineConfig = SGLangEngineConfig(addresses=("http://a:1",), update_timeout_s=7.0)
    train: TrainConfig = TrainConfig(num_threads=3, optimizer=OptimizerConfig(lr=0.5, eps=0.25))
    weights: WeightsConfig = DeltaWeightsConfig(mirrors={"http://a:1": "http://m:1"}, directory=Path("d"))
    labels: dict[str, int] = Field(default={"a": 1})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"engine": {"update_timeout_s": 2}}, SGLangEngineConfig(addresses=("http://a:1",), update_timeout_s=2)),
        (
            {"weights": {"mirrors": {"http://a:1/": "x"}}},
            DeltaWeightsConfig(mirrors={"http://a:1/": "x"}, directory=Path("d")),
        ),
        ({"weights": {"transport": "disk"}}, DiskWeightsConfig()),
        ({"weights": DiskWeightsConfig(directory="d")}, DiskWeightsConfig(directory="d")),
        ({"labels": {"b": 2}}, {"b": 2}),
        (
            {"train": {"optimizer": {"lr": 0.1}}},
            TrainConfig(num_threads=3, optimizer=OptimizerConfig(lr=0.1, eps=0.25)),
        ),
    ],
)
def test_a_section_given_in_part_keeps_what_the_class_set_and_one_of_another_kind_stands_alone(
    given: dict[str, Any], expected: object
) -> None:
    (name,) = given
    assert getattr(TunedConfig.model_validate({"model": "m", **given}), name) == expected


class Judged(Config):
    """A user's own settings."""

    judge_api_key: str = ""
    eos_token: str = "<end>"
    passwords: int = 3


def test_logged_settings_hold_no_key_no_password_and_no_user_of_a_url():
    config = Judged.model_validate(
        {
            "model": "m",
            "judge_api_key": "sk-1",
            "engine": {
                "kind": "sglang",
                "addresses": ["http://me:sk-2@host:30000", "http://host:1"],
            },
            "log": {"trackers": [{"kind": "mlflow", "address": "https://me:sk-4@host/mlflow"}]},
        }
    )
    shown = settings_without_keys(config)
    assert "sk-" not in str(shown)
    assert shown["judge_api_key"] == "**********"
    assert shown["engine"]["addresses"] == ["http://**********@host:30000", "http://host:1"]
    assert (shown["eos_token"], shown["passwords"], shown["log"]["track_trajectories"]) == ("<end>", 3, 4)


def test_fewer_ranks_keep_layers_whole_and_share_a_batch_evenly():
    given = {"num_ranks": 8, "tensor_parallel": 2}
    assert TrainConfig.model_validate({**given, "min_ranks": 1}).rank_counts(12) == [8, 6, 4, 2]
    assert TrainConfig.model_validate({**given, "min_ranks": 3}).rank_counts(8) == [8, 4]
    assert TrainConfig.model_validate(given).rank_counts(9) == [8]
    assert TrainConfig().rank_counts(9) == [1]


def test_colocated_servers_compute_what_requests_had_again_unless_they_are_told_otherwise():
    def mode(**engine: object) -> str:
        given = Config.model_validate({"model": "m", "engine": engine})
        again = Config.model_validate(given.model_dump())
        assert again.engine.pause_mode == given.engine.pause_mode
        return given.engine.pause_mode

    assert [mode(colocated=True), mode(colocated=True, pause_mode="abort"), mode()] == ["retract", "abort", "in_place"]
