"""`arl eval`: score a model on the examples of an experiment, several episodes for each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from arl.api.errors import ConfigError
from arl.api.images import text_with_marks
from arl.api.settings.run import Config
from arl.cli.command import counted, finite, parse, parser_of, positive, run_command, users_traceback
from arl.cli.episodes import Decode, Run, Stage, Work, add_options, open_stage
from arl.rollout.episode import Episode, rewards_by_role
from arl.rollout.monitors import FailureBudget
from arl.run.experiment import Experiment
from arl.runtime.console import is_json, tell
from arl.runtime.threads import offload
from arl.training.display import Advance, Display
from arl.training.evaluator import Estimate, pass_at_k
from arl.training.metrics import mean_rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeOutcome:
    """The part of an episode that the scores keep."""

    reward: float
    passed: bool
    means: Mapping[str, Sequence[float]]
    """Numbers by name, the workflow's and arl's own; empty for an episode that did not finish."""


@dataclass(slots=True, kw_only=True)
class Scores:
    """Adds up episodes as they end. Failed and rejected episodes have reward 0 and do not pass."""

    ks: Sequence[int]
    pass_reward: float
    """An episode passes with this reward or more."""
    places: Mapping[str, range] = field(default_factory=dict[str, range])
    """The indices of each named dataset's examples, if they have names."""
    by_example: dict[int, list[EpisodeOutcome]] = field(default_factory=dict[int, list[EpisodeOutcome]])
    num_episodes: int = 0
    num_failed: int = 0
    num_rejected: int = 0
    total_reward: float = 0.0
    first_error: tuple[Work, Exception] | None = None

    def add(self, run: Run) -> EpisodeOutcome:
        episode, is_finished = run.episode, run.episode.is_finished
        outcome = EpisodeOutcome(
            reward=episode.reward,
            passed=is_finished and episode.reward >= self.pass_reward,
            means=_numbers(episode) if is_finished else {},
        )
        self.by_example.setdefault(run.work.index, []).append(outcome)
        self.num_episodes += 1
        self.num_failed += episode.error is not None
        self.num_rejected += episode.is_rejected
        self.total_reward += outcome.reward
        if episode.error is not None and self.first_error is None:
            self.first_error = (run.work, episode.error)
        return outcome

    def estimates(self) -> dict[str, Estimate]:
        """The reward, and pass@k over the examples with k episodes. A run that was stopped has examples with fewer."""
        groups = list(self.by_example.values())
        found = {"reward": Estimate.of([fmean(outcome.reward for outcome in group) for group in groups])}
        for name, places in self.places.items():
            if own := [self.by_example[place] for place in places if place in self.by_example]:
                found[f"reward, {name}"] = Estimate.of([fmean(outcome.reward for outcome in group) for group in own])
        for k in self.ks:
            whole = [group for group in groups if len(group) >= k]
            if chances := [pass_at_k(len(group), sum(outcome.passed for outcome in group), k) for group in whole]:
                found[f"pass@{k}"] = Estimate.of(chances)
        return found

    def means(self) -> dict[str, float]:
        """The mean of each number over the episodes that have it."""
        values: dict[str, list[float]] = {}
        for outcome in chain.from_iterable(self.by_example.values()):
            for name, numbers in outcome.means.items():
                values.setdefault(name, []).extend(numbers)
        return {name: fmean(numbers) for name, numbers in values.items()}

    def summary(self) -> dict[str, Any]:
        """All of it, as JSON values."""
        estimates = {name: asdict(estimate) for name, estimate in self.estimates().items()}
        counts = {name: getattr(self, name) for name in ("num_episodes", "num_failed", "num_rejected")}
        return {"estimates": estimates, "means": self.means(), **counts}


def _numbers(episode: Episode) -> dict[str, list[float]]:
    trajectories = episode.trajectories
    of_roles = rewards_by_role(trajectories) if len({t.role for t in trajectories}) > 1 else {}
    own = {**mean_rewards([trajectories]), **{f"reward of {role}": value for role, value in of_roles.items()}}
    found = {name: [value] for name, value in own.items()}
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            found.setdefault(name, []).append(value)
    found["trained tokens"] = [sum(trajectory.num_trained_tokens for trajectory in trajectories)]
    found["cut by a limit"] = [any(trajectory.is_truncated for trajectory in trajectories)]
    found["seconds"] = [episode.elapsed_s]
    return found


ABOUT = (
    "Score the model of the experiment in FILE on held-out examples: mean reward, pass@k, and the workflow's own "
    "metrics. Ctrl-C ends the command with the scores so far."
)
DEFAULT_N = 8


def main(argv: Sequence[str]) -> None:
    """argv: the arguments after `arl eval`."""
    parser = parser_of("eval", ABOUT)
    add_options(parser)
    number = f"episodes of each example (default: {DEFAULT_N}; 1 with --greedy)"
    parser.add_argument("--n", type=positive, metavar="N", help=number)
    ks = "the ks of pass@k, at most N each (default: 1, 2, 4, ... up to N)"
    parser.add_argument(
        "--k", type=lambda text: sorted({positive(k.strip()) for k in text.split(",")}), metavar="K,K,...", help=ks
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="score only the first N examples, of each task")
    passes = "an episode passes with this reward or more (default: 1.0)"
    parser.add_argument("--pass-reward", type=finite, default=1.0, metavar="REWARD", help=passes)
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl", help="write every episode to this new file")
    options, settings = parse(parser, argv)
    number = options.n or (1 if options.greedy else DEFAULT_N)
    ks = options.k or [2**i for i in range(number.bit_length())]
    if max(ks) > number:
        parser.error(f"--k {max(ks)} needs as many episodes of each example, and --n is {number}")
    scores = Scores(ks=ks, pass_reward=options.pass_reward)

    async def evaluate(experiment: Experiment[Any], config: Config) -> None:
        with _opened(options.out) as out:
            async with open_stage(experiment, config, options) as opened:
                scores.places = getattr(opened.examples, "places", {})
                await _score(opened, scores, number, options.limit, out)

    run_command(evaluate, options, settings, if_stopped="the episodes that had ended are scored")
    if scores.num_failed == scores.num_episodes:
        raise SystemExit(1)


async def _score(stage: Stage, scores: Scores, number: int, limit: int | None, out: TextIO | None) -> None:
    """Run the episodes, add them up, and print the scores at the end, also after an error or Ctrl-C.

    out: gets a line for each episode. Raises FailureBudgetError as training does.
    """
    indices = stage.first(len(stage.examples) if limit is None else limit)
    works = [Work(index=index, number=j) for index in indices for j in range(number)]
    budget = FailureBudget(stage.config.rollout.max_failure_rate)
    display = Display(console=Console(stderr=True))  # stdout has the scores alone

    async def ended(run: Run, advance: Advance) -> None:
        outcome = scores.add(run)
        if (file := out) is not None:
            line = json.dumps(_row(run, outcome, stage.decode)) + "\n"
            await offload(lambda: (file.write(line), file.flush()))
        advance(reward=scores.total_reward / scores.num_episodes)
        budget.record(run.episode.error)

    try:
        with display.work(f"{len(indices)} {stage.name} examples", len(works), "episodes") as advance:
            await stage.run(works, lambda run: ended(run, advance))
    finally:
        display.close()
        if scores.num_episodes:
            _print(scores, len(works))


def _row(run: Run, outcome: EpisodeOutcome, decode: Decode) -> dict[str, Any]:
    episode = run.episode
    return {
        "example": run.work.index,
        "episode": run.work.number,
        "reward": episode.reward,
        "passed": outcome.passed,
        "rejected": episode.is_rejected,
        "error": None if episode.error is None else f"{type(episode.error).__name__}: {episode.error}",
        "elapsed_s": episode.elapsed_s,
        "metrics": {name: value for t in reversed(episode.trajectories) for name, value in t.metrics.items()},
        "trajectories": [
            {name: getattr(one, name) for name in ("role", "reward", "is_truncated", "num_trained_tokens")}
            | {"rewards": dict(one.rewards), "text": text_with_marks(one.token_ids.tolist(), one.images, decode)}
            for one in episode.trajectories
        ],
    }


def _print(scores: Scores, num_planned: int) -> None:
    console = Console()
    if scores.first_error is not None:
        work, error = scores.first_error
        where = f"episode {work.number} of example {work.index}"
        text = f"{counted(scores.num_failed, 'episode')} failed, {where} first:\n{users_traceback(error)}"
        console.print(Text(text, style="red"), soft_wrap=True, highlight=False)
    stopped = f" of {num_planned}, stopped before the end" if scores.num_episodes < num_planned else ""
    said = (
        f"{counted(scores.num_episodes, 'episode')}{stopped}; {scores.num_failed} failed and {scores.num_rejected} "
        f"rejected, which count as reward 0; an episode passes with {scores.pass_reward:g}"
    )
    if is_json():
        tell("result", said, **scores.summary())
        return
    table = Table(box=None, header_style="bold")
    for column in ("", "mean", "± s.e.", "examples"):
        table.add_column(column, justify="right" if column else "left")
    for name, estimate in scores.estimates().items():
        error = "-" if estimate.standard_error is None else f"{estimate.standard_error:.3f}"
        table.add_row(Text(name), f"{estimate.mean:.3f}", error, str(estimate.num_examples))
    for name, mean in scores.means().items():
        table.add_row(Text(name), f"{mean:.3f}" if abs(mean) < 1000 else f"{mean:.0f}", "", "")
    console.print(table, soft_wrap=True)
    console.print(said, highlight=False, soft_wrap=True)


@contextmanager
def _opened(path: Path | None) -> Iterator[TextIO | None]:
    """A new file, so that no evaluation overwrites the results of another."""
    if path is None:
        yield None
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("x", encoding="utf-8")
    except FileExistsError:
        raise ConfigError(f"--out {path} is there already; remove it, or give another name") from None
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror}") from None
    try:
        with file:
            yield file
    finally:
        if not path.stat().st_size:  # nothing was run
            path.unlink()
