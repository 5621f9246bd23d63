"""`arl try`: run episodes of a script's agent, and print tokens, rewards and times."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.text import Text

from arl.api.images import PlacedImage, text_with_marks
from arl.api.settings.run import Config
from arl.api.types import NOT_SAMPLED, Trajectory
from arl.cli.command import counted, parse, parser_of, positive, run_command, users_traceback
from arl.cli.episodes import Decode, EngineCall, Run, Stage, Work, add_options, open_stage
from arl.rollout.episode import Episode
from arl.run.experiment import Experiment

ABOUT = (
    "Run episodes of the experiment in FILE without training, one for each of the first examples, and print what the "
    "model was given and what it sampled, rewards and times."
)


def main(argv: Sequence[str]) -> None:
    """argv: the arguments after `arl try`."""
    parser = parser_of("try", ABOUT)
    add_options(parser)
    parser.add_argument("--n", type=positive, default=4, metavar="N", help="how many examples (default: 4)")
    options, settings = parse(parser, argv)
    runs: list[Run] = []

    async def try_out(experiment: Experiment[Any], config: Config) -> None:
        async with open_stage(experiment, config, options) as opened:
            await _try(opened, options, runs)

    run_command(try_out, options, settings, if_stopped="the other episodes were not run to their end")
    if all(run.episode.error for run in runs):
        raise SystemExit(1)


async def _try(stage: Stage, options: argparse.Namespace, runs: list[Run]) -> None:
    began, indices = time.monotonic(), stage.first(options.n)
    report = Report(Console(), stage, len(indices))
    waiting: dict[int, Run] = {}

    async def on_end(run: Run) -> None:
        waiting[run.work.index] = run
        while len(runs) < len(indices) and indices[len(runs)] in waiting:
            runs.append(waiting.pop(indices[len(runs)]))
            report.episode(len(runs), runs[-1])

    await stage.run([Work(index=index, number=0) for index in indices], on_end)
    report.end([run.episode for run in runs], time.monotonic() - began)


class Report:
    """The output of `arl try`. Sampled tokens have a colour on a terminal, and stand in brackets elsewhere."""

    def __init__(self, console: Console, stage: Stage, number: int) -> None:
        self._console = console
        self._stage = stage
        self._number = number
        self._brackets = not console.is_terminal or console.no_color
        self._line("tokens: ", legend(brackets=self._brackets))

    def episode(self, number: int, run: Run) -> None:
        self._line()
        task = self._stage.tasks.task_of(self._stage.examples, run.work.index)
        of_task = f" of task {task}" if task else ""
        self._console.rule(f"episode {number} of {self._number}: {self._stage.name} example {run.work.index}{of_task}")
        self._outcome(run)
        for i, call in enumerate(run.calls, start=1):
            sampled = len(call.output_ids)
            speed = f", {sampled / call.elapsed_s:.0f} tokens/s" if sampled and call.elapsed_s > 0 else ""
            took = f"{sampled} sampled in {call.elapsed_s:.2f} s{speed}, ended by {call.ended_by}"
            self._line(f"{f'turn {i}':<10}{len(call.input_ids)} tokens given, {took}")
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
            self._line(f"there are no more {self._stage.name} examples")

    def _outcome(self, run: Run) -> None:
        def numbers(given: Mapping[str, float]) -> str:
            return ", ".join(f"{name} {value:g}" for name, value in given.items())

        trajectories = run.episode.trajectories
        for i, trajectory in enumerate(trajectories, start=1):
            if len(trajectories) > 1:
                self._line(Text(f"trajectory {i} of {len(trajectories)}, {trajectory.role}", style="bold"))
            self._line(rendered(passage_of(trajectory), self._stage.decode, brackets=self._brackets), "\n")
            parts = f" ({numbers(trajectory.rewards)})" if trajectory.rewards else ""
            cut = ", cut by a length limit" if trajectory.is_truncated else ""
            self._line(f"{'reward':<10}", Text(f"{trajectory.reward:g}{parts}{cut}", style="bold"))
            if trajectory.total_reward != trajectory.reward:
                of_turns = ", ".join(f"{turn.reward:g}" for turn in trajectory.turns)
                self._line(f"{'in all':<10}{trajectory.total_reward:g} with process rewards; of turns: {of_turns}")
            if trajectory.metrics:
                self._line(f"{'metrics':<10}{numbers(trajectory.metrics)}")
        if not trajectories:
            for passage in passages_of(run.calls):
                self._line(rendered(passage, self._stage.decode, brackets=self._brackets), "\n")
        if run.episode.error is not None:
            self._line(Text("failed: " + users_traceback(run.episode.error).rstrip(), style="red"))
        if run.episode.is_rejected:
            self._line(Text("rejected: arun_episode returned None", style="yellow"))

    def _line(self, *parts: str | Text) -> None:
        """Print texts as they are, without markup and line breaks."""
        self._console.print(Text.assemble(*parts), soft_wrap=True, highlight=False)


# The text of an episode, with the origin of each token.

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""The text of a character with missing bytes."""


class Origin(Enum):
    """Where a token came from: how it is shown, and the brackets around it where there are no colours."""

    GIVEN = ("dim", "", "")
    TRAINED = ("bold green", "⟦", "⟧")
    SAMPLED = ("yellow", "⟪", "⟫")

    @property
    def about(self) -> str:
        return {Origin.GIVEN: "given", Origin.TRAINED: "sampled", Origin.SAMPLED: "sampled, but not trained here"}[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """Tokens in the order in which a model saw them, and where each came from."""

    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    images: tuple[PlacedImage, ...] = ()


def passage_of(trajectory: Trajectory) -> Passage:
    """Sampled tokens with loss_mask 0 are trained in another trajectory, or nowhere."""
    return Passage(
        token_ids=tuple(trajectory.token_ids.tolist()),
        origins=tuple(
            Origin.GIVEN if version == NOT_SAMPLED else Origin.TRAINED if trained else Origin.SAMPLED
            for version, trained in zip(trajectory.versions.tolist(), trajectory.loss_mask.tolist(), strict=True)
        ),
        images=trajectory.images,
    )


def passages_of(calls: Sequence[EngineCall]) -> list[Passage]:
    """The passages of an episode that returned nothing: one for each call that no other continued."""
    ends = [
        call
        for i, call in enumerate(calls)
        if not any(other.input_ids[: len(call.token_ids)] == call.token_ids for other in calls[i + 1 :])
    ]
    passages: list[Passage] = []
    for end in ends:
        origins = [Origin.GIVEN] * len(end.token_ids)
        for call in calls:
            if end.token_ids[: len(call.token_ids)] == call.token_ids:
                origins[len(call.input_ids) : len(call.token_ids)] = [Origin.TRAINED] * len(call.output_ids)
        passages.append(Passage(token_ids=end.token_ids, origins=tuple(origins), images=end.images))
    return passages


def rendered(passage: Passage, decode: Decode, *, brackets: bool) -> Text:
    """The text of each stretch of tokens of one origin. A character on a border belongs to the later one.

    Each stretch is decoded with everything before it, since a tokenizer may show a first token differently. brackets:
    mark sampled tokens with brackets, for output without colours.
    """
    shown, end, seen = Text(), 0, 0
    for origin, stretch in groupby(passage.origins):
        end += len(list(stretch))
        images = [placed for placed in passage.images if placed.stop <= end]
        text = text_with_marks(passage.token_ids[:end], images, decode)
        if end < len(passage.token_ids):
            text = text.rstrip(UNFINISHED)
        (style, left, right), piece = origin.value, visible(text[seen:])
        shown.append(f"{left}{piece}{right}" if brackets else piece, style=style)
        seen = max(seen, len(text))
    return shown


def legend(*, brackets: bool) -> Text:
    """Explains the colours or brackets of `rendered`."""
    parts = [
        Text(f"{left}{origin.about}{right}" if brackets else origin.about, style=style)
        for origin in Origin
        for style, left, right in [origin.value]
    ]
    return Text(" | ").join(parts)


def visible(text: str) -> str:
    """Replace control characters, which a terminal would obey, by pictures. Lines and tabs stay."""
    return text.translate(_PICTURES)


_PICTURES = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}
