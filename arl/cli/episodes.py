"""Prepares an experiment, serves its model, and runs and times episodes.

| task | consumes | produces | waits for | woken by |
|---|---|---|---|---|
| a worker | the next piece of work | a finished run | the episode; the queue | engine, tools, time limit; the caller |
| the caller | finished runs, as they end | whatever it shows of them | the queue | a worker |
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arl.api.engine import Sampler
from arl.api.errors import ConfigError, first_error
from arl.api.images import PlacedImage
from arl.api.settings.endpoint import entered
from arl.api.settings.engines import RunningServersConfig
from arl.api.settings.run import Config
from arl.api.types import ModelRequest, ModelResponse
from arl.data.lazy_rows import NamedRows
from arl.rollout.controller import Dataset
from arl.rollout.episode import Episode, EpisodeRunner, EpisodeSampler
from arl.rollout.episode_events import EpisodeReport
from arl.run.experiment import TRAINED, Experiment
from arl.run.export import SavedWeights
from arl.run.inputs import RunTasks, given_tasks
from arl.runtime.threads import offload

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text, special tokens and spaces as they are."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of both commands: what `open_stage` takes."""
    parser.add_argument("file", type=Path, metavar="FILE", help="a script with an `experiment`")
    parser.add_argument(
        "--split", choices=("held-out", "train"), default="held-out", help="the examples to run (default: held-out)"
    )
    parser.add_argument("--task", metavar="NAME", help="of a script with several tasks: run this one (default: all)")
    parser.add_argument("--greedy", action="store_true", help="sample at temperature 0, whatever the workflow asks for")
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument(
        "--checkpoint",
        metavar="RUN_DIR[:N]",
        help="serve the weights in a checkpoint of a run, finished or not: of version N, or the newest",
    )
    trained = "serve the model in DIR; without DIR, the model that training left in run_dir"
    weights.add_argument("--trained", nargs="?", const="", metavar="DIR", help=trained)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One episode to run: the `number`-th of the example at `index`."""

    index: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCall:
    """One `agenerate` of an episode."""

    input_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    """Empty if the call raised."""
    elapsed_s: float
    ended_by: str
    """The stop reason, or the name of the error."""
    images: tuple[PlacedImage, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.input_ids + self.output_ids


class TimedSampler:
    """Passes requests on to `sampler`, and remembers them in `calls`, in the order in which they ended."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.calls: list[EngineCall] = []

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        began, output_ids, ended_by = time.monotonic(), (), ""
        try:
            response = await self._sampler.agenerate(request)
            output_ids, ended_by = response.output_ids, response.stop_reason
            return response
        except BaseException as error:
            ended_by = type(error).__name__
            raise
        finally:
            call = EngineCall(
                input_ids=tuple(map(int, request.input_ids)),
                output_ids=output_ids,
                elapsed_s=time.monotonic() - began,
                ended_by=ended_by,
                images=request.images,
            )
            self.calls.append(call)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """An episode that ended, and the calls that it made."""

    work: Work
    episode: Episode
    calls: tuple[EngineCall, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Everything that episodes need, open."""

    config: Config
    tasks: RunTasks
    """Those that are run."""
    examples: Dataset
    name: str
    """The name of the examples: held-out or train."""
    engine: Sampler
    decode: Decode
    greedy: bool

    def first(self, number: int) -> list[int]:
        """The indices of the first examples, of each task if there are several."""
        of_tasks: dict[str, list[int]] = {}
        places = self.examples.places if isinstance(self.examples, NamedRows) else {}
        for name, own in places.items():
            of_tasks.setdefault(name.partition("/")[0] if self.tasks.names else "", []).extend(own)
        return [index for own in (of_tasks or {"": range(len(self.examples))}).values() for index in own[:number]]

    async def run(self, works: Sequence[Work], on_end: Callable[[Run], Awaitable[None]]) -> None:
        """Run in order, so many at once as in an evaluation. Await `on_end` after each; its error ends all."""
        ended = asyncio.Queue[Run](maxsize=1)  # a worker that fails at once waits here for the caller
        rest = iter(works)
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(self.config.rollout.max_concurrent_held_out, len(works))):
                    tasks.create_task(self._work(rest, ended))
                for _ in works:
                    await on_end(await ended.get())
        except BaseExceptionGroup as errors:
            error = first_error(errors)
            raise error from error.__cause__

    async def _work(self, works: Iterable[Work], ended: asyncio.Queue[Run]) -> None:
        for work in works:
            workflow = self.tasks.workflow_of(self.tasks.task_of(self.examples, work.index))
            runner = EpisodeRunner(workflow=workflow, timeout_s=self.config.rollout.episode_timeout_s)
            seed = f"{self.config.seed}-{self.name}-{work.index}-{work.number}"
            is_seeded = self.config.rollout.seed_requests
            sampler = TimedSampler(EpisodeSampler(self.engine, is_greedy=self.greedy, seed=seed if is_seeded else None))
            name = f"episode {work.number} of example {work.index}"
            report = EpisodeReport(is_evaluation=True)
            episode = await runner.run(sampler, self.examples[work.index], name=name, report=report)
            await ended.put(Run(work=work, episode=episode, calls=tuple(sampler.calls)))


@asynccontextmanager
async def open_stage(experiment: Experiment[Any], config: Config, options: argparse.Namespace) -> AsyncGenerator[Stage]:
    """Prepare the experiment, enter its workflow, serve its model. Raises the ArlError of a part that cannot start.

    options: those of `add_options`.
    """
    from arl.run.launch import check_sees, decoder
    from arl.run.servers import serve

    file, is_held_out = options.file, options.split == "held-out"
    if isinstance(config.engine, RunningServersConfig) and (options.trained, options.checkpoint) != (None, None):
        option = "--checkpoint" if options.trained is None else "--trained"
        raise ConfigError(
            f"{option} starts servers for the trained weights, but engine.kind={config.engine.kind} names servers that "
            f"run already, with weights of their own; leave {option} out to use those, or choose another engine.kind"
        )
    trained = _trained(config, options.trained, file) if options.trained is not None else None
    saved = await offload(_saved, config, options.checkpoint) if options.checkpoint is not None else None
    sys.stderr.write(f"preparing {file}\n")
    config, setup = await experiment.aprepare(config)
    tasks = given_tasks(setup) if options.task is None else given_tasks(setup).alone(options.task)
    examples = tasks.held_out if is_held_out else tasks.trained
    if examples is None:
        raise ConfigError(f"{file} has no held-out examples (Setup.eval_dataset); take --split train")
    if len(examples) == 0:
        raise ConfigError(f"{file} has no {options.split} examples, so there is nothing to run")
    for task in tasks.tasks:
        if (rows := task.eval_dataset if is_held_out else task.dataset) is not None:
            await offload(check_sees, config, task, rows)
    decode = await offload(decoder, config.model)
    with tempfile.TemporaryDirectory(prefix="arl-weights-") as scratch, _failures_shown_once():
        what, served = str(trained or config.model), config
        if trained is not None:
            served = _with_models(config, {name: str(trained / name) for name in _names(config)})
        for name, weights in (saved or {}).items():
            what, model = f"version {weights.version} of {weights.run_dir}", Path(scratch) / (name or "model")
            await offload(weights.export, model)
            served = _with_models(served, {name: str(model)})
        sys.stderr.write(f"serving {what} with engine.kind={config.engine.kind}\n")
        async with entered(tasks.workflow, config.endpoint), serve(served) as engine:
            yield Stage(
                config=config,
                tasks=tasks,
                examples=examples,
                name=options.split,
                engine=engine,
                decode=decode,
                greedy=options.greedy,
            )


def _names(config: Config) -> list[str]:
    """The policies; "" stands for the only one of a run without names."""
    return [*config.policies] or [""]


def _with_models(config: Config, models: Mapping[str, str]) -> Config:
    """models: policy -> the model to serve, in the place of its own."""
    if not config.policies:
        return config.model_copy(update={"model": models[""]})
    own = {name: config.policies[name].model_copy(update={"model": model}) for name, model in models.items()}
    return config.model_copy(update={"policies": {**config.policies, **own}})


def _trained(config: Config, named: str, file: Path) -> Path:
    """The model directory to serve: `named`, or what training left."""
    directory = Path(named) if named else config.run_dir / TRAINED
    for name in _names(config):
        if not (directory / name / "config.json").is_file():
            advice = "name the directory of a model" if named else f"train it first: python {file}"
            raise ConfigError(f"--trained: there is no trained model in {directory / name}; {advice}")
    return directory


def _saved(config: Config, named: str) -> dict[str, SavedWeights]:
    """The weights of each policy; under "" of the only one."""
    run_dir, _, version = named.rpartition(":")
    has_version = bool(run_dir) and version.isdecimal() and not Path(named).is_dir()
    directory, number = (Path(run_dir), int(version)) if has_version else (Path(named), None)
    if config.policies:
        return SavedWeights.of_policies(directory, number, config.policies)
    return {"": SavedWeights.of(directory, number)}


@contextmanager
def _failures_shown_once() -> Iterator[None]:
    """Keep logging from showing failures a second time: the commands show them."""
    silent, logger = logging.NullHandler(), logging.getLogger("arl.rollout.episode_events")
    logger.addHandler(silent)
    try:
        yield
    finally:
        logger.removeHandler(silent)
