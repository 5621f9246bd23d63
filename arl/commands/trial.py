"""`arl try`: run some episodes of a script's agent, and read them.

    arl try examples/agents/math_agent.py --n 4

prints of each what the model was given and what it sampled, its reward, and where its time went.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.text import Text

from arl.api.config import Config
from arl.api.types import Trajectory
from arl.commands.command import counted, parse, parser_of, positive, run_command, users_traceback
from arl.commands.episodes import Choice, Run, Stage, Work, open_stage
from arl.commands.transcript import EngineCall, Passage, legend, passage_of, passages_of, rendered
from arl.experiment import Experiment
from arl.rollout.episode import Episode

ABOUT = (
    "Run episodes of the experiment in FILE without training, one for each of the first examples, and print what the "
    "model was given and what it sampled, rewards and times."
)


def main(argv: Sequence[str]) -> None:
    """argv: what follows `arl try`."""
    parser = parser_of("try", ABOUT)
    Choice.add_options(parser)
    parser.add_argument("--n", type=positive, default=4, metavar="N", help="how many examples (default: 4)")
    options, settings = parse(parser, argv)
    runs: list[Run] = []

    async def try_out(experiment: Experiment[Any], config: Config) -> None:
        async with open_stage(experiment, config, Choice.of(options)) as opened:
            await _try(opened, options, runs)

    run_command(try_out, options, settings, if_stopped="the other episodes were not run to their end")
    if all(run.episode.error for run in runs):
        raise SystemExit(1)


async def _try(stage: Stage, options: argparse.Namespace, runs: list[Run]) -> None:
    """Episodes run at once, and are printed in the order of their examples."""
    began, number = time.monotonic(), min(options.n, len(stage.examples))
    report = Report(Console(), stage, number)
    waiting: dict[int, Run] = {}

    async def on_end(run: Run) -> None:
        waiting[run.work.index] = run
        while len(runs) in waiting:
            runs.append(waiting.pop(len(runs)))
            report.episode(runs[-1])

    report.begin()
    await stage.run([Work(index=index, number=0) for index in range(number)], on_end)
    report.end([run.episode for run in runs], time.monotonic() - began)


class Report:
    """What `arl try` prints. Sampled tokens have a colour on a terminal, and stand in brackets elsewhere."""

    def __init__(self, console: Console, stage: Stage, number: int) -> None:
        self._console = console
        self._stage = stage
        self._number = number
        self._brackets = not console.is_terminal or console.no_color

    def begin(self) -> None:
        self._line("tokens: ", legend(brackets=self._brackets))

    def episode(self, run: Run) -> None:
        self._line()
        self._console.rule(
            f"episode {run.work.index + 1} of {self._number}: {self._stage.name} example {run.work.index}"
        )
        self._outcome(run)
        for i, call in enumerate(run.calls, start=1):
            self._line(f"{f'turn {i}':<10}", _call_text(call))
        in_engine = sum(call.elapsed_s for call in run.calls)
        of_model = f"the model had {in_engine:.2f} s in {counted(len(run.calls), 'turn')}"
        self._line(f"{'episode':<10}{run.episode.elapsed_s:.2f} s, of which {of_model}")

    def end(self, episodes: Sequence[Episode], elapsed_s: float) -> None:
        failed, rejected = sum(e.error is not None for e in episodes), sum(e.is_rejected for e in episodes)
        self._line()
        self._line(
            f"{counted(len(episodes), 'episode')} in {elapsed_s:.1f} s: "
            f"mean reward {fmean(e.reward for e in episodes):.3f}, {failed} failed, {rejected} rejected"
        )
        if self._number == len(self._stage.examples):
            self._line(f"these are all {self._stage.name} examples that there are")

    def _outcome(self, run: Run) -> None:
        """The transcript, and what came of it; of an episode that returned none, what its requests show."""
        trajectories = run.episode.trajectories
        for i, trajectory in enumerate(trajectories, start=1):
            if len(trajectories) > 1:
                self._line(Text(f"trajectory {i} of {len(trajectories)}, {trajectory.role}", style="bold"))
            self._passage(passage_of(trajectory))
            self._reward(trajectory)
        if not trajectories:
            for passage in passages_of(run.calls):
                self._passage(passage)
        if run.episode.error is not None:
            self._line(Text("failed: " + users_traceback(run.episode.error).rstrip(), style="red"))
        if run.episode.is_rejected:
            self._line(Text("rejected: arun_episode returned None", style="yellow"))

    def _passage(self, passage: Passage) -> None:
        self._line(rendered(passage, self._stage.decode, brackets=self._brackets))
        self._line()

    def _reward(self, trajectory: Trajectory) -> None:
        parts = f" ({_numbers(trajectory.rewards)})" if trajectory.rewards else ""
        cut = ", cut by a length limit" if trajectory.is_truncated else ""
        self._line(f"{'reward':<10}", Text(f"{trajectory.reward:g}{parts}{cut}", style="bold"))
        if trajectory.total_reward != trajectory.reward:
            of_turns = ", ".join(f"{turn.reward:g}" for turn in trajectory.turns)
            self._line(f"{'in all':<10}{trajectory.total_reward:g} with process rewards; of turns: {of_turns}")
        if trajectory.metrics:
            self._line(f"{'metrics':<10}{_numbers(trajectory.metrics)}")

    def _line(self, *parts: str | Text) -> None:
        """Texts as they are: nothing in them is markup, and no line is broken."""
        self._console.print(Text.assemble(*parts), soft_wrap=True, highlight=False)


def _call_text(call: EngineCall) -> str:
    given, sampled = len(call.input_ids), len(call.output_ids)
    speed = f", {sampled / call.elapsed_s:.0f} tokens/s" if sampled and call.elapsed_s > 0 else ""
    return f"{given} tokens given, {sampled} sampled in {call.elapsed_s:.2f} s{speed}, ended by {call.ended_by}"


def _numbers(numbers: Any) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in numbers.items())
