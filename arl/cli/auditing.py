"""`arl rewards audit`: score a recorded run's answers again, and show where another reward disagrees."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from arl.api.errors import ConfigError, RunFileError
from arl.api.tracking import expected_column
from arl.cli.command import errors_told, import_script
from arl.cli.viewing import ending_of, the_run
from arl.observe.events.records import EpisodeRecord
from arl.observe.view.top import plain
from arl.observe.view.viewed_run import ViewedRun
from arl.rewards.adapt import as_reward
from arl.rewards.threads import together

ABOUT = (
    "Score the answers of a recorded run again with another function (answer, data), and show where the two disagree. "
    "The answer is the text of an episode's last turn; data is its example, as the event log holds it. Exit code: 0; 1 "
    "if they disagree or the function failed; 2 for a wrong argument."
)
_AT_ONCE = 64
_KINDS = ("both pass", "neither passes", "only recorded passes", "only new passes", "new failed", "not recorded")
"""Not recorded: the run did not keep the tokens, or has no such part of the reward."""
_SHOWN = 160
"""The last characters of an answer, a question and a reference."""


def main(argv: Sequence[str]) -> None:
    """argv: the arguments after `arl rewards`."""
    parser = argparse.ArgumentParser(prog="arl rewards", description=ABOUT, allow_abbrev=False)
    parser.add_argument("command", choices=["audit"])
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's directory")
    which = "module:function or file.py:function; with () at the end, what it makes, as in arl.rewards:math_reward()"
    parser.add_argument("--with", dest="function", required=True, metavar="FUNCTION", help=which)
    parser.add_argument("--part", metavar="NAME", help="compare with this part of the recorded reward, not all of it")
    passes = "an answer passes with this or more (default: %(default)g)"
    parser.add_argument("--pass-reward", type=float, default=1.0, metavar="REWARD", help=passes)
    parser.add_argument(
        "--examples", type=int, default=3, metavar="N", help="shown of each kind (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one object, with all examples")
    options = parser.parse_args(argv)
    with errors_told("stopped; the run is as it was"):
        rows = asyncio.run(_rescore(options))
    by_kind = {kind: [row for row in rows if row["kind"] == kind] for kind in _KINDS}
    counts = {kind: len(found) for kind, found in by_kind.items()}
    both, neither, recorded, new, failed, _ = counts.values()
    rate = (recorded + new) / max(both + neither + recorded + new, 1)
    examples = [row for kind in _KINDS[2:5] for row in by_kind[kind][: None if options.json else options.examples]]
    if options.json:
        said = [json.dumps({"counts": counts, "disagreement": rate, "examples": examples})]
    else:
        said = [f"{name}: {value}" for name, value in counts.items()] + [f"disagreement: {rate:.1%}"]
        said += ["\n" + "\n".join(f"{name:10}{plain(str(value))}" for name, value in row.items()) for row in examples]
    sys.stdout.write("\n".join(said) + "\n")
    raise SystemExit(int(recorded + new + failed > 0))


async def _rescore(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All finished episodes. Raises RunFileError if the run has none whose answer can be read."""
    viewed, limit = ViewedRun(the_run(options.run_dir), ending_of), asyncio.Semaphore(_AT_ONCE)
    viewed.run.update()
    reward = as_reward(_loaded(options.function))

    async def score(episode: EpisodeRecord) -> dict[str, Any]:
        parts = [part.rewards[options.part] for part in episode.trajectories if options.part in part.rewards]
        recorded = (parts or [None])[-1] if options.part else episode.reward
        async with limit:
            answer, example = viewed.answer(episode) if viewed.texts.is_known else None, episode.example
            if answer is None or recorded is None:
                return {"episode": episode.episode, "kind": "not recorded"}
            try:
                new = (await reward(answer, example)).value
                old_passes, new_passes = (value >= options.pass_reward for value in (recorded, new))
                kind = _KINDS[1 - old_passes if old_passes == new_passes else 3 - old_passes]
            except Exception as error:  # noqa: BLE001 - the user's code: counted and shown
                kind, new = "new failed", f"{type(error).__name__}: {error}"
        question = next((example[name] for name in ("question", "prompt", "messages") if name in example), "")
        texts = {"question": question, "reference": example.get(expected_column(example) or ""), "answer": answer}
        shown = {name: str(text)[-_SHOWN:] for name, text in texts.items()}
        return {"episode": episode.episode, "kind": kind, "recorded": recorded, "new": new, **shown}

    async with reward:
        rows = await together(score(episode) for episode in viewed.run.episodes if episode.how == "finished")
    if all(row["kind"] == "not recorded" for row in rows):
        raise RunFileError(
            f"{options.run_dir} has no answers: no finished episode with tokens, tokenizer and this reward"
        )
    return rows


def _loaded(named: str) -> Any:
    place, _, name = named.removesuffix("()").rpartition(":")
    sys.path.insert(0, os.getcwd())
    try:
        module = import_script(Path(place).resolve()) if place.endswith(".py") else import_module(place)
        return getattr(module, name)() if named.endswith("()") else getattr(module, name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(f"--with {named}: {error}; write module:function or file.py:function") from error
