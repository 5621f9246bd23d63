"""What a run writes for its users: one line per version, also after a resume, and a picture."""

import os
import resource
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from records import grouped, stats, trajectory
from rich.console import Console

from arl.api.engine import Sampler
from arl.api.errors import RunFileError
from arl.api.fakes import ScriptedEngine
from arl.api.settings.run import EvaluationConfig, LogConfig
from arl.api.types import Evaluation, Example, Group, Trajectory
from arl.api.workflow import RolloutWorkflow
from arl.observe.tracking import evaluation_metrics
from arl.rollout.episode import EpisodeRunner
from arl.training.display import Display
from arl.training.evaluator import Evaluator
from arl.training.metrics import batch_metrics, episode_rewards, reward_metrics, role_rewards
from arl.training.metrics_log import RunLog, plot_run, read_jsonl

QUIET = LogConfig(console=False)


def write(log: RunLog, version: int, *groups: Group) -> None:
    """Log a step; a trajectory's advantage is its reward less 0.5."""
    log.step(stats(version), groups, [t.reward - 0.5 for group in groups for t in group.trajectories])


def evaluation(version: int) -> Evaluation:
    return Evaluation(version=version, reward=0.25, num_episodes=4, num_failed=0, wall_s=1.0, metrics={})


def test_a_resume_cuts_back_to_its_version_drops_a_torn_line_and_keeps_evaluations_and_the_picture_shows_the_rest(
    tmp_path: Path,
) -> None:
    """Evaluations are kept by version: one of version 2 may end after the checkpoint of version 2 was taken."""
    log, lines = RunLog(tmp_path, QUIET), tmp_path / "metrics.jsonl"
    log.evaluation(evaluation(0))
    for version in (1, 2, 3):
        write(log, version, grouped(trajectory()))
    log.evaluation(evaluation(3))
    log.evaluation(evaluation(2))
    whole = lines.read_text()
    lines.write_text(whole + '{"version": 1, "rew')
    said = StringIO()
    again = RunLog(tmp_path, QUIET, display=Display(console=Console(file=said, width=200)))
    again.resume(2)
    kept, undone = whole.splitlines(keepends=True)[:2], whole.splitlines(keepends=True)[2:]
    assert lines.read_text() == "".join(kept)
    assert (tmp_path / "metrics.undone.jsonl").read_text() == "".join(undone)
    assert [row["version"] for row in read_jsonl(tmp_path / "evaluations.undone.jsonl")] == [3]
    assert said.getvalue().splitlines() == [
        f"{name}.jsonl: 1 row after version 2 moved to {name}.undone.jsonl" for name in ("metrics", "evaluations")
    ]
    assert again.evaluations() == {0: evaluation(0), 2: evaluation(2)}
    write(again, 3, grouped(trajectory()))
    RunLog(tmp_path, QUIET).resume(2)
    assert [row["version"] for row in read_jsonl(tmp_path / "metrics.undone.jsonl")] == [3, 3]
    assert plot_run(tmp_path).read_bytes().startswith(b"\x89PNG")


def test_a_resume_keeps_every_row_up_to_its_version_in_a_file_that_was_edited(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"version": 1}\n\xff\xfe{"version": 2}\n{"version": 2}\n{}\n[[\n{"version": 3}\n{"version": 1}')
    log = RunLog(tmp_path, QUIET)
    log.resume(2)
    assert [row["version"] for row in read_jsonl(path)] == [1, 2, 1]
    write(log, 3, grouped(trajectory()))
    assert [row["version"] for row in read_jsonl(path)] == [1, 2, 1, 3]


def test_rows_behind_a_line_that_is_none_are_read_and_the_line_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"version": 1}\nnonsense\n{"version": 2}\n\xff\n' + b"[" * 10**5 + b'\n\n{"version": 3}\n{"ve')
    assert [row["version"] for row in read_jsonl(path)] == [1, 2, 3]
    assert caplog.messages == [f"{path}: left out 3 lines that are not rows of this file (lines 2, 4, 5)"]


def test_a_picture_and_a_start_leave_out_rows_that_lack_something(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = RunLog(tmp_path, QUIET)
    for name in ("metrics", "evaluations"):
        (tmp_path / f"{name}.jsonl").write_text('{}\n{"version": 1}\n')
    write(log, 2, grouped(trajectory()))
    log.evaluation(evaluation(2))
    assert log.evaluations() == {2: evaluation(2)}
    assert plot_run(tmp_path).exists()
    for name in ("metrics", "evaluations"):
        assert f"{name}.jsonl: left out 2 lines that are not rows of this file (lines 1, 2)" in caplog.text


def test_rows_are_on_the_disk_when_a_checkpoint_may_name_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, synced = RunLog(tmp_path, QUIET), set[str]()
    log.sync()
    write(log, 1, grouped(trajectory()))
    log.evaluation(evaluation(1))
    monkeypatch.setattr(os, "fsync", lambda file: synced.add(os.path.basename(os.readlink(f"/proc/self/fd/{file}"))))
    log.sync()
    assert synced == {"metrics.jsonl", "evaluations.jsonl", tmp_path.name}


def test_a_file_that_cannot_be_written_is_an_error_of_arls_own_that_names_it(tmp_path: Path) -> None:
    log = RunLog(tmp_path, QUIET)
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(RunFileError, match=r"metrics\.jsonl cannot be written or read: Is a directory; the same"):
        write(log, 1, grouped(trajectory()))
    with pytest.raises(RunFileError, match="Is a directory"):
        log.resume(1)


@pytest.fixture
def disk_of() -> Iterator[Callable[[int], None]]:
    """disk_of(room): no file of this process may grow beyond so many bytes, until the end of the test."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda room: resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_steps_row_is_written_again_after_an_error_and_never_twice(
    tmp_path: Path, disk_of: Callable[[int], None]
) -> None:
    log = RunLog(tmp_path, QUIET)
    write(log, 1, grouped(trajectory()))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"of": "a user"}\n' * 100)
    size = path.stat().st_size
    disk_of(size + 10)
    with pytest.raises(RunFileError, match=r"metrics\.jsonl cannot be written or read: File too large"):
        write(log, 2, grouped(trajectory()))
    assert path.stat().st_size == size + 10
    disk_of(resource.RLIM_INFINITY)
    for _ in range(2):
        write(log, 2, grouped(trajectory()))
    rows = read_jsonl(path)
    assert [row["version"] for row in rows if "version" in row] == [1, 2]
    assert len(rows) == 2 + 100


ONE, CUT = trajectory(), trajectory((0, 0), is_truncated=True)
LONG = trajectory((3, 3, 3))
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
            {"is_trained": [[True, False]]},
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
        (
            [
                grouped(ONE, LONG, *[trajectory(reward=1.0)] * 2, episode_indices=(0, 0, 1, 2)),
                grouped(trajectory((3,)), trajectory((3,) * 6, reward=0.5)),
                grouped(LONG, LONG),
            ],
            {},
            {"length/winning_tokens": (2 + 6) / 2, "length/losing_tokens": (5 + 1) / 2},
        ),
        ([grouped(ONE, ONE)], {}, {"length/winning_tokens": None, "length/losing_tokens": None}),
        (
            [grouped(ONE, trajectory((3,), reward=0.5), trajectory((3,) * 4, reward=0.6), trajectory(reward=0.1))],
            {"is_trained": [[True, False, True, False]]},
            {
                "length/winning_tokens": 4,
                "length/losing_tokens": 2,
                "length/trained_tokens": 1.5,
                "staleness/mean": 17 / 6,
            },
        ),
    ],
    ids=[
        *("staleness", "replayed groups", "masked", "equal and truncated", "branches", "workflow's", "reward parts"),
        *("lengths of wins and losses", "all equal", "a pair of four"),
    ],
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


def test_an_evaluation_of_named_datasets_is_read_back_and_shown_under_its_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {"gsm8k": evaluation(0), "aime": replace(evaluation(0), reward=0.75)}
    named = replace(evaluation(0), reward=0.5, by_name=parts)
    log = RunLog(tmp_path, QUIET, display=Display())
    log.evaluation(named)
    log.evaluation(evaluation(2))
    assert RunLog(tmp_path, QUIET).evaluations() == {0: named, 2: evaluation(2)}
    shown = capsys.readouterr().out
    assert "held-out reward 0.500" in shown
    assert "aime: 0.750" in shown
    assert evaluation_metrics(named)["eval/aime/reward"] == 0.75
    assert evaluation_metrics(named)["eval/reward"] == 0.5


class Attempts(RolloutWorkflow):
    """The example's rewards, one for each attempt; None fails it."""

    def __init__(self) -> None:
        self.attempts: Counter[str] = Counter()

    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory:
        attempt, self.attempts[data["name"]] = self.attempts[data["name"]], self.attempts[data["name"]] + 1
        if (reward := data["rewards"][attempt]) is None:
            raise RuntimeError("it failed")
        return Trajectory(
            token_ids=(1, 9), loss_mask=(0, 1), behavior_logprobs=(0.0, -1.0), versions=(-1, 0), reward=reward
        )


async def test_several_episodes_an_example_tell_pass_at_k_and_count_as_one_in_the_error() -> None:
    """By hand: of 4 attempts 1, 0 and 3 pass; a failed one does not. pass@2 = 1 - C(4 - c, 2) / 6."""
    rows = [
        {"name": "a", "rewards": [0.0, 1.0, 0.9, None]},
        {"name": "b", "rewards": [0.0, 0.0, 0.0, 0.0]},
        {"name": "c", "rewards": [1.0, 2.0, 0.0, 1.0]},
    ]
    config = EvaluationConfig(episodes_per_example=4)
    runner = EpisodeRunner(workflow=Attempts(), timeout_s=5.0)
    places = {"hard": range(2), "easy": range(2, 3)}
    engine = ScriptedEngine(lambda request: [9])
    evaluation, episodes = await Evaluator(engine, runner, rows, config, places=places, max_concurrent=5).evaluate()
    assert (len(episodes), evaluation.num_episodes, evaluation.num_failed) == (12, 12, 1)
    chances = {k: v for k, v in evaluation.metrics.items() if k.startswith("pass@")}
    of_hard, of_easy = [(0.25 + 0) / 2, (0.5 + 0) / 2, 1 / 2], [0.75, 1.0, 1.0]
    both = [(hard + easy) / 2 for hard, easy in zip(of_hard, of_easy, strict=True)]  # as with the reward
    assert chances == pytest.approx(dict(zip(("pass@1", "pass@2", "pass@4"), both, strict=True)))
    assert evaluation.by_name is not None
    hard = evaluation.by_name["hard"]
    assert hard.metrics["pass@2"] == pytest.approx(0.25)
    assert hard.reward == pytest.approx((1.9 / 4 + 0) / 2)
    assert hard.standard_error == pytest.approx(1.9 / 4 / 2)  # of two examples, not of eight episodes
    assert evaluation.by_name["easy"].reward == pytest.approx(1.0)


def test_roles_have_the_mean_reward_of_the_episodes_in_which_they_speak() -> None:
    author, critic = trajectory(reward=1.0), trajectory(reward=0.25)
    episodes = [
        [replace(author, role="author"), replace(author, role="author", reward=0.0), replace(critic, role="critic")],
        [replace(author, role="author")],
        [],
    ]
    assert role_rewards(episodes) == {"role/author/reward": 0.75, "role/critic/reward": 0.25}
    assert role_rewards([[author], [critic]]) == {}
