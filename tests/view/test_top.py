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

import pytest
from made_run import SERVER, T0, began, group, is_running, life, step, write_run
from rich.cells import cell_len
from rich.console import Console

from arl.__main__ import main
from arl.api.events import EpisodeBegan, Event, GroupAdmitted, KeptTokens, ServerJoined, Warned
from arl.view.health import health
from arl.view.overview import Overview, overview
from arl.view.screen import duration, plain, screen, sparkline
from arl.view.viewed_run import Ending, EndingOf, ViewedRun

STALLED = "nothing has moved for 600 s: no batch, no answer, no weights. What waits:\n  4 x a server's answer"


def seen(run_dir: Path, now: float = T0 + 130, ending_of: EndingOf = is_running) -> Overview:
    async def look() -> Overview:
        viewed = ViewedRun(run_dir, ending_of)
        await viewed.load()
        shown = await viewed.ask(overview, viewed, ending_of(run_dir), health(viewed.run), now)
        viewed.close()
        return shown

    return asyncio.run(look())


def frame(shown: Overview, width: int = 80, height: int | None = 24) -> list[str]:
    console = Console(width=width, height=height or 100, color_system=None)
    with console.capture() as capture:
        console.print(screen(shown, width, height))
    return capture.get().splitlines()


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
    shown = seen(live(tmp_path), T0 + 90)
    assert (shown.version, shown.steps, shown.elapsed_s, shown.left_s) == (2, 4, 90.0, 20.0)
    (head, *_) = frame(shown)
    assert "running  step 2 of 4" in head
    assert head.endswith("1:30 so far, 0:20 left")


def test_it_says_who_waits(tmp_path: Path) -> None:
    shown = seen(live(tmp_path, *group(0, T0 + 1, ["a", "b"]), *step(1, [0], T0 + 10)), T0 + 20)
    assert shown.time_shares == pytest.approx({"waiting": 0.6, "training": 0.3, "publishing": 0.05, "other": 0.05})
    assert shown.speeds == pytest.approx({"seconds a step": 10.0, "episodes/s": 1.5, "trained tokens/s": 20.0})
    assert shown.doing == "waiting for batch 2 for 8 s"
    done = live(tmp_path / "done", *step(1, [], T0 + 10), steps=1)
    assert seen(done, T0 + 20).doing == "all steps are trained since 8 s"
    assert any("waiting 60%  training 30%  publishing 5%" in line for line in frame(shown))


def test_episodes_a_second_are_those_trained_over_the_time_that_passed(tmp_path: Path) -> None:
    live(tmp_path)
    rows = [
        {"version": n, "reward": 1.0, "time_s": t, "episodes_trained": 100 * n} for n, t in ((1, 1), (2, 2), (3, 11))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert seen(tmp_path).speeds == pytest.approx({"seconds a step": 5.0, "episodes/s": 20.0})


def test_the_time_between_two_lives_is_not_the_run_s(tmp_path: Path) -> None:
    live(tmp_path)
    life(tmp_path, [began(t=T0 + 10_000, version=2)])
    assert seen(tmp_path, T0 + 10_005).elapsed_s == 25.0


def test_what_the_watchdog_said_stands_until_something_moves(tmp_path: Path) -> None:
    said = Warned(level="error", logger="arl.training.watchdog", text=STALLED, t=T0 + 30)
    shown = seen(live(tmp_path / "still", *step(1, [], T0 + 10), said))
    assert shown.stalled == STALLED
    assert any(line.startswith("stalled    nothing has moved for 600 s") for line in frame(shown))
    assert seen(live(tmp_path / "moved", said, *step(1, [], T0 + 40))).stalled == ""
    assert seen(live(tmp_path / "answered", said, *group(0, T0 + 40, ["a"]))).stalled == ""


def test_bars_say_without_colours_what_they_say_with_them(tmp_path: Path) -> None:
    head, *lines = frame(seen(live(tmp_path / "run"), T0 + 20))
    assert head.count("━") == head.count("╌") > 0
    assert any("░░░░░███" in line for line in lines)


def test_servers_of_a_run_that_has_ended_are_not_said_to_serve(tmp_path: Path) -> None:
    assert any(line.startswith("servers") for line in frame(seen(live(tmp_path))))
    ended = seen(tmp_path, ending_of=lambda _: Ending("killed", "", ""))
    assert not any(line.startswith("servers") for line in frame(ended))


def test_a_run_that_has_just_begun_lacks_nothing(tmp_path: Path) -> None:
    (tmp_path / "run.lock").touch()
    assert seen(tmp_path).problems == []


def test_staleness_is_shown_against_its_bound(tmp_path: Path) -> None:
    shown = seen(live(tmp_path, *group(0, T0 + 1, ["a", "b"]), *step(2, [0], T0 + 10)))
    assert shown.staleness == {"mean": 0.5, "max": 1.0, "bound": 2.0}
    assert shown.stale_shares == [0.0, 1.0]
    assert "staleness  mean 0.5, max 1, 2 allowed   oldest token 0: 0%  1: 100%" in frame(shown)
    assert "staleness  mean 0.5, max 1, 2 allowed   oldest token 0 ▁█ 1" in frame(shown, 60)


def test_what_runs_is_counted_and_the_longest_named(tmp_path: Path) -> None:
    begun = [EpisodeBegan(episode=name, t=T0 + t) for name, t in (("1.0", 5.0), ("1.1", 2.0), ("e0.3", 8.0))]
    admitted = GroupAdmitted(group=1, epoch=0, row=1, stamp=0, t=T0 + 2)
    shown = seen(live(tmp_path, *group(0, T0 + 1, ["a", "b"]), admitted, *begun), T0 + 70)
    now = shown.running
    assert (now.episodes, now.evaluated, now.groups, now.waiting) == (3, 1, 1, 1)
    assert now.longest == [("1.1", 68.0), ("1.0", 65.0), ("e0.3", 62.0)]
    assert "           longest: 1.1 1:08, 1.0 1:05, e0.3 1:02" in frame(shown)


def test_a_run_that_has_ended_runs_nothing_and_says_what_to_do_next(tmp_path: Path) -> None:
    ending = Ending("failed", "the disk is full", "free some space")
    shown = seen(write_run(tmp_path), ending_of=lambda _: ending)
    assert (shown.running.episodes, shown.doing, shown.left_s) == (0, "", None)
    lines = frame(shown)
    assert "failed  step 2 of 4" in lines[0]
    at = lines.index("the end    the disk is full")
    assert lines[at + 1] == "           next: free some space"


def test_failures_servers_and_warnings_are_those_of_the_view(tmp_path: Path) -> None:
    text = "\n".join(frame(seen(write_run(tmp_path)), 100, None))
    assert "failures   3 x ValueError: bad call N at ID" in text
    assert f"servers    {SERVER} fenced, version 2, fenced 1 x: does not answer" in text
    assert "warnings   2 x disk 8 is slow" in text
    assert "findings   No inference server serves." in text


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 10), (200, 50), (139, 3), (20, 1), (500, 8)])
def test_a_frame_fits_any_screen(tmp_path: Path, width: int, height: int) -> None:
    shown = seen(write_run(tmp_path))
    for length in (1, 2000):
        long = [Warned(level="warning", logger="x", text="日本 " * length, t=T0)]
        shown.health["warnings"] = [{"level": w.level, "text": w.text, "count": 1, "last": 0.0} for w in 50 * long]
        lines = frame(shown, width, height)
        assert len(lines) <= height
        assert all(cell_len(line) <= width for line in lines)


def test_a_section_that_does_not_fit_says_how_much_is_left_out(tmp_path: Path) -> None:
    shown = seen(write_run(tmp_path))
    shown.health["warnings"] = [{"level": "warning", "text": f"{i}", "count": 1, "last": -i} for i in range(99)]
    warned = [line for line in frame(shown) if "1 x " in line or "and " in line]
    assert warned[-1].split()[:1] == ["and"]
    assert int(warned[-1].split()[1]) + sum(line.split()[-3:-1] == ["1", "x"] for line in warned) == 99


def test_messages_cannot_command_the_terminal(tmp_path: Path) -> None:
    evil = Warned(level="warning", logger="x", text="\x1b]0;owned\x07 \x9b2J a\u202eb [bold]c[/bold]\nd", t=T0 + 1)
    text = "\n".join(frame(seen(live(tmp_path, evil)), 80, None))
    assert "]0;owned 2J a b [bold]c[/bold] d" in text
    assert all(char.isprintable() for char in text.replace("\n", ""))


@pytest.mark.parametrize(
    "files", [{}, {"metrics.jsonl": '{"version": 1, "reward": "x", "time_s": NaN}\nto'}, {"run.lock": ""}]
)
def test_a_run_without_events_has_a_frame(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    text = "\n".join(frame(seen(tmp_path, ending_of=lambda _: Ending("killed", "", "")), 100, None))
    assert "no step is trained yet" in text
    assert "has no event log" in " ".join(text.split())  # it may be broken into lines anywhere


def test_fine_tuning_has_a_frame_with_its_losses(tmp_path: Path) -> None:
    rows = [{"version": version, "loss": 1 / version} for version in (1, 2, 4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "evaluations.jsonl").write_text('{"version": 0, "loss": 2.0}\n{"version": 4, "loss": 0.3}\n')
    ending = Ending("finished", "all steps are trained", "", 4)
    text = "\n".join(frame(seen(tmp_path, ending_of=lambda _: ending), 100, None))
    assert "step 4 of 4" in text
    assert "loss       0.250" in text
    assert "held out 0.300 at version 4" in text
    assert "reward" not in text
    assert "event log" not in text


def test_a_torn_log_has_a_frame_with_what_is_whole(tmp_path: Path) -> None:
    write_run(tmp_path)
    (torn,) = tmp_path.glob("events/0002-*.events.zst")
    torn.write_bytes(b"x" * 100)
    shown = seen(tmp_path)
    assert shown.version == 2
    assert any("is no event log, or damaged" in problem for problem in shown.problems)


def test_a_sparkline_has_a_block_for_each_value_or_for_the_mean_of_several() -> None:
    assert sparkline([0.0, 1.0, 0.5], 10) == "▁█▅"
    assert sparkline([0, 0, 1, 1], 2) == "▁█"
    assert sparkline([3.0, 3.0], 10) == "▅▅"
    assert sparkline([], 10) == ""
    assert len(sparkline(list(range(1000)), 7)) == 7


@pytest.mark.parametrize(
    ("seconds", "said"), [(0, "0:00"), (65, "1:05"), (3725, "1:02:05"), (200_000, "2 d 7 h"), (172_799, "47:59:59")]
)
def test_durations_are_short(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_plain_text_is_one_line() -> None:
    assert plain("a\n\tb \x00 c\u2028d") == "a b c d"


def test_once_prints_a_frame_and_so_does_a_stdout_that_is_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "adder")
    main(["top", str(tmp_path / "adder"), "--once"])
    main(["top", str(tmp_path)])
    once, piped = capsys.readouterr().out.split("adder")[1:]
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
