"""A console of JSON: whatever arl says, or is logged or raised, is one object in one line; text comes back after."""

import io
import json
import logging
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
from one_turn import OneTurn
from records import stats
from training.trainer_run import running

from arl.api.settings.run import Config, LogConfig
from arl.api.types import Evaluation
from arl.run.script import exit_with, run_script
from arl.runtime.console import is_json, json_console, tell
from arl.training.display import display_of, progress
from arl.training.run_result import how_it_ended

log = logging.getLogger("somebody")


def objects(text: str) -> list[dict[str, Any]]:
    """Of a console's lines. Fails for any other line."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    assert text == "" or text.endswith("\n")
    found = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    assert all({"time", "level", "kind", "logger", "message"} <= one.keys() for one in found)
    return found


def test_what_others_log_and_warn_of_are_objects_and_what_they_print_stays_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with json_console(True), warnings.catch_warnings():
        warnings.simplefilter("always")
        sys.stdout.write("printed\n")
        log.warning("a %s", "record")
        try:
            raise ValueError("the cause")
        except ValueError:
            log.exception("it failed")
        warnings.warn("take care", stacklevel=1)
    out, err = capsys.readouterr()
    assert out == "printed\n"
    logged, failed, warned = objects(err)
    assert (logged["kind"], logged["level"], logged["logger"], logged["message"]) == (
        "log", "warning", "somebody", "a record",
    )  # fmt: skip
    assert failed["level"] == "error"
    assert failed["traceback"].endswith("ValueError: the cause")
    assert "take care" in warned["message"]


def test_a_record_that_a_library_would_print_itself_is_an_object_once(capsys: pytest.CaptureFixture[str]) -> None:
    library, root = logging.getLogger("library_of_its_own"), logging.StreamHandler(sys.stderr)
    library.propagate = False
    own = logging.StreamHandler(sys.stdout)
    library.addHandler(own)
    logging.root.addHandler(root)
    try:
        with json_console(True):
            library.warning("from the library")
            log.warning("from somebody")
        library.warning("text again")
    finally:
        logging.root.removeHandler(root)
        library.removeHandler(own)
    out, err = capsys.readouterr()
    assert [one["message"] for one in objects(out.removesuffix("text again\n") + err)] == [
        "from the library",
        "from somebody",
    ]
    assert out.endswith("}\ntext again\n")


def test_blocks_may_be_nested_and_text_comes_back_after_the_outermost(capsys: pytest.CaptureFixture[str]) -> None:
    before = list(logging.root.handlers)
    with json_console(True):
        with json_console(True), json_console(False):
            tell("notice", "inner")
        assert is_json()
        tell("notice", "outer")
    assert not is_json()
    assert logging.root.handlers == before
    assert [one["message"] for one in objects(capsys.readouterr().out)] == ["inner", "outer"]


def test_threads_do_not_mix_their_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = io.StringIO()  # as where 2>&1 joins both
    monkeypatch.setattr(sys, "stdout", shared)
    monkeypatch.setattr(sys, "stderr", shared)

    def speak(name: str) -> None:
        for number in range(200):
            if number % 2:
                tell("notice", f"{name} {number}")
            else:
                log.warning("%s %d", name, number)

    with json_console(True):
        threads = [threading.Thread(target=speak, args=(f"thread-{n}",)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    said = [one["message"] for one in objects(shared.getvalue())]
    assert sorted(said) == sorted(f"thread-{n} {number}" for n in range(4) for number in range(200))


def test_steps_evaluations_and_progress_are_objects_with_their_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    evaluation = Evaluation(version=3, reward=float("nan"), num_episodes=4, num_failed=1, wall_s=2.0, metrics={"a": 1})
    with json_console(True):
        display = display_of(LogConfig(format="json"), 9)
        display.step(stats(1))
        display.evaluation(evaluation)
        with progress("warm start", 1) as advance:
            advance(loss=0.5)
        display_of(LogConfig(format="json", console=False)).say("nothing")
        display.close()
    step, evaluated, done = objects(capsys.readouterr().out)
    assert (step["kind"], step["version"], step["steps"], step["metrics"]) == ("step", 1, 9, stats(1).metrics)
    assert (evaluated["kind"], evaluated["version"], evaluated["reward"]) == ("evaluation", 3, None)
    assert (done["kind"], done["name"], done["done"], done["total"]) == ("progress", "warm start", 1, 1)


async def test_a_whole_run_prints_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = {"format": "json", "console": True}
    async with running(tmp_path, evaluate=True, evaluation={"every": 2}, workflow=OneTurn(), log=log) as trainer:
        async for _ in trainer:
            pass
    out, err = capsys.readouterr()
    said = objects(out)
    assert objects(err) == []
    assert [one["version"] for one in said if one["kind"] == "step"] == [1, 2, 3, 4]
    (end,) = (one for one in said if one["kind"] == "end")
    written = how_it_ended(tmp_path)
    assert written is not None
    assert (end["how"], end["why"], end["disk"]) == ("finished", written.why, dict(written.disk))
    assert {one["version"] for one in said if one["kind"] == "evaluation"} <= {2, 4}


def test_an_end_with_a_message_is_an_object(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), json_console(True):
        exit_with(3, "error: no room")
    (one,) = objects(capsys.readouterr().err)
    assert (one["kind"], one["level"], one["message"]) == ("error", "error", "error: no room")
    with pytest.raises(SystemExit):
        run_script(lambda config: None, Config, ["--stpes", "3", "--log.format", "json"])  # pyright: ignore[reportArgumentType]
    (one,) = objects(capsys.readouterr().err)
    assert one["message"] == "error: --stpes is not a setting; did you mean --steps"


def test_an_error_that_nobody_catches_is_an_object_with_its_traceback() -> None:
    script = """
from arl.api.settings.run import Config
from arl.run.script import run_script

async def main(config):
    print("begun")
    raise LookupError("the user's own")

run_script(main, Config)
"""
    command = [sys.executable, "-c", script, "--model", "none", "--log.format", "json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stdout == "begun\n"
    (one,) = objects(ended.stderr)
    assert (one["level"], one["message"]) == ("error", "LookupError: the user's own")
    assert "in main" in one["traceback"]
