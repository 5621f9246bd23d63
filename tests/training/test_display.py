"""The display: bars and a table in a terminal, plain lines elsewhere."""

from io import StringIO

import pytest
from rich.console import Console
from training.records import stats

from arl.training import display
from arl.training.display import Display


@pytest.fixture
def file() -> Display:
    return Display(9, Console(file=StringIO(), width=20))


@pytest.fixture
def terminal() -> Display:
    return Display(29, Console(file=StringIO(), width=120, height=40, force_terminal=True))


def said(shown: Display) -> str:
    out = shown._console.file
    assert isinstance(out, StringIO)
    return out.getvalue()


def test_a_file_gets_a_line_for_each_step(file: Display) -> None:
    file.step(stats(1))
    file.step(stats(2))
    file.close()
    assert len(said(file).splitlines()) == 2
    assert said(file).startswith("step 1 of 9  reward 0.500")


def test_a_terminal_shows_the_newest_steps_and_how_many_are_left(terminal: Display) -> None:
    for version in range(1, 29):
        terminal.step(stats(version))
    (table, bars) = terminal._render().renderables
    assert getattr(table, "row_count", 0) == 16
    assert [(task.description, task.completed, task.total) for task in bars.tasks] == [("training", 28, 29)]
    terminal.close()
    assert "28 of 29" in said(terminal)


def test_the_table_fits_into_80_columns() -> None:
    narrow = Display(1000, Console(file=StringIO(), width=80, height=24, force_terminal=True))
    narrow.step(stats(999))
    narrow.close()
    assert "…" not in said(narrow)
    assert all(column in said(narrow) for column in display.COLUMNS)


def test_a_file_gets_a_line_about_long_work_now_and_then(file: Display, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "LINE_EVERY_S", 0.0)
    with file.work("warm start", 3) as advance:
        advance(loss=0.5)
        advance(loss=0.5)
        advance(loss=0.25)
    first, second, last = said(file).splitlines()
    assert first == "warm start: 1 of 3 steps, loss 0.500"
    assert second.startswith("warm start: 2 of 3 steps, ")
    assert second.endswith(" s left, loss 0.500")
    assert last.startswith("warm start: 3 of 3 steps, ")
    assert last.endswith(" s, loss 0.250")


def test_work_can_leave_no_line_behind(file: Display) -> None:
    with file.work("evaluating", 1, leave=False) as advance:
        advance()
    assert said(file) == ""


def test_a_terminal_has_a_bar_while_work_lasts(terminal: Display) -> None:
    with terminal.waiting("loading"), terminal.work("evaluating", 3, "episodes", leave=False) as advance:
        advance()
        assert [task.completed for task in terminal._bars.tasks] == [0, 1]
    assert terminal._bars.tasks == []
    terminal.close()


def test_a_quiet_console_shows_nothing() -> None:
    quiet = Display(2, Console(file=StringIO(), force_terminal=True, quiet=True))
    quiet.step(stats(1))
    quiet.close()
    assert said(quiet) == ""
