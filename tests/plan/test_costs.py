"""Records of costs: what they compute, and what their files refuse."""

from pathlib import Path

import pytest
from made_costs import made_costs

from arl.api.errors import ConfigError
from arl.plan.costs import DecodeCosts, TrainerCosts, read_costs, with_changes, write_costs
from arl.plan.workload import MeasuredEpisode, Workload


def test_a_file_of_costs_holds_all_of_them(tmp_path: Path) -> None:
    costs = made_costs(seed=3)
    write_costs(tmp_path / "costs.json", costs)
    assert read_costs(tmp_path / "costs.json") == costs


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ('"per_token_s"', '"per_token"', "per_token"),
        ('"cores": 2', '"cores": -2', "cores is -2"),
        ('"cores": 2', '"cores": 0', r"shared\.cores is 0"),
        ('"turns": [', '"turns": "three", "were": [', r"Expected `array`, got `str`.*turns"),
        ("{", "", "not a file of costs"),
    ],
)
def test_a_wrong_file_is_refused_by_the_field_that_is_wrong(tmp_path: Path, right: str, wrong: str, said: str) -> None:
    path = tmp_path / "costs.json"
    write_costs(path, made_costs())
    assert right in path.read_text()
    path.write_text(path.read_text().replace(right, wrong, 1))
    with pytest.raises(ConfigError, match=said):
        read_costs(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.json cannot be read"):
        read_costs(tmp_path / "missing.json")


def test_an_iteration_lies_on_straight_lines_between_and_beyond_the_points() -> None:
    decode = DecodeCosts(points=((1, 1.0), (3, 2.0), (5, 6.0)), per_context_token_s=0.5)
    assert [decode.base_s(n) for n in range(1, 7)] == [1.0, 1.5, 2.0, 4.0, 6.0, 8.0]
    assert decode.iteration_s(3, 10) == 7.0
    assert DecodeCosts(points=((4, 1.5),)).base_s(100) == 1.5


@pytest.mark.parametrize("points", [(), ((2, 1.0), (1, 2.0)), ((0, 1.0),), ((1, 2.0), (2, 1.0))])
def test_points_that_make_no_times_are_refused(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError, match=r"decode\.points"):
        DecodeCosts(points=points)


def test_ranks_share_tokens_and_exchange_gradients() -> None:
    trainer = TrainerCosts(base_s=1, per_episode_s=0.1, per_token_s=2, forward_per_token_s=1, communication_s=8)
    assert trainer.step_s(100, 10, 1) == 302.0
    assert trainer.step_s(100, 10, 4) == 83.0


def test_a_deployment_out_of_range_is_refused() -> None:
    deployment = made_costs().deployment
    assert with_changes(deployment, num_servers=7).num_servers == 7
    with pytest.raises(ConfigError, match="num_servers is 0"):
        with_changes(deployment, num_servers=0)


def test_a_trainer_that_takes_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="takes no time"):
        TrainerCosts(per_token_s=0.0, communication_s=1.0)


def test_a_workload_without_turns_is_refused() -> None:
    with pytest.raises(ValueError, match="no episode of the workload has a turn"):
        Workload(episodes=(MeasuredEpisode(group=0, turns=(), tokens=1),))
