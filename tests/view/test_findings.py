"""What the health page says about runs that learn, and about runs that do not."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from made_run import PROMPT, T0, began, episode, life, trajectory

from arl.api.events import Event, GroupAdmitted, GroupEnded
from arl.eventlog.run_record import read_run
from arl.view.findings import findings

FINE = {"reward_min": 0.0, "reward_max": 1.0, "entropy": 0.5, "truncated": 0.0, "effective_sample_size": 1.0}
FINE |= {"staleness/mean": 1.0, "behavior_kl_proximal": 1e-3, "event_loop_lag_s": 0.01}
STEPS = 60
RISING = [0.2 + 0.5 * k / STEPS for k in range(STEPS)]


def told(place: Path, columns: Mapping[str, Sequence[float]], held_out: Sequence[float] = ()) -> list[str]:
    """The severity and the sentence of each finding about a run with these metrics; the others are FINE and RISING."""
    all_columns = {**{name: [value] * STEPS for name, value in FINE.items()}, "reward": RISING, **columns}
    rows = [{"version": k + 1, **{name: all_columns[name][k] for name in all_columns}} for k in range(STEPS)]
    evaluations = [{"version": 10 * k, "reward": reward} for k, reward in enumerate(held_out)]
    for name, written in (("metrics", rows), ("evaluations", evaluations)):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    if not (place / "events").exists():
        life(place, [began()])
    return [f"{one['severity']}: {one['text']}" for one in findings(read_run(place), [], {})]


def falling(first: float, last: float) -> list[float]:
    return [first + (last - first) * k / (STEPS - 1) for k in range(STEPS)]


def test_a_run_that_learns_has_no_findings(tmp_path: Path) -> None:
    assert told(tmp_path, {"episode/tool_calls": falling(3.0, 1.0), "reward/right": RISING}, RISING[::10]) == []


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"episode/exact": falling(0.5, 0.0)}, "warning: The reward rose from 0.217 to 0.612, and episode/exact fell"),
        ({"reward/exact": falling(0.9, 0.1)}, "warning: The reward rose from 0.217 to 0.612, and reward/exact fell"),
        ({"reward": falling(0.8, 0.1)}, "warning: The reward fell to 0.153; in steps 1 to 10 it was 0.747."),
        ({"entropy": falling(1.0, 0.0)}, "warning: The entropy fell from 0.966 to 0.161 nats"),
        (
            {"truncated": [0.9] * STEPS},
            "warning: A length limit cut 90% of the trajectories in the last steps, and 90% in",
        ),
        ({"truncated": falling(0.0, 1.0)}, "in the first ones: they have grown."),
        ({"effective_sample_size": [0.4] * STEPS}, "warning: The effective sample size was 0.40"),
        ({"behavior_kl_proximal": [0.2] * STEPS, "staleness/mean": [16.0] * STEPS}, "which were 16 versions old."),
        (
            {"staleness_0/behavior_kl_proximal": [0.1] * STEPS},
            "warning: Sampler and trainer disagree about fresh tokens",
        ),
        (
            {"behavior_kl_proximal": [0.1] * STEPS, "staleness/mean": [0.0] * STEPS},
            "warning: Sampler and trainer disagree about fresh tokens",
        ),
        ({"event_loop_lag_s": [0.5] * STEPS}, "note: The event loop was blocked for up to 0.50 s"),
        ({"event_loop_lag_s": [1.5] * STEPS}, "warning: The event loop was blocked for 1.50 s at a time"),
        (
            {"reward": [1.0] * STEPS, "reward_min": [1.0] * STEPS, "reward_std": [0.0] * STEPS},
            "error: All episodes of the last 20 steps had the reward 1",
        ),
    ],
)
def test_what_goes_wrong_is_told_by_one_finding(tmp_path: Path, columns: dict[str, list[float]], text: str) -> None:
    (said,) = told(tmp_path, columns)
    assert text in said


def test_a_solved_task_needs_neither_entropy_nor_rising_rewards(tmp_path: Path) -> None:
    solved = [min(1.0, 0.4 + k / 30) for k in range(STEPS)]
    assert told(tmp_path, {"reward": solved, "entropy": falling(1.0, 0.0)}) == []


def test_a_watched_share_may_fall_with_the_reward_and_a_full_context_at_any_time(tmp_path: Path) -> None:
    assert told(tmp_path, {"reward": [0.5] * STEPS, "episode/exact": falling(0.5, 0.0)}) == []
    assert told(tmp_path, {"episode/context_full": falling(0.5, 0.0)}) == []


def test_held_out_rewards_that_fall_behind_those_of_training_are_told(tmp_path: Path) -> None:
    (said,) = told(tmp_path, {}, held_out=[0.3, 0.6, 0.5, 0.3])
    assert said == "warning: The held-out reward fell from 0.6 to 0.3, and that of training did not."
    assert told(tmp_path, {}, held_out=[0.3, 0.6, 0.5]) == []


def test_a_run_whose_reward_fell_is_not_said_to_keep_it(tmp_path: Path) -> None:
    up_and_down = [0.2 + 0.02 * min(k, 59 - k) for k in range(STEPS)]
    (said,) = told(tmp_path, {"reward": up_and_down}, held_out=[0.3, 0.7, 0.4])
    assert said.startswith("warning: The reward fell to")


def groups(rewards: Sequence[Sequence[float]], outcome: str = "kept") -> list[Event]:
    """A record of each group's beginning and end, and of its episodes with these rewards."""
    made: list[Event] = []
    for group, own in enumerate(rewards):
        made.append(GroupAdmitted(t=T0, group=group, epoch=0, row=group, stamp=0, example={}))
        for member, reward in enumerate(own):
            made += episode(f"{group}.{member}", T0, [trajectory(PROMPT, "x", reward=reward)])
        made.append(GroupEnded(t=T0 + 1, group=group, outcome=outcome))
    return made


@pytest.mark.parametrize(
    ("rewards", "text"),
    [
        (
            [(0.0, 0.0)] * 9 + [(0.0, 1.0)] * 3,
            "warning: 75% of the last 12 groups had equal rewards, and taught nothing",
        ),
        ([(0.0, 0.0)] * 8 + [(1.0, 1.0)] * 2, "80% of these the lowest, 20% the highest."),
        ([(0.0, 0.0)] * 10, "and taught nothing: all 0."),
        ([(1.0, 1.0)] * 5 + [(0.0, 1.0)] * 5, "note: 50% of the last 10 groups had equal rewards, and taught nothing"),
    ],
)
def test_groups_of_equal_rewards_are_told(tmp_path: Path, rewards: list[tuple[float, float]], text: str) -> None:
    life(tmp_path, [began(), *groups(rewards)])
    (said,) = told(tmp_path, {})
    assert text in said


def test_equal_groups_of_a_solved_task_are_a_note_and_rejected_ones_none(tmp_path: Path) -> None:
    for name, outcome in (("solved", "kept"), ("replaced", "rejected")):
        life(tmp_path / name, [began(), *groups([(1.0, 1.0)] * 20, outcome)])
    (said,) = told(tmp_path / "solved", {"reward": [0.95] * STEPS})
    assert said == "note: 100% of the last 20 groups had equal rewards, nearly all of them the highest."
    assert told(tmp_path / "replaced", {}) == []
