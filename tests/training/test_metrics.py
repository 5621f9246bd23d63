"""What a run writes for its users: one line per version, also after a resume, and a picture."""

import json
from pathlib import Path

import pytest
from training.records import group, stats, trajectory

from arl.api.config import LogConfig
from arl.api.errors import RunFileError
from arl.api.types import Group, Trajectory, TurnSpan
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
    first = trajectory(0.0, rewards={"form": 0.25}, turns=(turn,), is_truncated=True)
    log = RunLog(tmp_path, QUIET, decode=lambda ids: " ".join(map(str, ids)))
    groups = group(first, greedy_rewards={"agent": 0.75}), group(trajectory(), trajectory(), trajectory())
    log.step(stats(1), groups, [0.25, None, -0.25, 0.0])
    rows = read_jsonl(tmp_path / "trajectories.jsonl")
    assert [(row["reward"], row["advantage"]) for row in rows] == [(0.0, 0.25), (1.0, None), (1.0, -0.25)]
    assert (rows[0]["versions"], rows[0]["text"], rows[0]["example_id"]) == ([-1, 3, 4], "5 6 7", [0, 2])
    assert rows[0]["turns"] == [{"start": 1, "stop": 3, "reward": 0.5, "state": "s"}]
    assert (rows[0]["rewards"], rows[0]["greedy_rewards"]) == ({"form": 0.25}, {"agent": 0.75})
    assert [row["is_truncated"] for row in rows] == [True, False, False]


def test_each_named_part_of_the_reward_is_averaged_over_the_episodes_that_have_it() -> None:
    def of(**rewards: float) -> Trajectory:
        return trajectory(rewards=rewards)

    metrics = batch_metrics(
        [group(of(correct=1.0), of(correct=0.0), of(), episodes=(0, 0, 1)), group(of(correct=0.1))], 4
    )
    assert metrics["reward/correct"] == pytest.approx(0.3)  # the mean of 0.5 and 0.1
    assert "reward/correct" not in batch_metrics([group(of())], 4)


def test_a_resume_cuts_back_to_its_version_and_keeps_evaluations(tmp_path: Path) -> None:
    log = RunLog(tmp_path, QUIET)
    log.evaluation(evaluation(0))
    for version in (1, 2, 3):
        write(log, version, group(trajectory()))
    log.evaluation(evaluation(3))
    again = RunLog(tmp_path, QUIET)
    again.resume(2)
    assert [row["version"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]
    assert again.evaluations() == {0: evaluation(0)}


def test_a_line_cut_short_by_a_kill_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"version": 1}) + "\n" + '{"version": 2, "rew')
    RunLog(tmp_path, QUIET).resume(5)
    assert path.read_text() == '{"version": 1}\n'


def test_a_file_that_cannot_be_written_is_an_error_of_arls_own_that_names_it(tmp_path: Path) -> None:
    log = RunLog(tmp_path, QUIET)
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(RunFileError, match=r"metrics\.jsonl cannot be written or read: Is a directory; the same"):
        write(log, 1, group(trajectory()))
    with pytest.raises(RunFileError, match="Is a directory"):
        log.resume(1)


def test_the_picture_is_drawn_from_the_files(tmp_path: Path) -> None:
    log = RunLog(tmp_path, QUIET)
    log.evaluation(evaluation(0))
    for version in (1, 2):
        write(log, version, group(trajectory()))
    path = plot_run(tmp_path)
    assert path.name == "reward.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_an_episode_of_several_trajectories_counts_once() -> None:
    branched = group(trajectory(0.0), trajectory(1.0), trajectory(1.0), episodes=(0, 0, 1))
    assert episode_rewards([branched]) == [0.5, 1.0]


def test_staleness_is_of_trained_tokens_against_the_trainers_version() -> None:
    numbers = batch_metrics([group(trajectory(versions=(-1, 3, 5)))], version=6)
    assert numbers["staleness/mean"] == 2.0
    assert numbers["staleness/max"] == 3


def test_replayed_groups_are_counted_and_only_their_staleness_is_added() -> None:
    new, old = group(trajectory(versions=(-1, 4, 4))), group(trajectory(versions=(-1, 2, 2), metrics={"calls": 3.0}))
    metrics = batch_metrics([new], version=5, replayed=[old])
    assert (metrics["replayed_groups"], metrics["staleness/mean"], metrics["staleness/max"]) == (1, 2.0, 3)
    assert "episode/calls" not in metrics


def test_workflow_metrics_are_averaged_over_those_that_have_them() -> None:
    numbers = batch_metrics(
        [group(trajectory(metrics={"calls": 1.0}), trajectory(metrics={"calls": 3.0}), trajectory())], version=6
    )
    assert numbers["episode/calls"] == 2.0


def test_metrics_show_how_rewards_are_spread_and_which_groups_teach_nothing() -> None:
    assert reward_metrics([0.0, 1.0, 1.0, 0.0]) == {
        "reward": 0.5,
        "reward_std": 0.5,
        "reward_min": 0.0,
        "reward_max": 1.0,
    }
    cut = trajectory(is_truncated=True)
    numbers = batch_metrics([group(trajectory(), cut), group(trajectory(), trajectory(reward=0.0))], version=6)
    assert numbers["equal_groups"] == 0.5
    assert numbers["truncated"] == 0.25


def test_branches_are_the_trajectories_beyond_one_for_each_role() -> None:
    branched = trajectory(), trajectory(), trajectory(role="checker")
    made = group(*branched, trajectory(), episodes=(0, 0, 0, 1))
    assert batch_metrics([made], version=6)["branches"] == 0.5


def test_trajectories_that_truncation_masks_are_not_among_the_trained() -> None:
    cut = trajectory(versions=(-1, 0, 0), is_truncated=True)
    numbers = batch_metrics([group(trajectory(versions=(-1, 5, 5)), cut)], version=6, mask_truncated=True)
    assert numbers["staleness/max"] == 1
    assert numbers["length/trained_tokens"] == 1.0
