"""The progress of long work: bars and a table in a terminal or a notebook; plain lines in a file or CI."""

from __future__ import annotations

import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from arl.api.html import Point, ShownWork, curve_svg, progress_html
from arl.api.settings.run import ConsoleConfig
from arl.api.types import Evaluation, StepStats
from arl.runtime.console import copy_line, copy_prints, is_json, tell
from arl.runtime.stopping import kernel_shell
from arl.training.evaluator import with_error

ROWS_SHOWN = 16
COLUMNS = ("step", "reward", "staleness", "samples/s", "waited", "trained", "paused", "loss", "entropy")
LINE_EVERY_S = 10.0
"""Seconds between two plain lines about the same work."""
REDRAWN_EVERY_S = 0.5
"""In a terminal and in a notebook."""

Advance = Callable[..., None]
"""Called after each piece of work, with numbers to show: `advance(loss=0.3)`."""


def display_of(config: ConsoleConfig, num_steps: int | None = None) -> Display:
    """What shows a run on the console, as `config` has it. num_steps: of the run, if known."""
    is_quiet = not config.console
    if is_json():
        return JsonDisplay(num_steps, Console(quiet=is_quiet))
    if kernel_shell() is not None:
        return NotebookDisplay(num_steps, Console(quiet=is_quiet, force_jupyter=False))
    return Display(num_steps, Console(quiet=is_quiet))


class Display:
    """A terminal shows the last steps, and a bar for each piece of open work. One per console, for any thread."""

    def __init__(self, num_steps: int | None = None, console: Console | None = None) -> None:
        """num_steps: of the run, if known. console: stdout if not given."""
        self._console = console or Console()
        self._is_live = self._console.is_terminal and not self._console.quiet
        if self._is_live:
            copy_prints(self._console)
        self._num_steps = num_steps
        self._rows: deque[tuple[str, ...]] = deque(maxlen=ROWS_SHOWN)
        self._times: deque[tuple[int, float]] = deque(maxlen=ROWS_SHOWN)
        """Version, and training time in seconds."""
        self._remark = ""
        """The last one, of a terminal."""
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            _Count(),
            _Rate(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[said]}"),
            console=self._console,
        )
        self._training: TaskID | None = None
        self._live: Live | None = None

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Show that work of unknown length is under way."""
        bar = self._bars.add_task(name, total=None, said="")
        self._open()
        if not self._is_live:
            self.say(name)
        try:
            yield
        finally:
            self._bars.remove_task(bar)

    @contextmanager
    def work(self, name: str, total: int, unit: str = "steps", *, leave: bool = True) -> Iterator[Advance]:
        """Show how far the work is, its rate and the time left. leave: keep one line about it at the end."""
        bar = self._bars.add_task(name, total=total, said="")
        self._open()
        done, said, first = 0, "", 0.0
        began = told = time.monotonic()

        def tell(times: str, **numbers: float) -> None:
            message = ", ".join(filter(None, (f"{name}: {done} of {total} {unit}", times, said)))
            self.tell("progress", message, name=name, done=done, total=total, unit=unit, numbers=numbers)

        def advance(**numbers: float) -> None:
            nonlocal done, said, first, told
            now, done = time.monotonic(), done + 1
            said = ", ".join(f"{name} {value:.3f}" for name, value in numbers.items())
            first = now if done == 1 else first  # it takes longer than others: it loads what they need
            self._bars.update(bar, completed=done, said=said)
            if not self._is_live and done < total and now - told >= LINE_EVERY_S:
                told, rate = now, (done - 1) / (now - first) if now > first else 0.0
                tell(f"{_rate(rate)}, {(total - done) / rate:.0f} s left" if rate else "", **numbers)

        try:
            yield advance
        finally:
            self._bars.remove_task(bar)
            if leave and done:
                tell(f"{time.monotonic() - began:.1f} s")

    def step(self, stats: StepStats) -> None:
        self._rows.append(_row(stats, self._num_steps))
        self._times.append((stats.version, stats.metrics["time_s"]))
        if not self._is_live:
            numbers = {"version": stats.version, "steps": self._num_steps, "metrics": dict(stats.metrics)}
            self.tell("step", self._line(stats), **numbers, left_s=self._left_s(), remark=stats.remark)
            return
        copy_line(self._line(stats))
        if stats.remark:
            self._remark = f"step {stats.version}: {stats.remark}"
        if self._training is None:
            self._training = self._bars.add_task(
                "training", total=self._num_steps, completed=stats.version - 1, said=""
            )
        self._bars.update(self._training, completed=stats.version)
        self._open()

    def _line(self, stats: StepStats) -> str:
        """The last step."""
        cells = [f"{name} {cell}" for name, cell in zip(COLUMNS, self._rows[-1], strict=True)]
        if (left_s := self._left_s()) is not None:
            cells.append(f"left {timedelta(seconds=round(left_s))}")
        return "  ".join([*cells, *([f"({stats.remark})"] if stats.remark else [])])

    def _left_s(self) -> float | None:
        """Until all steps are trained, at the speed of the last ones; None if it is not known."""
        (first, began), (last, now) = self._times[0], self._times[-1]
        if self._num_steps is None or last == first:
            return None
        return (now - began) / (last - first) * max(self._num_steps - last, 0)

    def evaluation(self, evaluation: Evaluation) -> None:
        reward = with_error(evaluation.reward, evaluation.standard_error)
        said = (
            f"held-out reward {reward} at version {evaluation.version} "
            f"({evaluation.num_episodes} episodes, {evaluation.num_failed} failed, {evaluation.wall_s:.1f} s)"
        )
        for name, part in (evaluation.by_name or {}).items():
            reward = with_error(part.reward, part.standard_error)
            said += f"\n  {name}: {reward} ({part.num_episodes} episodes, {part.num_failed} failed)"
        self.tell("evaluation", said, **asdict(evaluation))

    def say(self, message: str) -> None:
        """Print one line."""
        self.tell("notice", message)

    def tell(self, kind: str, message: str, **numbers: Any) -> None:
        """Print lines. kind, numbers: for machines."""
        self._console.print(message, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the table of the last steps on the screen. Idempotent."""
        if self._training is not None:
            self._bars.remove_task(self._training)
            self._training = None
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _open(self) -> None:
        if self._live is None and self._is_live:
            self._live = Live(
                get_renderable=self._render, console=self._console, refresh_per_second=1 / REDRAWN_EVERY_S
            )
            self._live.start()

    def _render(self) -> Group:
        table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))  # fits into 80 columns
        for column in COLUMNS:
            table.add_column(column, justify="right")
        for row in tuple(self._rows):
            table.add_row(*row)
        remark = [Text(self._remark, "yellow")] if self._remark else []
        return Group(*([table] if self._rows else []), *remark, *([self._bars] if self._bars.tasks else []))


class JsonDisplay(Display):
    """Shows the same on a console that is JSON, with all numbers."""

    def tell(self, kind: str, message: str, **numbers: Any) -> None:
        if not self._console.quiet:
            tell(kind, message, **numbers)


class NotebookDisplay(Display):
    """Shows the same in one output of a notebook, with a curve of the rewards. Notices are plain lines beside it."""

    def __init__(self, num_steps: int | None, console: Console) -> None:
        super().__init__(num_steps, console)
        self._is_live = not console.quiet
        self._rewards, self._held_out = list[Point](), list[Point]()
        self._last_evaluation = ""
        self._output: Any = None
        """IPython's handle of the output, once something is shown."""
        self._shown = ""
        self._closing = threading.Event()
        self._redrawing: threading.Thread | None = None

    def step(self, stats: StepStats) -> None:
        self._rewards.append((stats.version, stats.reward))
        super().step(stats)

    def evaluation(self, evaluation: Evaluation) -> None:
        self._held_out.append((evaluation.version, evaluation.reward))
        super().evaluation(evaluation)

    def tell(self, kind: str, message: str, **numbers: Any) -> None:
        if kind != "evaluation":
            super().tell(kind, message, **numbers)
        elif self._is_live:
            self._last_evaluation = message
            copy_line(message)
            self._open()

    def close(self) -> None:
        super().close()
        if self._redrawing is not None:
            self._closing.set()
            self._redrawing.join()
            self._redrawing = None
            self._draw()

    def _open(self) -> None:
        if self._redrawing is None and self._is_live:
            self._draw()
            # The output belongs to this cell, which the context knows.
            self._redrawing = threading.Thread(
                target=contextvars.copy_context().run, args=[self._redraw], name="arl-display", daemon=True
            )
            self._closing.clear()
            self._redrawing.start()

    def _redraw(self) -> None:
        while not self._closing.wait(REDRAWN_EVERY_S):
            self._draw()

    def _draw(self) -> None:
        from IPython.display import display

        columns = _Count(), _Rate(), TimeElapsedColumn(), TimeRemainingColumn()
        work: list[ShownWork] = []
        for task in self._bars.tasks:
            said = [*(column.render(task).plain for column in columns), str(task.fields["said"])]
            known = "  ".join(text for text in said if text and text != "-:--:--")
            work.append(ShownWork(name=task.description, done=task.completed, total=task.total, said=known))
        curve = curve_svg("reward (dots: held out)" if self._held_out else "reward", [self._rewards], self._held_out)
        rows = tuple(self._rows)
        html = progress_html(COLUMNS, rows, work, curve, self._last_evaluation)
        if html == self._shown:
            return
        text = "\n".join(["  ".join(row) for row in rows[-1:]] + [f"{one.name} {one.said}" for one in work])
        self._shown, content = html, {"text/html": html, "text/plain": text}
        if self._output is None:
            self._output = display(content, raw=True, display_id=True)
        else:
            self._output.update(content, raw=True)


@contextmanager
def progress(name: str, total: int, unit: str = "steps") -> Iterator[Advance]:
    """Show the progress of your own work: `with progress("loading", 10) as advance`, then ten calls of `advance()`."""
    display = display_of(ConsoleConfig())
    try:
        with display.work(name, total, unit) as advance:
            yield advance
    finally:
        display.close()


@contextmanager
def waiting(name: str) -> Iterator[None]:
    """The same for work of unknown length."""
    display = display_of(ConsoleConfig())
    try:
        with display.waiting(name):
            yield
    finally:
        display.close()


class _Count(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if task.total is None else f"{task.completed:.0f}/{task.total:.0f}")


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(_rate(task.finished_speed or task.speed))


def _rate(per_s: float | None) -> str:
    if not per_s:
        return ""
    return f"{per_s:.1f}/s" if per_s >= 1 else f"{1 / per_s:.1f} s each"


def _row(stats: StepStats, num_steps: int | None) -> tuple[str, ...]:
    metrics = stats.metrics
    return (
        str(stats.version) if num_steps is None else f"{stats.version} of {num_steps}",
        f"{stats.reward:.3f}",
        f"{stats.mean_staleness:.1f} (max {stats.max_staleness_seen})",
        f"{metrics['samples_per_s']:.0f}",
        f"{stats.wait_s:.2f}s",
        f"{stats.train_s:.2f}s",
        f"{metrics.get('weights/pause_s', 0.0) * 1000:.0f}ms",
        f"{metrics['loss']:+.4f}" if "loss" in metrics else "-",
        f"{metrics['entropy']:.3f}" if "entropy" in metrics else "-",
    )


def hide_progress_bars() -> None:
    """Hide transformers' bars for loading a model, which would stand between the lines of a run."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
