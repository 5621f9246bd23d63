"""The numbers of a run: evaluations on held-out examples, metrics of batches, and the JSONL files that hold them."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import compress, islice
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from rich.console import Console

from arl.api.config import EvaluationConfig, LogConfig
from arl.api.engine import InferenceEngine, PublishStats
from arl.api.errors import ConfigError, RunFileError
from arl.api.types import Group, StepStats, Trajectory
from arl.rollout.controller import Dataset, run_examples
from arl.rollout.episode import EpisodeRunner, episode_reward
from arl.training.display import Display


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Results on the held-out examples at one version."""

    version: int
    reward: float
    """Mean over all episodes. A failed episode counts as 0."""
    num_episodes: int
    num_failed: int
    wall_s: float
    """Duration in seconds."""
    metrics: Mapping[str, float]
    """Means of the workflow's metrics and of the parts of its reward."""


class Evaluator:
    """Runs one episode for each held-out example with the workflow and engine of training, but not its buffer."""

    def __init__(
        self,
        engine: InferenceEngine,
        runner: EpisodeRunner,
        dataset: Dataset,
        config: EvaluationConfig,
        *,
        seed: int | None = None,
    ) -> None:
        """seed: gives each request a seed, the same in every evaluation. None: requests keep the workflow's seed."""
        self._engine = engine
        self._runner = runner
        self._dataset = dataset
        self._config = config
        self._seed = seed

    @property
    def num_examples(self) -> int:
        return len(self._dataset)

    async def evaluate(self, on_end: Callable[[], None] = lambda: None) -> Evaluation:
        """Run all held-out examples. `version` is the published version at the start.

        Failed and rejected episodes count as reward 0. on_end: called after each episode.
        """
        began, version = time.monotonic(), self._engine.version
        episodes = await run_examples(
            self._engine,
            self._runner,
            self._dataset,
            max_concurrent=self._config.max_concurrent_episodes,
            seed=self._seed,
            on_end=on_end,
        )
        return Evaluation(
            version=version,
            reward=fmean(episode.reward for episode in episodes),
            num_episodes=len(episodes),
            num_failed=sum(episode.error is not None for episode in episodes),
            wall_s=time.monotonic() - began,
            metrics={
                **mean_metrics([t for episode in episodes for t in episode.trajectories]),
                **mean_rewards(episode.trajectories for episode in episodes),
            },
        )


class RunLog:
    """Writes a run's files, and shows its steps and evaluations. Not thread-safe. Raises RunFileError.

    A resumed run cuts the files back to the checkpoint's version, so each version has one line.
    """

    def __init__(
        self,
        run_dir: Path,
        config: LogConfig,
        *,
        display: Display | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """display: None shows nothing. decode: token ids -> text; None: trajectories are written without text."""
        with _usable(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
        self._paths = {name: run_dir / f"{name}.jsonl" for name in ("metrics", "trajectories", "evaluations")}
        self._config = config
        self._decode = decode
        self.display = display or Display(console=Console(quiet=True))

    def resume(self, version: int) -> None:
        """Delete lines of later versions, and torn lines."""
        for path in self._paths.values():
            with _usable(path):
                rows = [row for row in read_jsonl(path) if row["version"] <= version]
                write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))

    def evaluations(self) -> dict[int, Evaluation]:
        """By version."""
        return {row["version"]: Evaluation(**row) for row in read_jsonl(self._paths["evaluations"])}

    def step(self, stats: StepStats, groups: Sequence[Group], advantages: Sequence[float | None]) -> None:
        """advantages: each trajectory's mean over its trained tokens; None without trained tokens."""
        self._append("metrics", [dict(stats.metrics)])
        self._append("trajectories", self._trajectory_rows(stats.version, groups, advantages))
        self.display.step(stats)

    def evaluation(self, evaluation: Evaluation) -> None:
        self._append("evaluations", [asdict(evaluation)])
        self.display.say(
            f"held-out reward {evaluation.reward:.3f} at version {evaluation.version} "
            f"({evaluation.num_episodes} episodes, {evaluation.num_failed} failed, {evaluation.wall_s:.1f} s)"
        )

    def _trajectory_rows(
        self, version: int, groups: Sequence[Group], advantages: Sequence[float | None]
    ) -> Iterator[dict[str, Any]]:
        members = [(group, i) for group in groups for i in range(len(group.trajectories))]
        pairs = zip(members, advantages, strict=True)
        for (group, i), advantage in islice(pairs, self._config.trajectories):
            trajectory = group.trajectories[i]
            row = {
                "version": version,
                "group_id": group.group_id,
                "example_id": group.example_id,
                "episode": group.episode_indices[i],
                **asdict(trajectory),
                "greedy_rewards": dict(group.greedy_rewards),
                "advantage": advantage,
            }
            yield row | ({"text": self._decode(trajectory.token_ids)} if self._decode else {})

    def _append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        with _usable(self._paths[name]), self._paths[name].open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def make_run_dir(run_dir: Path) -> None:
    """Create the directory if needed. Raises ConfigError if it is not writable."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir):
            pass
    except OSError as error:
        reason = "it is a file" if isinstance(error, FileExistsError) else error.strerror or str(error)
        raise ConfigError(
            f"run_dir is {run_dir}, where a run cannot write its files: {reason}; set run_dir to a directory that can "
            "be made or written to"
        ) from error


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFileError(
            f"{path} cannot be written or read: {error.strerror or error}; the same command continues from the last "
            "checkpoint once it can be"
        ) from error


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of `path`, without a last line that a kill cut short. A missing file has no rows."""
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def write_atomically(path: Path, text: str) -> None:
    """Replace the file's text in one step: a reader, or a rerun after a kill, finds the whole old or new file."""
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(text)
    aside.replace(path)


def plot_run(run_dir: Path) -> Path:
    """Draw reward, staleness and throughput over wall time from metrics.jsonl into reward.png; return its path.

    Raises ImportError without matplotlib, and names the extra to install.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("plot_run draws with matplotlib; install it with: pip install 'arl[examples]'") from None
    rows = read_jsonl(run_dir / "metrics.jsonl")
    evaluations = read_jsonl(run_dir / "evaluations.jsonl")
    seconds_by_version = {0: 0.0, **{row["version"]: row["time_s"] for row in rows}}
    seconds = [row["time_s"] for row in rows]
    figure = Figure(figsize=(8, 9), layout="constrained")
    reward, staleness, throughput = figure.subplots(3, 1, sharex=True)
    reward.plot(seconds, [row["reward"] for row in rows], label="training batch")
    at = [seconds_by_version.get(row["version"], 0.0) for row in evaluations]
    reward.plot(at, [row["reward"] for row in evaluations], "o", label="held out")
    shown = [row["reward"] for row in (*rows, *evaluations)]
    if shown and min(shown) >= 0 and max(shown) <= 1:
        reward.set(ylim=(-0.02, 1.02))
    reward.set(ylabel="reward", title="arl: reward, staleness and throughput over wall time")
    reward.legend(loc="lower right")
    staleness.plot(seconds, [row["staleness/max"] for row in rows], label="oldest token")
    staleness.plot(seconds, [row["staleness/mean"] for row in rows], label="mean")
    staleness.set(ylabel="staleness (versions)", ylim=(-0.1, None))
    staleness.legend(loc="lower right")
    throughput.plot(seconds, [row["samples_per_s"] for row in rows])
    throughput.set(ylabel="episodes trained per second", xlabel="wall time (s)", ylim=(0, None))
    path = run_dir / "reward.png"
    figure.savefig(path, dpi=120)
    return path


# Metrics of batches and runs, computed from records alone.


@dataclass(slots=True, kw_only=True)
class RunTotals:
    """Totals of a run over all its starts, kept in checkpoints. The rollout controller keeps its own counters."""

    wall_s: float = 0.0
    """Training time in seconds."""
    max_staleness_seen: int = 0
    """The largest staleness of a trained token so far."""


def episode_rewards(groups: Sequence[Group]) -> list[float]:
    """One reward for each episode. With several trajectories it is the mean over the roles."""
    return [episode_reward(episode) for episode in _episodes(groups)]


def _episodes(groups: Sequence[Group]) -> list[list[Trajectory]]:
    episodes: list[list[Trajectory]] = []
    for group in groups:
        by_episode: dict[int, list[Trajectory]] = {}
        for index, trajectory in zip(group.episode_indices, group.trajectories, strict=True):
            by_episode.setdefault(index, []).append(trajectory)
        episodes += by_episode.values()
    return episodes


def batch_metrics(
    groups: Sequence[Group], version: int, replayed: Sequence[Group] = (), *, mask_truncated: bool = False
) -> dict[str, float]:
    """Staleness of the trained tokens at the trainer's `version`, lengths, the workflow's metrics and reward parts.

    replayed: groups of earlier batches, trained beside the new ones. They count in the staleness alone.
    mask_truncated: truncated trajectories are not trained.
    """

    def is_trained(trajectory: Trajectory) -> bool:
        return not (mask_truncated and trajectory.is_truncated)

    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    all_trained = [*trajectories, *(trajectory for group in replayed for trajectory in group.trajectories)]
    staleness = [version - v for t in filter(is_trained, all_trained) for v in compress(t.versions, t.loss_mask)]
    return {
        "staleness/mean": fmean(staleness) if staleness else 0.0,
        "staleness/max": max(staleness, default=0),
        "replayed_groups": len(replayed),
        "equal_groups": fmean(map(_is_equal, groups)),
        "truncated": fmean(t.is_truncated for t in trajectories),
        "branches": fmean(len(own) - len({t.role for t in own}) for own in _episodes(groups)),
        "length/tokens": fmean(len(t.token_ids) for t in trajectories),
        "length/tokens_max": max(len(t.token_ids) for t in trajectories),
        "length/trained_tokens": fmean(t.num_trained_tokens * is_trained(t) for t in trajectories),
        **mean_metrics(trajectories),
        **mean_rewards(_episodes(groups)),
    }


def reward_metrics(rewards: Sequence[float]) -> dict[str, float]:
    """Statistics of a batch's episode rewards."""
    return {
        "reward": fmean(rewards),
        "reward_std": pstdev(rewards),
        "reward_min": min(rewards),
        "reward_max": max(rewards),
    }


def _is_equal(group: Group) -> bool:
    """Whether the outcomes are equal within each role."""
    return len({(t.role, t.reward) for t in group.trajectories}) == len({t.role for t in group.trajectories})


def mean_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`episode/NAME`: each workflow metric, averaged over the trajectories that have it."""
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            values.setdefault(f"episode/{name}", []).append(value)
    return {name: fmean(numbers) for name, numbers in values.items()}


def mean_rewards(episodes: Iterable[Sequence[Trajectory]]) -> dict[str, float]:
    """`reward/NAME`: each named part of the reward, averaged over an episode's trajectories that have it, then over
    episodes."""
    values: dict[str, list[float]] = {}
    for trajectories in episodes:
        for name in dict.fromkeys(name for t in trajectories for name in t.rewards):
            own = fmean(t.rewards[name] for t in trajectories if name in t.rewards)
            values.setdefault(f"reward/{name}", []).append(own)
    return {name: fmean(numbers) for name, numbers in values.items()}


def publish_metrics(published: PublishStats | None) -> dict[str, float]:
    """Of the newest complete publish, which may be of an earlier version."""
    if published is None:
        return {}
    return {
        "weights/version": published.version,
        "weights/snapshot_s": published.snapshot_s,
        "weights/transfer_s": published.transfer_s,
        "weights/pause_s": published.pause_s,
        "weights/bytes": published.num_bytes,
    }
