"""The records refuse what no component could use, and say which field is wrong."""

import msgspec
import numpy as np
import pytest

from arl.api.errors import TrajectoryError
from arl.api.types import Group, ModelRequest, ModelResponse, SamplingParams, Trajectory, TurnSpan

PROPER = {
    "token_ids": (1, 2, 3),
    "loss_mask": (0, 1, 1),
    "behavior_logprobs": (0.0, -0.5, -0.1),
    "versions": (-1, 4, 5),
    "reward": 1.0,
}


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"token_ids": ()}, "token_ids is empty; return None from arun_episode to reject an episode"),
        ({"loss_mask": (0, 1)}, "loss_mask has 2 entries for 3 token_ids"),
        ({"versions": (-1, 4)}, "versions has 2 entries for 3 token_ids"),
        ({"loss_mask": (0, 2, 1)}, "loss_mask[1] is 2; it must be 0 or 1"),
        ({"loss_mask": (1, 1, 1), "versions": (4, 4, 4)}, "loss_mask[0] is 1; the first token has no context"),
        ({"versions": (-1, -1, 5)}, "loss_mask[1] is 1 but versions[1] is -1: only sampled tokens are trained"),
        ({"versions": (-1, -2, 5)}, "versions[1] is -2; it must be -1 (not sampled) or a policy version"),
        ({"reward": float("nan")}, "reward is nan; it must be a finite number"),
        ({"reward": "good"}, "reward is 'good'; it must be a finite number"),
        ({"behavior_logprobs": (0.0, float("-inf"), 0.0)}, "behavior_logprobs[1] is -inf; it must be a finite number"),
        ({"behavior_logprobs": (0.0, 0.5, 0.0)}, "behavior_logprobs holds a value above 0"),
        ({"metrics": {"turns": float("inf")}}, "metrics['turns'] is inf; it must be a finite number"),
        ({"temperature": 0.0}, "temperature is 0.0; it must be at least 0.001, and finite"),
        ({"temperature": float("inf")}, "temperature is inf; it must be at least 0.001, and finite"),
        ({"token_ids": (1, -2, 3)}, "token_ids[1] is -2; it must be a token id, an integer of at least 0"),
        ({"token_ids": (1, 2, None)}, "token_ids[2] is None; it must be a token id"),
        ({"token_ids": (1, 2, 1 << 63)}, "token_ids[2] is 9223372036854775808; it must be a token id"),
        ({"versions": (-1, 4, "5")}, "versions[2] is '5'; it must be -1 (not sampled) or a policy version"),
        ({"behavior_logprobs": (0.0, -1e300, 0.0)}, "behavior_logprobs[1] is -1e+300; it must lie between -3.4e+38"),
        ({"reward": 1e308}, "reward is 1e+308; it must lie between -1e+12 and 1e+12"),
        ({"rewards": {"style": -2e12}}, "rewards['style'] is -2000000000000.0; it must lie between -1e+12 and 1e+12"),
        ({"token_rewards": (0.0, 1e13, 0.0)}, "token_rewards[1] is 10000000000000.0; it must lie between"),
        ({"temperature": "1"}, "temperature is '1'; it must be of type float"),
        ({"role": ("agent", 1)}, "role is ('agent', 1); it must be a str"),
        ({"metrics": {1: 0.0}}, "a name in metrics is 1; it must be a str"),
        ({"metrics": {"time": 1e308}}, "metrics['time'] is 1e+308; it must lie between -3.4e+38 and 3.4e+38"),
    ],
)
def test_a_malformed_trajectory_names_its_field(wrong: dict[str, object], sentence: str) -> None:
    with pytest.raises(TrajectoryError) as error:
        Trajectory(**{**PROPER, **wrong})
    assert sentence in str(error.value)


def test_a_turns_reward_has_the_bounds_of_all_rewards_and_its_state_is_a_text() -> None:
    with pytest.raises(TrajectoryError, match=r"the reward of the turn at token 1 is 1e\+308; it must lie between"):
        TurnSpan(start=1, stop=2, reward=1e308)
    with pytest.raises(TrajectoryError, match=r"the state of the turn at token 1 is \(0, 1\); it must be a str"):
        TurnSpan(start=1, stop=2, state=(0, 1))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TrajectoryError, match=r"start is 1\.0; it must be of type int"):
        TurnSpan(start=1.0, stop=2)  # pyright: ignore[reportArgumentType]


def test_numpys_integers_and_long_metrics_are_taken() -> None:
    ids = tuple(np.array([1, 2, 3]))
    assert Trajectory(**{**PROPER, "token_ids": ids, "loss_mask": tuple(np.array([0, 1, 1]))}).num_trained_tokens == 2
    Trajectory(**{**PROPER, "metrics": {"ended_at_ns": 1763829600000000000, "solved": True}})


def test_the_oldest_version_is_that_of_trained_tokens_and_a_groups_is_its_stamp_where_none_is_trained() -> None:
    masks = ((0, 1, 1), (0, 0, 1), (0, 0, 0))
    trained, last, untrained = (Trajectory(**{**PROPER, "loss_mask": mask}) for mask in masks)
    assert [made.oldest_version for made in (trained, last, untrained)] == [4, 5, None]

    def group(*trajectories: Trajectory, of_episodes: tuple[int, ...]) -> Group:
        return Group(group_id=0, example_id=(0, 0), stamp=3, trajectories=trajectories, episode_indices=of_episodes)

    assert group(untrained, trained, of_episodes=(0, 1)).oldest_version == 4
    assert group(untrained, of_episodes=(0,)).oldest_version == 3
    assert group(trained, trained, trained, of_episodes=(0, 2, 2)).num_episodes == 2, "counted once"


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        ({"temperature": -1.0}, "temperature is -1.0; it must be 0 (greedy) or at least 0.001"),
        ({"temperature": float("nan")}, "temperature is nan; it must be 0 (greedy) or at least 0.001"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be in (0, 1]"),
        ({"top_k": 0}, "top_k is 0; it must be -1 (off) or at least 1"),
        ({"min_p": 1.5}, "min_p is 1.5; it must be in [0, 1]"),
    ],
)
def test_sampling_out_of_range_names_its_field(wrong: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError, match="it must be") as error:
        SamplingParams(**wrong)
    assert str(error.value) == sentence


def test_a_request_needs_a_token_and_a_response_a_logprob_and_a_version_for_each() -> None:
    with pytest.raises(ValueError, match="input_ids is empty"):
        ModelRequest(input_ids=())
    with pytest.raises(ValueError, match="2 tokens came with 1 logprobs and 2 versions"):
        ModelResponse(output_ids=(1, 2), output_logprobs=(-1.0,), output_versions=(0, 0), stop_reason="stop")


def test_numbers_and_names_of_a_trajectory_become_pythons_own_as_json_takes_no_others():
    numpys = {
        "reward": np.float64(0.5),
        "rewards": {"correct": np.float64(1.0), "short": True},
        "metrics": {np.str_("turns"): np.float64(3.0)},
        "role": np.str_("solver"),
        "turns": (TurnSpan(start=1, stop=2, reward=np.float64(0.5), state=np.str_("a")),),
    }
    made = Trajectory(**{**PROPER, **numpys})
    (turn,) = made.turns
    given = {"reward": 0.5, "rewards": {"correct": 1.0, "short": 1.0}, "metrics": {"turns": 3.0}, "role": "solver"}
    assert msgspec.json.decode(msgspec.json.encode({name: getattr(made, name) for name in given})) == given
    assert msgspec.json.encode((turn.reward, turn.state)) == b'[0.5,"a"]'
    assert type(made.rewards["short"]) is float
