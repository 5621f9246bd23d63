"""Whole runs of two policies on the embedded server: each is asked, trained, saved, continued and exported apart."""

from pathlib import Path
from typing import Any

import pytest
from pair_of_agents import Pair, a_model

import arl
from arl.api.errors import CheckpointError, RoleError
from arl.api.types import ModelRequest
from arl.run.experiment import TrainingResult
from arl.run.servers import serve

EXAMPLES = [{"question": f"Tell {n}"} for n in range(20)]
SHARED = {"weights": {"transport": "adapter"}, "train": {"lora": {"rank": 4}}}


def settings(directory: Path, **changes: Any) -> arl.Config:
    first, second = (a_model(directory / f"model-{seed}", seed) for seed in range(2))
    is_shared = "weights" in changes
    critic = {"roles": ["critic"], **({} if is_shared else {"model": second})}
    return arl.Config.model_validate(
        {
            "model": first,
            "run_dir": directory / "run",
            "rollout": {"batch_size": 2, "group_size": 4, "max_staleness": 0},
            "policies": {"writer": {"roles": ["author"]}, "reader": critic},
            "log": {"console": False},
            **changes,
        }
    )


def train(config: arl.Config, steps: int, workflow: Pair | None = None) -> TrainingResult:
    return arl.train(workflow=workflow or Pair(), dataset=EXAMPLES, steps=steps, lr=1e-3, config=config)


@pytest.mark.runs
@pytest.mark.parametrize("changes", [{}, SHARED], ids=["own servers", "shared servers"])
def test_each_policy_samples_with_its_own_weights_and_a_continued_run_goes_on_with_both(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = settings(tmp_path, **changes)
    train(config, 2)
    result = train(config, 4)
    rows = result.metrics
    assert [row["version"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        for name in config.policies:
            assert row[f"policies/{name}/behavior_weight_max"] == pytest.approx(1.0, abs=1e-3), "sampled by its weights"
            assert abs(row[f"policies/{name}/behavior_kl_proximal"]) < 1e-6
            assert row[f"policies/{name}/trained_tokens"] > 0
    models = [(Path(result.model) / name / "model.safetensors").read_bytes() for name in config.policies]
    assert models[0] != models[1]


@pytest.mark.runs
async def test_each_role_is_answered_by_the_model_of_its_policy_without_training_too(tmp_path: Path) -> None:
    config = settings(tmp_path)
    asked = [
        ModelRequest(input_ids=[5, 6], sampling=arl.SamplingParams(max_new_tokens=4, seed=1), role=role)
        for role in ("author", "critic")
    ]
    async with serve(config) as engine:
        said = [await engine.agenerate(request) for request in asked]
    for request, answer, model in zip(asked, said, (config.model, config.policies["reader"].model), strict=True):
        async with serve(arl.Config.model_validate({"model": model, "run_dir": tmp_path / "alone"})) as alone:
            expected = await alone.agenerate(request)
        assert answer.output_logprobs == pytest.approx(expected.output_logprobs, abs=1e-5)
    assert said[0].output_logprobs != pytest.approx(said[1].output_logprobs, abs=1e-5)


@pytest.mark.runs
def test_a_role_without_a_policy_ends_the_run_at_its_first_request(tmp_path: Path) -> None:
    class Unknown(Pair):
        declared_roles = None  # type: ignore[assignment]

    with pytest.raises(RoleError, match="no policy plays the role 'judge'"):
        train(settings(tmp_path), 1, Unknown(("author", "judge")))


@pytest.mark.runs
def test_a_checkpoint_of_other_policies_is_refused(tmp_path: Path) -> None:
    config = settings(tmp_path)
    train(config, 1)
    with pytest.raises(CheckpointError, match="written with policies="):
        train(config.model_copy(update={"policies": {}}), 2)
