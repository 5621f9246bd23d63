"""Trackers get trajectories of different examples, chosen for interest, and each with its example."""

from collections.abc import Sequence
from typing import Any

from records import grouped, trajectory

from arl.api.images import Image, PlacedImage
from arl.api.types import Group, Trajectory
from arl.cli.trial import passage_of, rendered
from arl.rollout.episode import Episode
from arl.rollout.episode_events import Candidate, FirstFailures
from arl.training.metrics_log import choose, of_evaluation, of_step


def candidate(row: int, reward: float, length: int = 3, distance: float = 0.0, name: str = "") -> Candidate:
    made = trajectory(versions=(0,) * (length - 1), reward=reward)
    return Candidate(
        name=name or f"{row}.0", example_id=(0, row), example={}, group_id=row, trajectory=made, distance=distance
    )


def chosen(candidates: Sequence[Candidate], number: int) -> list[tuple[str, str]]:
    return [(one.name, why) for one, why in choose(candidates, number)]


def test_a_tracked_text_has_a_mark_in_the_place_of_an_images_placeholders() -> None:
    image = Image.kept(b"\x89PNG of a tracked text", 56, 28)
    seen = Trajectory(
        token_ids=[1, 9, 9, 9, 2, 3],
        loss_mask=[0] * 5 + [1],
        behavior_logprobs=[0.0] * 6,
        versions=[-1] * 5 + [0],
        reward=1.0,
        images=(PlacedImage(image=image, start=1, stop=4),),
    )
    (one,) = of_step([grouped(seen)], [0.0], [], 1, lambda ids: " ".join(map(str, ids)))
    assert one.text == "1[image 56x28, 3 tokens]2 3"
    decode = lambda ids: "".join(map(str, ids))  # noqa: E731
    assert rendered(passage_of(seen), decode, brackets=False).plain == "1[image 56x28, 3 tokens]23"


def test_the_best_the_worst_the_longest_and_the_one_least_like_its_group_are_chosen_then_the_next_of_each() -> None:
    batch = [
        candidate(0, 0.5),
        candidate(1, 0.2, length=8),
        candidate(2, 0.9, length=9, distance=0.1),
        candidate(2, 0.0, length=9, distance=0.8),
        candidate(3, 0.1, distance=0.0),
        candidate(4, 0.4, distance=0.3),
        candidate(5, 0.3, distance=0.2),
        candidate(6, 0.25),
    ]
    found = chosen(batch, 6)
    assert found == [
        ("2.0", "highest reward"),
        ("3.0", "lowest reward"),  # the worst of all is of an example that was shown
        ("1.0", "longest"),
        ("4.0", "least like its group"),
        ("0.0", "highest reward"),
        ("6.0", "lowest reward"),
    ]
    assert chosen(batch, 3) == found[:3]


def test_what_a_reason_does_not_tell_apart_is_chosen_for_any_and_no_example_twice() -> None:
    alike = [candidate(row, 1.0) for row in (0, 0, 1, 2)]
    assert chosen(alike, 2) == [("0.0", "any"), ("1.0", "any")]
    assert chosen(alike, 9) == [("0.0", "any"), ("1.0", "any"), ("2.0", "any")]
    two = [candidate(0, 1.0), candidate(1, 0.0), candidate(2, 0.0)]
    assert chosen(two, 3) == [("0.0", "highest reward"), ("1.0", "lowest reward"), ("2.0", "lowest reward")]
    assert chosen([], 3) == chosen(two, 0) == []


def group(number: int, *rewards: float, **changes: Any) -> Group:
    return grouped(*(trajectory(reward=reward) for reward in rewards), number=number, **changes)


def test_a_groups_trajectories_come_with_their_example_the_expected_answer_and_the_parts_of_the_reward() -> None:
    shown = {"rewards": {"correct": 1.0, "short": 0.5}, "metrics": {"turns": 2.0}}
    right = grouped(
        trajectory(reward=0.0),
        trajectory(reward=1.5, **shown),
        number=7,
        example={"question": "1 + 1", "solution": 2, "level": 3},
    )
    one, other = of_step([right, group(8, 1.0, 1.0)], [None, 0.5, 0.0, 0.0], [], 2, lambda ids: f"{len(ids)} tokens")
    assert (one.why, one.name, one.example_id, one.group_id, one.episode) == ("highest reward", "7.1", (0, 7), 7, 1)
    assert (one.reward, one.advantage, one.text, one.error) == (1.5, 0.5, "3 tokens", "")
    assert {"rewards": one.rewards, "metrics": one.metrics} == shown
    assert (one.example, one.expected) == ({"question": "1 + 1", "solution": 2, "level": 3}, "2")
    assert (other.name, other.example, other.expected) == ("8.0", {}, "")


def test_of_failed_episodes_the_first_of_each_class_of_error_comes_with_what_it_last_saw() -> None:
    failures = FirstFailures()
    for name, error in (("5.0", "ValueError: a"), ("5.1", "ValueError: b"), ("6.0", "RewardError: c")):
        seen = trajectory() if name == "5.0" else None
        failures.note(Candidate(name=name, example_id=(0, 5), example={"answer": "4"}, trajectory=seen, error=error))
    first, second = of_step([], [], failures.take(), 4, lambda ids: str(ids))
    assert (first.name, first.why, first.error, first.reward) == ("5.0", "failed", "ValueError: a", None)
    assert (first.text, first.num_tokens, first.expected) == ("[1, 1, 1]", 3, "4")
    assert (second.name, second.error, second.text, second.num_tokens) == ("6.0", "RewardError: c", "", 0)
    assert failures.take() == []


def test_of_an_evaluation_finished_and_failed_episodes_come_with_their_examples() -> None:
    rewards = (0.5, 1.0, 0.0)
    episodes = [
        Episode(name=f"e2.{row}", example={"answer": row}, trajectories=(trajectory(reward=reward),), elapsed_s=1.0)
        for row, reward in enumerate(rewards)
    ]
    episodes.append(Episode(name="e2.3", example={"answer": 3}, error=ValueError("no luck"), elapsed_s=1.0))
    found = of_evaluation(episodes, 2, None)
    assert [(one.name, one.why, one.error) for one in found] == [
        ("e2.1", "highest reward", ""),
        ("e2.2", "lowest reward", ""),
        ("e2.3", "failed", "ValueError: no luck"),
    ]
    for one in found:
        assert one.example_id == (0, one.example["answer"])
        assert (one.expected, one.group_id) == (str(one.example["answer"]), None)
