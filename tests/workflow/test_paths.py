"""Trajectories of a tree of turns: each token is trained once, in whichever trajectory it comes first."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from scripted_answers import TOKENIZER, response_of

from arl.api.errors import TrajectoryError
from arl.api.types import Trajectory
from arl.workflow.chat_template import ChatTemplate
from arl.workflow.conversation import trajectories
from arl.workflow.dialogue import Dialogue, Turn


def turn(parent: Turn | None, output_ids: Sequence[int], *, temperature: float = 1.0, is_cut: bool = False) -> Turn:
    """A turn after two tokens 0, whose tokens have their own numbers for versions and logprobs."""
    dialogue = Dialogue(ChatTemplate(TOKENIZER))
    prompt = replace(dialogue.prompt([{"role": "user", "content": "?"}]), parent=parent, given_ids=(0, 0))
    logprobs, reason = tuple(-float(i) for i in output_ids), "length" if is_cut else "stop"
    own = {"output_logprobs": logprobs, "output_versions": tuple(output_ids)}
    response = response_of(output_ids, **own, stop_reason=reason, temperature=temperature)
    return dialogue.record(prompt, response)


def trained(trajectory: Trajectory) -> list[int]:
    return trajectory.token_ids[trajectory.loss_mask].tolist()


def test_a_line_of_turns_is_one_trajectory() -> None:
    first = turn(None, [5, 6])
    (made,) = trajectories([first, turn(first, [7])], 1.0, turn_rewards=[0.5, 0.25], states=["a", None])
    assert made.token_ids.tolist() == [0, 0, 5, 6, 0, 0, 7]
    assert made.loss_mask.tolist() == [0, 0, 1, 1, 0, 0, 1]
    assert made.versions.tolist() == [-1, -1, 5, 6, -1, -1, 7]
    assert made.behavior_logprobs.tolist() == [0.0, 0.0, -5.0, -6.0, 0.0, 0.0, -7.0]
    assert [(t.start, t.stop, t.reward, t.state) for t in made.turns] == [(2, 4, 0.5, "a"), (6, 7, 0.25, None)]


def test_a_shared_beginning_is_trained_in_the_first_trajectory_alone_and_is_in_all() -> None:
    root = turn(None, [5])
    leaves = [turn(root, [6]), turn(root, [7])]
    first, second = trajectories(
        [root, *leaves], 0.5, metrics={"calls": 3}, rewards={"right": 1.0}, turn_rewards=[1.0, 2.0, 4.0], role="solver"
    )
    assert (trained(first), trained(second)) == ([5, 6], [7])
    assert second.token_ids.tolist() == [0, 0, 5, 0, 0, 7]
    assert second.versions.tolist() == [-1, -1, 5, -1, -1, 7]
    assert second.behavior_logprobs[2] == -5.0
    assert [[t.reward for t in made.turns] for made in (first, second)] == [[1.0, 2.0], [4.0]]
    assert (first.metrics, second.metrics) == ({"calls": 3}, {})
    assert {(t.reward, t.role, *t.rewards.items()) for t in (first, second)} == {(0.5, "solver", ("right", 1.0))}


def test_more_tokens_than_can_be_trained_are_refused_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arl.workflow.conversation.MAX_EPISODE_TOKENS", 9)
    root = turn(None, [5])
    leaves = [turn(root, [6]), turn(root, [7])]
    assert len(trajectories([root, leaves[0]], 1.0)) == 1
    with pytest.raises(TrajectoryError, match="the episode is 2 trajectories of 12 tokens together, and at most 9 can"):
        trajectories([root, *leaves], 1.0)


def test_trajectories_come_in_the_order_of_their_last_turns() -> None:
    root = turn(None, [5])
    left, right = turn(root, [6]), turn(root, [7])
    last = turn(left, [8])
    assert [trained(t) for t in trajectories([root, left, right, last], 1.0)] == [[5, 7], [6, 8]]


def test_turns_of_another_temperature_are_a_trajectory_of_their_own_with_all_they_saw() -> None:
    first = turn(None, [5])
    second = turn(first, [6], temperature=0.5)
    third = turn(second, [7])
    warm, cool = trajectories([first, second, third], 1.0, metrics={"n": 1})
    assert (warm.temperature, trained(warm)) == (1.0, [5, 7])
    assert (cool.temperature, trained(cool)) == (0.5, [6])
    assert cool.token_ids.tolist() == warm.token_ids[: len(cool.token_ids)].tolist() == [0, 0, 5, 0, 0, 6]
    assert (warm.metrics, cool.metrics) == ({"n": 1}, {})


def test_the_trajectory_whose_last_turn_a_length_limit_ended_is_truncated() -> None:
    root = turn(None, [5], is_cut=True)
    leaves = [turn(root, [6]), turn(root, [7], is_cut=True), turn(root, [8])]
    assert [t.is_truncated for t in trajectories([root, *leaves], 0.0)] == [False, True, False]
    assert [t.is_truncated for t in trajectories([root, *leaves], 0.0, cut_after=leaves[0])] == [True, True, False]


def test_a_turn_without_a_token_trains_none() -> None:
    first = turn(None, [])
    (made,) = trajectories([first, turn(first, [6])], 1.0)
    assert trained(made) == [6]
    assert [(t.start, t.stop) for t in made.turns] == [(2, 2), (4, 5)]


def test_an_episode_without_a_sampled_turn_has_no_trajectory() -> None:
    with pytest.raises(TrajectoryError, match="nothing was sampled"):
        trajectories([], 1.0)


def test_a_turn_that_was_forgotten_is_seen_by_what_follows_it_and_not_trained() -> None:
    root = turn(None, [5])
    forgotten = turn(root, [6])
    (made,) = trajectories([root, turn(forgotten, [7])], 1.0)
    assert made.token_ids.tolist() == [0, 0, 5, 0, 0, 6, 0, 0, 7]
    assert trained(made) == [5, 7]
