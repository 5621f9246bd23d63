"""What a run writes for its users: one line per version, also after a resume, and a picture."""

from pathlib import Path
from typing import Any

import pytest
from records import grouped, stats, trajectory

from arl.api.config import LogConfig
from arl.api.errors import RunFileError
from arl.api.types import Group, TurnSpan
from arl.training.metrics import Evaluation, batch_metrics, episode_rewards, reward_metrics
from arl.training.run_files import RunLog, plot_run, read_jsonl

QUIET = LogConfig(console=False, trajectories=3)


def write(log: RunLog, version: int, *groups: Group) -> None:
    """Log a step; a trajectory's advantage is its reward less 0.5."""
    log.step(stats(version), groups, [t.reward - 0.5 for group in groups for t in group.trajectories])


def evaluation(version: int) -> Evaluation:
    return Evaluation(version=version, reward=0.25, num_episodes=4, num_failed=0, wall_s=1.0, metrics={})


def test_trajectories_are_written_token_by_token_with_what_they_were_trained_with(tmp_path: Path) -> None:
    turn = TurnSpan(start=1, stop=3, reward=0.5, state="s")
    first = trajectory(rewards={"form": 0.25}, turns=(turn,), is_truncated=True)
    log = RunLog(tmp_path, QUIET, decode=lambda ids: " ".join(map(str, ids)))
    right = trajectory(reward=1.0)
    groups = grouped(first, number=2, greedy_rewards={"agent": 0.75}), grouped(right, right, right)
    log.step(stats(1), groups, [0.25, None, -0.25, 0.0])
    rows = read_jsonl(tmp_path / "trajectories.jsonl")
    assert [(row["reward"], row["advantage"]) for row in rows] == [(0.0, 0.25), (1.0, None), (1.0, -0.25)]
    assert (rows[0]["versions"], rows[0]["text"], rows[0]["example_id"]) == ([-1, 3, 4], "1 1 1", [0, 2])
    assert rows[0]["turns"] == [{"start": 1, "stop": 3, "reward": 0.5, "state": "s"}]
    assert (rows[0]["rewards"], rows[0]["greedy_rewards"]) == ({"form": 0.25}, {"agent": 0.75})
    assert [row["is_truncated"] for row in rows] == [True, False, False]


def test_a_resume_cuts_back_to_its_version_drops_a_torn_line_and_keeps_evaluations_and_the_picture_shows_the_rest(
    tmp_path: Path,
) -> None:
    log, lines = RunLog(tmp_path, QUIET), tmp_path / "metrics.jsonl"
    log.evaluation(evaluation(0))
    for version in (1, 2, 3):
        write(log, version, grouped(trajectory()))
    log.evaluation(evaluation(3))
    whole = lines.read_text()
    lines.write_text(whole + '{"version": 1, "rew')
    again = RunLog(tmp_path, QUIET)
    again.resume(2)
    assert lines.read_text() == "".join(whole.splitlines(keepends=True)[:2])
    assert again.evaluations() == {0: evaluation(0)}
    assert plot_run(tmp_path).read_bytes().startswith(b"\x89PNG")


def test_a_file_that_cannot_be_written_is_an_error_of_arls_own_that_names_it(tmp_path: Path) -> None:
    log = RunLog(tmp_path, QUIET)
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(RunFileError, match=r"metrics\.jsonl cannot be written or read: Is a directory; the same"):
        write(log, 1, grouped(trajectory()))
    with pytest.raises(RunFileError, match="Is a directory"):
        log.resume(1)


ONE, CUT = trajectory(), trajectory((0, 0), is_truncated=True)
BRANCHED = trajectory(), trajectory(), trajectory(role="checker"), trajectory()


@pytest.mark.parametrize(
    ("groups", "options", "expected"),
    [
        ([grouped(trajectory((3, 5)))], {}, {"staleness/mean": 2.0, "staleness/max": 3}),
        (
            [grouped(trajectory((5, 5)))],
            {"replayed": [grouped(trajectory((3, 3), metrics={"calls": 3.0}))]},
            {"replayed_groups": 1, "staleness/mean": 2.0, "staleness/max": 3, "episode/calls": None},
        ),
        (
            [grouped(trajectory((5, 5)), CUT)],
            {"mask_truncated": True},
            {"truncated": 0.5, "staleness/max": 1, "length/trained_tokens": 1.0},
        ),
        (
            [grouped(ONE, CUT), grouped(ONE, trajectory(reward=1.0))],
            {},
            {"equal_groups": 0.5, "truncated": 0.25},
        ),
        ([grouped(*BRANCHED, episode_indices=(0, 0, 0, 1))], {}, {"branches": 0.5}),
        (
            [grouped(*(trajectory(metrics=of) for of in ({"calls": 1.0}, {"calls": 3.0}, {})))],
            {},
            {"episode/calls": 2.0, "reward/form": None},
        ),
        (
            [
                grouped(
                    *(trajectory(rewards=of) for of in ({"form": 1.0}, {"form": 0.0}, {})), episode_indices=(0, 0, 1)
                ),
                grouped(trajectory(rewards={"form": 0.25})),
            ],
            {},
            {"reward/form": 0.375},
        ),
    ],
    ids=["staleness", "replayed groups", "masked", "equal and truncated", "branches", "workflow's", "reward parts"],
)
def test_metrics_of_a_batch(groups: list[Group], options: dict[str, Any], expected: dict[str, float | None]) -> None:
    """Of trained tokens against version 6. An episode counts once, if it has what is averaged."""
    metrics = batch_metrics(groups, 6, **options)
    assert {name: metrics.get(name) for name in expected} == expected


def test_rewards_are_of_episodes_each_of_which_counts_once() -> None:
    branched = grouped(ONE, trajectory(reward=1.0), trajectory(reward=1.0), episode_indices=(0, 0, 1))
    assert episode_rewards([branched]) == [0.5, 1.0]
    spread = {"reward": 0.5, "reward_std": 0.5, "reward_min": 0.0, "reward_max": 1.0}
    assert reward_metrics([0.0, 1.0, 1.0, 0.0]) == spread
