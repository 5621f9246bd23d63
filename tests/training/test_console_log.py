"""Every line that a run's process writes to its console is in logs/console.log, too, as plain text."""

import logging
import os
import sys
import threading
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from training.trainer_run import run, running

from arl.api.fakes import ScriptedTrainEngine
from arl.runtime.console import ConsoleLog
from arl.training.display import Display


def lines_of(path: Path) -> list[str]:
    started, *lines = path.read_text().splitlines()
    assert started.startswith("--- started at ")
    return lines


async def test_the_lines_of_a_run_are_there_and_stay_there_when_it_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console = {"log": {"console": True}}
    await run(tmp_path, steps=1, **console)
    async with running(tmp_path, steps=2, **console) as trainer:
        sys.stdout.write("the script's own line\n")
        async for _ in trainer:
            pass
    sys.stdout.write("after the run\n")
    said = capsys.readouterr()
    assert said.err == ""
    logged = (tmp_path / "logs" / "console.log").read_text().splitlines()
    first, second = (i for i, line in enumerate(logged) if line.startswith("--- started at "))
    assert [*logged[first + 1 : second], *logged[second + 1 :], "after the run"] == said.out.splitlines()
    assert f"continuing {tmp_path} from version 1 of 2" in logged
    assert logged.count("the script's own line") == 1


async def test_an_error_that_ended_the_run_is_there_with_its_traceback(tmp_path: Path) -> None:
    def fails(_: object) -> None:
        raise ValueError("a bug of the script")

    with pytest.raises(ValueError, match="a bug"):
        await run(tmp_path, ScriptedTrainEngine(on_train=fails))
    logged = lines_of(tmp_path / "logs" / "console.log")
    assert "ValueError: a bug of the script" in logged
    assert any(line.strip().startswith("File ") for line in logged)


def test_colours_and_redrawn_lines_are_plain_and_handlers_and_threads_are_heard(tmp_path: Path) -> None:
    out, err = StringIO(), StringIO()
    log = ConsoleLog(tmp_path / "logs" / "console.log")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        handler = logging.StreamHandler()
        logger = logging.getLogger("some.library")
        logger.addHandler(handler)
        log.open()
        sys.stdout.write("\x1b[31mred\x1b[0m \x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\\n")
        sys.stdout.write("1 %\r50 %\r")
        speaker = threading.Thread(target=lambda: sys.stdout.writelines(["of a ", "thread\n"]))
        speaker.start()
        speaker.join()
        sys.stdout.write("100 %\n\udcff\n")
        logger.warning("a warning")
        sys.stderr.write("an unfinished line")
        kept = sys.stdout
        log.close()
        logger.removeHandler(handler)
        assert (sys.stdout, sys.stderr, handler.stream) == (out, err, err)
        kept.write("later\n")
    assert lines_of(tmp_path / "logs" / "console.log") == [
        "red link", "of a thread", "100 %", "\\udcff", "a warning", "an unfinished line",
    ]  # fmt: skip
    assert out.getvalue().endswith("later\n")


def test_what_is_printed_between_the_frames_of_a_live_display_is_copied_and_its_frames_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    log = ConsoleLog(tmp_path / "console.log")
    log.open()
    display = Display(3, Console(force_terminal=True, width=60))
    with display.work("fine-tuning", 2) as advance:
        advance(loss=0.5)
        sys.stdout.write("[bold]the script's[/bold] own line, which is longer than the terminal is wide\n")
        advance(loss=0.25)
    display.say("a notice")
    display.close()
    log.close()
    *said, notice = lines_of(tmp_path / "console.log")
    assert said[0] == "[bold]the script's[/bold] own line, which is longer than the terminal is wide"
    assert said[1].startswith("fine-tuning: 2 of 2 steps")
    assert (len(said), notice) == (2, "a notice")
    assert "\x1b[" in screen.getvalue()
    assert sys.stdout is screen


def test_a_forked_process_copies_nothing_and_prints_as_before(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = ConsoleLog(tmp_path / "console.log")
    log.open()
    with log._lines.mutex:  # as another thread may hold it
        child = os.fork()
        if not child:
            sys.stdout.write("of the child\n")
            sys.stdout.flush()
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    log.close()
    assert lines_of(tmp_path / "console.log") == []
    assert capfd.readouterr().out == "of the child\n"


def test_a_full_disk_ends_the_log_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "console.log").symlink_to("/dev/full")
    log = ConsoleLog(tmp_path / "console.log")
    log.open()
    sys.stdout.write("lost\n")
    log.close()
    assert caplog.messages == [f"{tmp_path}/console.log has no lines from here on: {os.strerror(28)}"]
