"""`arl top`: what it says of a run, on screens of any size; and its process."""

import asyncio
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from made_run import SERVER, T0, began, group, is_running, life, step, write_run
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from arl.__main__ import main
from arl.api.events import EpisodeBegan, Event, GroupAdmitted, KeptTokens, ServerJoined, Warned
from arl.observe.view.health import health
from arl.observe.view.top import top
from arl.observe.view.viewed_run import Ending, EndingOf, ViewedRun

STALLED = "nothing has moved for 600 s: no batch, no answer, no weights. What waits:\n  4 x a server's answer"


def frame(
    run_dir: Path, now: float = T0 + 130, ending_of: EndingOf = is_running, width: int = 100, **more: Any
) -> list[str]:
    """The lines of what is shown. more: of its health, instead of what there is."""

    async def look() -> Table:
        viewed = ViewedRun(run_dir, ending_of)
        await viewed.load()
        shown = {**health(viewed.run), **more}
        table = await viewed.ask(lambda: top(viewed, ending_of(run_dir), shown, now, is_cut=bool(more)))
        viewed.close()
        return table

    console = Console(width=width, height=100, color_system=None)
    with console.capture() as capture:
        console.print(asyncio.run(look()))
    return [line.rstrip() for line in capture.get().splitlines()]


def live(run_dir: Path, *records: Event | KeptTokens, steps: int = 4) -> Path:
    """A run in its first life, with two steps."""
    settings = {"steps": steps, "rollout": {"max_staleness": 2}}
    life(run_dir, [began(t=T0, **settings), ServerJoined(server=SERVER, t=T0), *records])
    rows = [
        {
            "version": version, "reward": version / 4,
            "time_s": 10.0 * version, "time/wait_s": 6.0, "time/train_s": 3.0,
            "weights/snapshot_s": 0.5, "episodes_trained": 15 * version, "trained_tokens": 200.0, "staleness/mean": 0.5,
            "staleness/max": 1,
        }
        for version in (1, 2)
    ]  # fmt: skip
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_dir


def test_it_says_how_far_a_run_is_and_when_it_will_be_done(tmp_path: Path) -> None:
    (head, *_) = frame(live(tmp_path), T0 + 90)
    assert head.endswith("running  step 2 of 4  1:30 so far, 0:20 left")


def test_it_says_who_waits(tmp_path: Path) -> None:
    lines = frame(live(tmp_path, *group(0, T0 + 1, ["a", "b"]), *step(1, [0], T0 + 10)), T0 + 20)
    at = lines.index("time       waiting 60%, training 30%, publishing 5%, other 5%")
    assert lines[at + 1] == "           now waiting for batch 2 for 8 s"
    assert "speed      10 seconds a step, 1.5 episodes/s, 20 trained tokens/s" in lines
    done = live(tmp_path / "done", *step(1, [], T0 + 10), steps=1)
    assert "           all steps are trained since 8 s" in frame(done, T0 + 20)


def test_episodes_a_second_are_those_trained_over_the_time_that_passed(tmp_path: Path) -> None:
    live(tmp_path)
    rows = [
        {"version": n, "reward": 1.0, "time_s": t, "episodes_trained": 100 * n} for n, t in ((1, 1), (2, 2), (3, 11))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "speed      5 seconds a step, 20 episodes/s" in frame(tmp_path)


def test_the_time_between_two_lives_is_not_the_run_s(tmp_path: Path) -> None:
    live(tmp_path)
    life(tmp_path, [began(t=T0 + 10_000, version=2)])
    assert "  0:25 so far" in frame(tmp_path, T0 + 10_005)[0]


def test_what_the_watchdog_said_stands_until_something_moves(tmp_path: Path) -> None:
    said = Warned(level="error", logger="arl.training.watchdog", text=STALLED, t=T0 + 30)
    told = frame(live(tmp_path / "still", *step(1, [], T0 + 10), said))
    assert any(line.startswith("stalled    nothing has moved for 600 s") for line in told)
    for name, later in (("moved", step(1, [], T0 + 40)), ("answered", group(0, T0 + 40, ["a"]))):
        assert not any(line.startswith("stalled") for line in frame(live(tmp_path / name, said, *later)))


def test_what_runs_is_counted_and_the_longest_named(tmp_path: Path) -> None:
    begun = [EpisodeBegan(episode=name, t=T0 + t) for name, t in (("1.0", 5.0), ("1.1", 2.0), ("e0.3", 8.0))]
    admitted = GroupAdmitted(group=1, epoch=0, row=1, stamp=0, t=T0 + 2)
    lines = frame(live(tmp_path, *group(0, T0 + 1, ["a", "b"]), admitted, *begun), T0 + 70)
    at = lines.index("running    3 episodes, 1 groups; 1 groups wait to be trained, 1 episodes of an evaluation")
    assert lines[at + 1] == "           longest: 1.1 1:08, 1.0 1:05, e0.3 1:02"
    assert "staleness  mean 0.5, max 1, allowed 2" in lines


def test_a_run_that_has_ended_runs_nothing_and_says_what_to_do_next(tmp_path: Path) -> None:
    ending = Ending("failed", "the disk is full", "free some space")
    lines = frame(write_run(tmp_path), ending_of=lambda _: ending)
    assert "failed  step 2 of 4" in lines[0]
    at = lines.index("the end    the disk is full")
    assert lines[at + 1] == "           next: free some space"
    assert not any(line.startswith(("servers", "running")) for line in lines)


def test_failures_servers_and_warnings_are_those_of_the_view(tmp_path: Path) -> None:
    text = "\n".join(frame(write_run(tmp_path)))
    assert "failures   3 x ValueError: bad call N at ID" in text
    assert f"servers    {SERVER} fenced, version 2, 1 x: does not answer" in text
    assert "warnings   2 x disk 8 is slow" in text
    assert "findings   No inference server serves." in text


def test_long_lines_and_sections_are_cut_on_a_screen_and_say_so(tmp_path: Path) -> None:
    warnings = [{"level": "warning", "text": "日本 " * 2000, "count": 1, "last": 0.0}] * 99
    lines = frame(write_run(tmp_path), width=80, warnings=warnings)
    assert all(cell_len(line) <= 80 for line in lines)
    assert "           and 96 more: see arl view" in lines


def test_messages_cannot_command_the_terminal(tmp_path: Path) -> None:
    evil = Warned(level="warning", logger="x", text="\x1b]0;owned\x07 \x9b2J a\u202eb [bold]c[/bold]\nd", t=T0 + 1)
    text = "\n".join(frame(live(tmp_path, evil)))
    assert "]0;owned 2J a b [bold]c[/bold] d" in text
    assert all(char.isprintable() for char in text.replace("\n", ""))


@pytest.mark.parametrize(
    "files", [{}, {"metrics.jsonl": '{"version": 1, "reward": "x", "time_s": NaN}\nto'}, {"run.lock": ""}]
)
def test_a_run_without_events_has_a_frame(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    text = "\n".join(frame(tmp_path, ending_of=lambda _: Ending("killed", "", "")))
    assert "no step is trained yet" in text
    assert "has no event log" in " ".join(text.split())  # it may be broken into lines anywhere


def test_a_run_that_has_just_begun_lacks_nothing(tmp_path: Path) -> None:
    (tmp_path / "run.lock").touch()
    assert not any(line.startswith("unreadable") for line in frame(tmp_path))


def test_fine_tuning_has_a_frame_with_its_losses(tmp_path: Path) -> None:
    rows = [{"version": version, "loss": 1 / version} for version in (1, 2, 4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "evaluations.jsonl").write_text('{"version": 0, "loss": 2.0}\n{"version": 4, "loss": 0.3}\n')
    ending = Ending("finished", "all steps are trained", "", 4)
    text = "\n".join(frame(tmp_path, ending_of=lambda _: ending))
    assert "step 4 of 4" in text
    assert "loss       0.250" in text
    assert "held out 0.300 at version 4" in text
    assert "reward" not in text
    assert "event log" not in text


def test_once_prints_a_frame_and_so_does_a_stdout_that_is_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "adder")
    main(["top", str(tmp_path / "adder"), "--once"])
    main(["top", str(tmp_path)])
    once, piped = capsys.readouterr().out.split("run        adder")[1:]
    assert "step 2 of 4" in once
    assert once == piped
    assert "\x1b" not in once


def test_once_without_a_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["top", str(tmp_path / "none"), "--once"])
    assert exit_.value.code == 2
    assert "does not exist; name the run_dir of a run" in capsys.readouterr().err


@contextmanager
def in_a_terminal(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int, Callable[[str], str]]]:
    """The process, the terminal, and a function that reads until a text comes."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "arl", "top", *arguments]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "90", "LINES": "24"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        said = ""

        def until(text: str) -> str:
            nonlocal said
            end = time.monotonic() + 60
            while text not in said:
                ready, _, _ = select.select([ours], [], [], max(end - time.monotonic(), 0))
                assert ready, f"{text} did not come after {said[-2000:]!r}"
                said += os.read(ours, 65536).decode(errors="replace")
            return said

        try:
            yield process, ours, until
        finally:
            process.kill()
            os.close(ours)


def ends_with(process: subprocess.Popen[bytes], terminal: int) -> int:
    """Its exit code. What it still writes is read, or it would wait."""
    while process.poll() is None:
        if select.select([terminal], [], [], 0.05)[0]:
            try:
                os.read(terminal, 65536)
            except OSError:
                break
    return process.wait(20)


def test_it_waits_for_a_run_follows_it_and_ends_with_q(tmp_path: Path) -> None:
    with in_a_terminal(str(tmp_path / "run")) as (process, terminal, until):
        until("There is no run in")
        (tmp_path / "run").mkdir()
        live(tmp_path / "run")
        until("step 2 of 4")
        with (tmp_path / "run" / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps({"version": 3, "reward": 1.0}) + "\n")
        until("step 3 of 4")
        os.write(terminal, b"q")
        assert ends_with(process, terminal) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_it_and_leave_the_terminal_as_it_was(tmp_path: Path, number: signal.Signals) -> None:
    write_run(tmp_path)
    with in_a_terminal(str(tmp_path)) as (process, terminal, until):
        until("\x1b[?1049h")
        until("step 2 of 4")
        process.send_signal(number)
        until("\x1b[?1049l")
        assert ends_with(process, terminal) == 0
