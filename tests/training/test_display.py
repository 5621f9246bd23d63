"""The display: bars and a table in a terminal, plain lines elsewhere."""

from io import StringIO
from typing import Any

import pytest
from records import stats
from rich.console import Console

from arl.training import display
from arl.training.display import Display


def on(num_steps: int = 9, **console: Any) -> Display:
    return Display(num_steps, Console(file=StringIO(), **console))


def said(shown: Display) -> str:
    out = shown._console.file
    assert isinstance(out, StringIO)
    return out.getvalue()


def test_a_file_gets_a_line_for_each_step_and_a_quiet_console_nothing() -> None:
    file, quiet = on(width=20), on(force_terminal=True, quiet=True)
    for shown in (file, quiet):
        shown.step(stats(1))
        shown.step(stats(2))
        shown.close()
    assert len(said(file).splitlines()) == 2
    assert said(file).startswith("step 1 of 9  reward 0.500")
    assert said(quiet) == ""


def test_a_terminal_of_80_columns_shows_the_newest_steps_and_how_many_are_left() -> None:
    terminal = on(1000, width=80, height=40, force_terminal=True)
    for version in range(972, 1000):
        terminal.step(stats(version))
    (table, bars) = terminal._render().renderables
    assert getattr(table, "row_count", 0) == 16
    assert [(task.description, task.completed, task.total) for task in bars.tasks] == [("training", 999, 1000)]
    terminal.close()
    assert "999 of 1000" in said(terminal)
    assert "…" not in said(terminal)
    assert all(column in said(terminal) for column in display.COLUMNS)


def test_a_file_gets_a_line_about_long_work_now_and_then_and_one_at_its_end_if_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = on(width=20)
    monkeypatch.setattr(display, "LINE_EVERY_S", 0.0)
    with file.work("warm start", 3) as advance:
        advance(loss=0.5)
        advance(loss=0.5)
        advance(loss=0.25)
    with file.work("evaluating", 1, leave=False) as advance:
        advance()
    first, second, last = said(file).splitlines()
    assert first == "warm start: 1 of 3 steps, loss 0.500"
    assert second.startswith("warm start: 2 of 3 steps, ")
    assert second.endswith(" s left, loss 0.500")
    assert last.startswith("warm start: 3 of 3 steps, ")
    assert last.endswith(" s, loss 0.250")


def test_a_terminal_has_a_bar_while_work_lasts() -> None:
    terminal = on(width=120, height=40, force_terminal=True)
    with terminal.waiting("loading"), terminal.work("evaluating", 3, "episodes", leave=False) as advance:
        advance()
        assert [task.completed for task in terminal._bars.tasks] == [0, 1]
    assert terminal._bars.tasks == []
    terminal.close()
