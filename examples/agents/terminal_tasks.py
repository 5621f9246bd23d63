"""The terminal agent's tasks: little jobs on one file, in Harbor's format, and demonstrations of good and bad ones.

    Write the number of lines of the file in barn to cedar.        $ ls barn
                                                                   falcon
                                                                   $ wc -l < barn/falcon > cedar

The instruction does not say what the file is called: an agent must look before it works. Each task is a directory
with task.toml, instruction.md, environment/, tests/ and solution/, so Harbor itself can run it too.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from string import Formatter
from typing import Any

from arl import Example, finetuning

Prompt = Callable[[str], list[dict[str, str]]]

SEEDS = {"held_out": 1, "training": 2, "demonstrations": 3}
NUM_KEPT_APART = 1000
"""The first held-out tasks, which no other region has."""
NUM_CAREFUL, NUM_MIXED = 12000, 1600
"""First only careful demonstrations, which teach a model to copy; then mixed ones, which teach it bad habits."""
MIX = {"careful": 0.3, "guess": 0.3, "halfway": 0.2, "wrong": 0.2}
"""Shares of the habits in mixed demonstrations: work on a file that was not looked for, stop after looking, do another
job."""
DONE = "Done."


def _listed(words: str) -> list[str]:
    return words.split()


WORDS = _listed(
    "amber anchor apple arrow badger bamboo barley barn basket beacon beetle birch bottle bridge bronze button cabin "
    "camel candle canyon carbon castle cedar cherry circle clover cobalt comet copper coral cotton cradle crystal "
    "dagger daisy desert dolphin donkey dragon eagle ember engine falcon feather fiddle flint forest fossil fox garden "
    "garnet ginger glacier goblet granite hammer harbor hazel helmet heron hollow honey hornet island ivory jacket "
    "jasper jungle kettle ladder lagoon lantern lemon lily linen lion locket lotus magnet maple marble meadow melon "
    "mirror morning moss mountain nectar needle nickel oak oasis olive onyx opal orchid otter oyster paddle panda "
    "parrot pearl pebble pepper pigeon pine planet plum pocket poppy prairie quartz quiver rabbit raven ribbon river "
    "rocket ruby saddle saffron salmon satin shadow shell silver socket sparrow spider spruce summit sunset tiger "
    "timber topaz tulip tundra turtle velvet violet walnut water willow window winter wolf zebra"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A kind of task. {place} is the directory, {file} the file, {out} a new name, {word} and {other} are words."""

    words: str
    command: str
    expected: str
    """The command of the tests that prints what {result} must hold; it has a copy of the file, {before}."""
    result: str = "{out}"
    content: str = "numbers"


JOBS = (
    Job(
        words="Write the number of lines of the file in {place} to {out}.",
        command="wc -l < {file} > {out}",
        expected="wc -l < {before}",
    ),
    Job(
        words="Write the sum of the file in {place} to {out}.",
        command="awk '{{s += $1}} END {{print s}}' {file} > {out}",
        expected="awk '{{s += $1}} END {{print s}}' {before}",
    ),
    Job(
        words="Write the largest number of the file in {place} to {out}.",
        command="sort -n {file} | tail -n 1 > {out}",
        expected="sort -n {before} | tail -n 1",
    ),
    Job(
        words="Write the smallest number of the file in {place} to {out}.",
        command="sort -n {file} | head -n 1 > {out}",
        expected="sort -n {before} | head -n 1",
    ),
    Job(
        words="Write the line with {word} of the file in {place} to {out}.",
        command="grep {word} {file} > {out}",
        expected="grep {word} {before}",
        content="words",
    ),
    Job(
        words="Write the lines of the file in {place} to {out} in order.",
        command="sort {file} > {out}",
        expected="sort {before}",
        content="words",
    ),
    Job(words="Rename the file in {place} to {out}.", command="mv {file} {out}", expected="cat {before}"),
    Job(
        words="Replace {word} by {other} in the file in {place}.",
        command="sed -i s/{word}/{other}/ {file}",
        expected="sed s/{word}/{other}/ {before}",
        result="{file}",
        content="words",
    ),
    Job(
        words="Mend the script in {place}: it must print {other}.",
        command="echo echo {other} > {file}",
        expected="echo {other}",
        result="{file}",
        content="script",
    ),
)
TESTS = """#!/bin/bash
if [ -f {result} ] && [ "$({expected})" = "$({shown} {result})" ]; then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt
"""
CONFIG = """schema_version = "1.0"

[metadata]
category = "files"

[agent]
timeout_sec = 30.0

[verifier]
timeout_sec = 30.0

[environment]
network_mode = "no-network"
"""
DOCKERFILE = "FROM debian:bookworm-slim\nWORKDIR /app\nCOPY files /app\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalTask:
    """One task: a job, its names, and the file's content."""

    job: Job
    names: dict[str, str]
    content: str

    @property
    def instruction(self) -> str:
        return self.filled(self.job.words)

    @property
    def command(self) -> str:
        """The right command, for an agent that knows the file's name."""
        return self.filled(self.job.command)

    def filled(self, template: str) -> str:
        return template.format(**self.names, before="/tests/before")

    def write(self, directory: Path) -> None:
        """Write it in Harbor's format."""
        is_script = self.job.content == "script"
        tests = {"expected": self.filled(self.job.expected), "result": self.filled(self.job.result)}
        files = {
            "task.toml": CONFIG,
            "instruction.md": self.instruction + "\n",
            "environment/Dockerfile": DOCKERFILE,
            f"environment/files/{self.names['file']}": self.content,
            "tests/test.sh": TESTS.format(**tests, shown="bash" if is_script else "cat"),
            "tests/before": self.content,
            "solution/solve.sh": f"#!/bin/bash\n{self.command}\n",
        }
        for path, text in files.items():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_text(text)
            (directory / path).chmod(0o755)


def made(rng: random.Random) -> TerminalTask:
    """A task at random."""
    place, name, out, word, other = rng.sample(WORDS, 5)
    job = rng.choice(JOBS)
    lines = [word, *rng.sample(sorted(set(WORDS) - {word, other}), rng.randint(2, 5))]
    numbers = [str(rng.randint(1, 99)) for _ in range(rng.randint(3, 8))]
    rng.shuffle(lines)
    contents = {"numbers": numbers, "words": lines, "script": [f"echo {word}"]}
    names = {"place": place, "file": f"{place}/{name}", "out": out, "word": word, "other": other}
    return TerminalTask(job=job, names=names, content="".join(f"{line}\n" for line in contents[job.content]))


def tasks(region: str, size: int) -> list[TerminalTask]:
    """The first tasks of a region. No instruction is in two regions."""
    others = {task.instruction for task in tasks("held_out", NUM_KEPT_APART)} if region != "held_out" else set[str]()
    rng = random.Random(SEEDS[region])
    endless = (made(rng) for _ in count())
    return list(islice((task for task in endless if task.instruction not in others), size))


def write_tasks(directory: Path, region: str, size: int) -> Path:
    """Write the first tasks of a region, unless they are there; return where."""
    place = directory / f"{region}_{size}"
    if not place.exists():
        unfinished = place.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        for number, task in enumerate(tasks(region, size)):
            task.write(unfinished / f"{number:04}")
        unfinished.rename(place)
    return place


def lessons(prompt: Prompt, tool: Any, seed: int) -> list[list[Example]]:
    """For the warm start: careful demonstrations, then mixed ones."""
    rng = random.Random(seed)
    habits = ["careful"] * NUM_CAREFUL + rng.choices(list(MIX), weights=list(MIX.values()), k=NUM_MIXED)
    shown = tasks("demonstrations", len(habits))
    made_of = [_shown(habit, task, rng, prompt, tool) for habit, task in zip(habits, shown, strict=True)]
    return [made_of[:NUM_CAREFUL], made_of[NUM_CAREFUL:]]


def _shown(habit: str, task: TerminalTask, rng: random.Random, prompt: Prompt, tool: Any) -> Example:
    """An episode with that habit."""
    place, name = task.names["file"].split("/")
    messages = prompt(task.instruction)
    for command, output in _done(habit, task, rng, f"ls {place}", name):
        messages.append({"role": "assistant", "content": finetuning.tool_call("bash", command=command)})
        messages.append({"role": "tool", "content": output})
    return {"messages": [*messages, {"role": "assistant", "content": DONE}], "tools": [tool.spec]}


def _done(habit: str, task: TerminalTask, rng: random.Random, look: str, name: str) -> Sequence[tuple[str, str]]:
    """The commands and what they print."""
    quiet = "[no output]"
    match habit:
        case "guess":
            guessed = {**task.names, "file": f"{task.names['place']}/{rng.choice(WORDS)}"}
            return [(task.job.command.format(**guessed), quiet)]
        case "halfway":
            return [(look, name)]
        case "wrong":
            other = rng.choice([job for job in JOBS if job is not task.job])
            return [(look, name), (task.filled(other.command), quiet)]
    return [(look, name), (task.command, quiet)]


def phrases() -> list[str]:
    """The tokens of the tiny model's tokenizer: the words, and what is around them."""
    templates = [template for job in JOBS for template in (job.words, job.command)]
    around = [literal for template in templates for literal, *_ in Formatter().parse(template) if len(literal) > 1]
    call = finetuning.tool_call("bash", command="|").split("|")
    return [*dict.fromkeys(around), *call, "ls ", *WORDS]
