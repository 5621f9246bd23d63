"""Costs that wrote a log are found in it again; and a model's memory is counted from its files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_log import MadeRun, known_costs
from msgspec import structs
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from arl.api.errors import RunFileError
from arl.cluster.plan.costs import Costs, DecodeCosts, TrainerCosts
from arl.cluster.plan.fitting import fitted, model_memory
from arl.cluster.plan.prediction import predict
from arl.engine.tiny import TinyShape, write_tiny_model, write_tiny_vision_model

SHAPE = TinyShape(hidden_size=32, intermediate_size=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8)
CONTROLLER_S = pytest.approx(2 * 2e-4 + 3e-4, rel=0.1)
"""For an episode of two requests: always two, so that what is theirs and what is the episode's cannot be told apart."""


def half_as_fast(t: float) -> float:
    """In every other two seconds, the machine does other things as well, and work takes twice as long."""
    whole, rest = divmod(t, 4.0)
    return 6.0 * whole + (rest if rest < 2.0 else 2.0 + 2 * (rest - 2.0))


def found_in(run_dir: Path, costs: Costs, wall: Any = None, has_cpu_times: bool = True, **run: Any) -> Costs:
    made = MadeRun(costs, **run)
    made.write(run_dir, wall=wall or (lambda t: t), has_cpu_times=has_cpu_times)
    return fitted(run_dir)


def iteration_ratios(found: Costs, wanted: Costs) -> list[float]:
    n = np.array([4, 16, 32, 60])
    return list(found.decode.iteration_s(n, 60.0) / wanted.decode.iteration_s(n, 60.0))


def read_s(costs: Costs) -> float:
    """What it costs to read the prompt of a request that has 17 tokens more than are cached."""
    return costs.prefill.per_request_s + 17 * costs.prefill.per_token_s


def predicted_ratio(found: Costs, wanted: Costs) -> float:
    """Throughput with the costs that were found, by that with those which the log was made with."""
    alike = structs.replace(wanted, workload=found.workload, shared=found.shared, controller=found.controller)
    said = (predict(costs, found.deployment).episodes_per_s for costs in (found, alike))
    return next(said) / next(said)


@pytest.mark.parametrize("run", [{}, {"num_servers": 2}, {"ahead": 1, "steps": 8}, {"steps": 60}])
def test_servers_cost_what_they_cost(tmp_path: Path, run: dict[str, Any]):
    costs = known_costs()
    found = found_in(tmp_path, costs, **run)
    assert iteration_ratios(found, costs) == pytest.approx([1.0] * 4, abs=0.1)
    assert predicted_ratio(found, costs) == pytest.approx(1.0, abs=0.05)
    assert found.decode.max_running_requests == 64


@pytest.mark.parametrize(("per_iteration_s", "per_request_s"), [(1e-4, 2e-4), (6e-3, 0.0), (6e-3, 2e-4)])
def test_what_an_iteration_costs_is_told_from_what_its_requests_cost(
    tmp_path: Path, per_iteration_s: float, per_request_s: float
):
    points = ((1, per_iteration_s + per_request_s), (64, per_iteration_s + 64 * per_request_s))
    costs = known_costs(decode=DecodeCosts(points=points, max_running_requests=64))
    found = found_in(tmp_path, costs, steps=12)
    assert iteration_ratios(found, costs)[1:] == pytest.approx([1.0] * 3, abs=0.15)
    assert predicted_ratio(found, costs) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("tokens", [(40, 40), (10, 60)])
def test_times_that_servers_tell_give_a_curve_also_where_all_requests_are_alike(
    tmp_path: Path, tokens: tuple[int, int]
):
    decode = DecodeCosts(points=((1, 0.0015), (8, 0.003), (64, 0.006)), max_running_requests=128)
    costs = known_costs(decode=decode)
    found = found_in(tmp_path, costs, steps=8, ahead=2, tokens=tokens, tells_iterations=True)
    n = np.array([2, 4, 16, 32, 60])
    ratios = found.decode.iteration_s(n, 60.0) / costs.decode.iteration_s(n, 60.0)
    assert list(ratios) == pytest.approx([1.0] * 5, abs=0.1)
    assert read_s(found) == pytest.approx(read_s(costs), rel=0.05)
    assert not any("reading prompts" in note for note in found.measured.notes)


def test_a_context_that_costs_is_seen_in_turns(tmp_path: Path):
    decode = DecodeCosts(points=((1, 0.001), (64, 0.004)), per_context_token_s=2e-6, max_running_requests=64)
    costs = known_costs(decode=decode)
    found = found_in(tmp_path, costs, tokens=(10, 200))
    assert found.decode.per_context_token_s == pytest.approx(2e-6, rel=0.2)


def test_other_programs_on_the_machine_change_no_costs_as_long_as_the_log_has_cpu_times(tmp_path: Path):
    costs = known_costs()
    found = found_in(tmp_path, costs, wall=half_as_fast, steps=10)
    assert iteration_ratios(found, costs) == pytest.approx([1.0] * 4, abs=0.12)
    assert found.trainer.step_s(3300, 32, 1) == pytest.approx(costs.trainer.step_s(3300, 32, 1), rel=0.02)
    assert 2 * found.controller.per_request_s + found.controller.per_episode_s == CONTROLLER_S


def test_without_cpu_times_the_clock_on_the_wall_tells_and_a_requests_latency_is_told_apart(tmp_path: Path):
    costs = known_costs()
    found = found_in(tmp_path, costs, has_cpu_times=False, latency_s=0.02)
    assert iteration_ratios(found, costs) == pytest.approx([1.0] * 4, abs=0.2)
    assert 0.01 < found.controller.latency_s < 0.03
    assert any("the controller is taken for free" in note for note in found.measured.notes)


def test_the_trainer_the_publishing_and_the_controller_cost_what_they_cost(tmp_path: Path):
    costs = known_costs()
    found = found_in(tmp_path, costs, steps=10)
    assert found.trainer.step_s(3300, 32, 1) == pytest.approx(costs.trainer.step_s(3300, 32, 1), rel=0.02)
    assert found.trainer.snapshot_s == pytest.approx(costs.trainer.snapshot_s, rel=1e-3)
    assert found.publish.load_s == pytest.approx(costs.publish.load_s, rel=1e-3)
    assert 0.08 <= found.publish.transfer_s < 0.1  # a server pauses when its iteration has ended
    assert 2 * found.controller.per_request_s + found.controller.per_episode_s == CONTROLLER_S
    assert (found.shared and found.shared.cores, found.deployment.batch_size, found.deployment.group_size) == (2, 4, 8)


def test_steps_of_different_sizes_tell_what_a_step_costs_whatever_its_batch(tmp_path: Path):
    costs = known_costs(trainer=TrainerCosts(base_s=0.2, per_token_s=5e-5))
    found = found_in(tmp_path, costs, steps=12, batch_size=1, ahead=12, group_size=2, tokens=(5, 120))
    assert found.trainer.base_s == pytest.approx(0.2, rel=0.02)
    assert found.trainer.per_token_s == pytest.approx(5e-5, rel=0.02)


def test_costs_say_what_could_not_be_told_apart(tmp_path: Path):
    found = found_in(tmp_path, known_costs())
    assert any("whatever its batch could not be told" in note for note in found.measured.notes)
    assert found.trainer.base_s == 0.0
    low, high = found.measured.running_requests or (0.0, 0.0)
    assert 0 < low < 20
    assert 30 < high <= 64


def test_the_workload_is_that_of_the_groups_that_ended(tmp_path: Path):
    made = MadeRun(known_costs())
    made.write(tmp_path)
    found = fitted(tmp_path)
    groups = {episode.group for episode in found.workload.episodes}
    assert groups == set(range(len(groups)))
    assert len(groups) >= 10
    assert len(found.workload.episodes) == 8 * len(groups)
    tools_s: list[float] = []
    for episode in found.workload.episodes:
        first, second = episode.turns
        assert (first.prompt_tokens, first.cached_tokens, first.tool_s > 0.01) == (20, 0, True)
        assert (second.prompt_tokens, second.tool_s) == (35 + first.new_tokens, 0.0)
        # Also where an update had emptied the cache between the turns.
        assert second.cached_tokens == pytest.approx(19 + first.new_tokens, abs=1)
        assert episode.tokens == 35 + first.new_tokens + second.new_tokens
        tools_s.append(first.tool_s)
    assert np.mean(tools_s) == pytest.approx(0.01 + np.exp(-2.0 + 0.8**2 / 2), rel=0.2)


def test_a_run_that_trained_nothing_has_no_costs(tmp_path: Path):
    MadeRun(known_costs(), steps=0).write(tmp_path)
    with pytest.raises(RunFileError, match="no trained step"):
        fitted(tmp_path)


def test_a_run_of_several_policies_is_refused_by_their_names(tmp_path: Path):
    MadeRun(known_costs()).write(tmp_path, policies={"author": {}, "critic": {}})
    with pytest.raises(RunFileError, match=r"several policies \(author, critic\)"):
        fitted(tmp_path)


def test_a_resumed_run_is_fitted_by_the_life_that_trained_most(tmp_path: Path):
    MadeRun(known_costs(), steps=1).write(tmp_path)
    slow = known_costs(decode=DecodeCosts(points=((1, 0.02), (64, 0.03)), max_running_requests=64))
    found = found_in(tmp_path, slow, steps=6, wall=lambda t: 1000 + t)
    assert iteration_ratios(found, slow) == pytest.approx([1.0] * 4, abs=0.1)
    assert found.deployment.num_servers == 1


def test_the_first_step_of_a_resumed_life_warms_up_too(tmp_path: Path):
    costs = known_costs()
    made = MadeRun(costs, steps=2)
    made.write(tmp_path, has_cpu_times=False, resumed_from=20, warm_up_s=9.0)
    assert fitted(tmp_path).trainer.step_s(3300, 32, 1) == pytest.approx(costs.trainer.step_s(3300, 32, 1), rel=0.02)


def test_a_run_that_is_long_enough_says_how_many_episodes_it_trained_in_a_second(tmp_path: Path):
    costs = known_costs()
    found = found_in(tmp_path, costs, steps=20)
    assert predict(found, found.deployment).episodes_per_s == pytest.approx(found.measured.episodes_per_s, rel=0.1)
    assert found_in(tmp_path / "short", costs, steps=5).measured.episodes_per_s == 0.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), ["Question 1"], SHAPE, 0)


@pytest.mark.parametrize(("served_as", "value_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_servers_hold_weights_keys_and_values_in_their_dtype(model: Path, served_as: str, value_bytes: int):
    parameters = AutoModelForCausalLM.from_pretrained(model).num_parameters()
    memory = model_memory({"model": model, "engine": {"dtype": served_as}})
    assert memory.server_weights == value_bytes * parameters
    assert memory.kv_per_token == value_bytes * 2 * 3 * 2 * 8  # keys and values of 3 layers, 2 heads of 8
    assert memory.trainer_state == 16 * parameters


def test_an_adapter_needs_neither_gradients_nor_moments_of_the_model(model: Path):
    whole, adapter = (model_memory({"model": model, "train": {"lora": lora}}) for lora in (None, {"rank": 4}))
    assert adapter.trainer_state == whole.trainer_state / 4


def test_a_model_that_sees_is_counted_with_its_tower_which_may_be_frozen(tmp_path: Path):
    model = write_tiny_vision_model(tmp_path / "model", shape=SHAPE)
    loaded = AutoModelForImageTextToText.from_pretrained(model)
    parameters, tower = loaded.num_parameters(), loaded.model.visual.num_parameters()
    settings = {"model": model, "engine": {"dtype": "bfloat16"}}
    memory = model_memory(settings)
    assert (memory.server_weights, memory.kv_per_token) == (2 * parameters, 2 * 2 * 3 * 2 * 8)
    assert memory.trainer_state == 16 * parameters
    frozen = model_memory({**settings, "train": {"freeze_vision_tower": True}})
    assert frozen.trainer_state == 16 * (parameters - tower) + 4 * tower


def test_a_reward_model_is_a_second_model_with_a_reference_of_its_own_which_adapters_do_not_hold(model: Path):
    rewarded = {"model": model, "algorithm": {"reward_model": {}}}
    alone, beside, adapters = map(
        model_memory, ({"model": model}, rewarded, {**rewarded, "train": {"lora": {"rank": 4}}})
    )
    assert beside.trainer_state == (2 * 16 + 4) / 16 * alone.trainer_state
    assert adapters.trainer_state == 2 * 4 / 16 * alone.trainer_state


@pytest.mark.parametrize(
    ("algorithm", "held"),
    [
        ({"kl": {"coefficient": 0.0}, "loss": {"kind": "clip"}}, 16),
        ({"kl": {"coefficient": 0.1}, "loss": {"kind": "clip"}}, 20),
        ({"kl": {"coefficient": 0.0}, "loss": {"kind": "dpo"}}, 20),
        ({"kl": {"coefficient": 0.0}, "loss": {"kind": "kto"}}, 20),
    ],
)
def test_a_run_holds_a_reference_if_its_kl_or_its_loss_asks_for_one(
    model: Path, tmp_path: Path, algorithm: dict[str, Any], held: int
):
    MadeRun(known_costs()).write(tmp_path, model=str(model), algorithm=algorithm)
    parameters = AutoModelForCausalLM.from_pretrained(model).num_parameters()
    assert fitted(tmp_path).memory.trainer_state == held * parameters


def test_without_a_dtype_servers_take_that_of_the_models_config(model: Path, tmp_path: Path):
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    (tmp_path / "model.safetensors").symlink_to(next(model.glob("*.safetensors")))
    assert model_memory({"model": tmp_path}).kv_per_token == 2 * 2 * 3 * 2 * 8


def test_a_run_whose_model_has_gone_says_that_memory_is_unknown(tmp_path: Path):
    MadeRun(known_costs()).write(tmp_path)
    costs = fitted(tmp_path)
    assert costs.memory.server_weights == 0
    assert any(note.startswith("memory is unknown") for note in costs.measured.notes)
