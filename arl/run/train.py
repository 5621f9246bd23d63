"""`arl.train`: trains a model on a dataset with a reward or an agent. It runs an `Experiment`."""

from __future__ import annotations

import asyncio
import difflib
import inspect
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, cast

from pydantic import ValidationError

from arl.api.errors import ArlError, CheckpointError, ConfigError, DatasetError, ModelError
from arl.api.settings.algorithm import AlgorithmConfig
from arl.api.settings.engines import LocalEngineConfig
from arl.api.settings.run import Config
from arl.api.settings.sections import PEERS_NAMES, config_error, laid_over
from arl.api.tracking import Tracker
from arl.api.types import SamplingParams
from arl.api.workflow import RolloutWorkflow, Task
from arl.data.lazy_rows import Columns, StreamedRows
from arl.data.loading import examples_of, first_of_each, held_out_of, load_dataset
from arl.rewards.adapt import RewardLike, TrlReward, WeightedReward, check_signature
from arl.rewards.threads import ThreadReward
from arl.rollout.controller import Dataset
from arl.run.experiment import Experiment, Setup, StepHook, TrainingResult
from arl.run.script import Stopped, exit_with, run_until_stopped
from arl.runtime.console import json_console
from arl.runtime.processes.rpc import OtherTracebackError
from arl.runtime.stopping import is_in_cell, is_loop_running, run_in_cell
from arl.workflow.agent import PromptFunction, SingleTurnWorkflow

P = ParamSpec("P")
_TELLING = (ConfigError, DatasetError, ModelError, CheckpointError)
_CHECKED = 100
"""How many examples are checked for a prompt and a readable reference before a run starts."""
T = TypeVar("T")

Rewards = RewardLike | Mapping[str, RewardLike | tuple[float, RewardLike]]
"""A reward, or several by name, each with its weight (1 where none is given)."""
Rows = str | Path | Dataset
"""A list of dicts, a `datasets.Dataset`, a table of pandas, a file, a directory, or a dataset's name on the hub."""


async def atrain(  # noqa: PLR0913 - what most runs set, where an editor completes it
    *,
    dataset: Rows | None = None,
    model: str | Path | None = None,
    reward: Rewards | None = None,
    workflow: RolloutWorkflow | None = None,
    eval_dataset: Rows | Mapping[str, Rows] | None = None,
    tasks: Sequence[Task] | None = None,
    system: str | None = None,
    prompt: PromptFunction | None = None,
    columns: Columns | None = None,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    algorithm: str | AlgorithmConfig | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    group_size: int | None = None,
    max_staleness: int | None = None,
    lr: float | None = None,
    seed: int | None = None,
    run_dir: str | Path | None = None,
    device: str | None = None,
    dtype: Literal["float32", "bfloat16"] | None = None,
    trackers: str | Sequence[str | Tracker] | None = None,
    record: bool | None = None,
    on_step: StepHook | None = None,
    config: Config | None = None,
) -> TrainingResult:
    """Train `model` on `dataset`; evaluate before and after on `eval_dataset`, if given.

    `arl.train(...)` is for scripts and notebooks, `await arl.atrain(...)` for code in an event loop. A second call with
    the same `run_dir` continues the run. Settings that are left unset are `config`'s, or else the defaults of `Config`.

    model: a Hugging Face directory, or a name on the hub.
    dataset, eval_dataset: a list of dicts, a `datasets.Dataset`, a file, a directory, or a name on the hub, whose
        splits `train` and `test` are read. Without a workflow, an example has a column `messages`, `prompt` or
        `question`. eval_dataset may be several datasets by name: each is evaluated and reported under its name.
    reward: a function of the answer's text and the example, or several: name -> function, or (weight, function).
    workflow: an agent, instead of a reward.
    tasks: several agents, each with its dataset, instead of these: `arl.Task(name=..., workflow=..., dataset=...)`.
    system, prompt: the system prompt, and a function from an example to its question; only with a reward.
    columns: columns that rows get, each by the name of another column or by a function of the row:
        {"question": lambda row: row["problem"].strip(), "answer": "solution"}.
    max_new_tokens, temperature: how answers are sampled; only with a reward.
    algorithm: a preset's name (docs/algorithms.md lists them), or settings.
    steps: batches to train. batch_size: examples in a batch. group_size: episodes of each example.
    max_staleness: how many versions old a trained token may be; 0 is synchronous training.
    lr: the learning rate. run_dir: where the run's files go. device, dtype: of the trainer and the embedded server.
    trackers: experiment trackers, by names such as "trackio" or "wandb", or a `Tracker` of your own.
    record: keep what each step's numbers depend on, for `arl.replay`.
    on_step: called with the numbers of each step (`StepStats`) and the trainer; a coroutine function is awaited.
    config: all other settings.

    Raises ConfigError for a wrong setting, DatasetError for an unusable dataset, and any error that ends a run.
    """
    _check_types(model, system, prompt, config)
    shown_by = [trackers] if isinstance(trackers, str) else trackers or ()
    own_trackers = [tracker for tracker in shown_by if not isinstance(tracker, str)]
    named_trackers = [tracker for tracker in shown_by if isinstance(tracker, str)]
    device_and_dtype = {"device": device, "dtype": dtype}
    is_embedded = config is None or isinstance(config.engine, LocalEngineConfig)
    settings = _settings(
        config,
        {
            "model": model and str(model),
            "run_dir": run_dir,
            "steps": steps,
            "seed": seed,
            "record": record,
            "rollout": {"batch_size": batch_size, "group_size": group_size, "max_staleness": max_staleness},
            "train": {**device_and_dtype, "optimizer": {"lr": lr}},
            "engine": device_and_dtype if is_embedded else {},
            "log": {"trackers": named_trackers or None},
            "algorithm": {"preset": algorithm} if isinstance(algorithm, str) else algorithm,
        },
    )
    sampling = _given({"max_new_tokens": max_new_tokens, "temperature": temperature})
    of_reward = _given({"system": system, "prompt": prompt, **sampling})
    if tasks is None:
        _check_choice(dataset, reward, workflow, of_reward)
    else:
        others = {"dataset": dataset, "eval_dataset": eval_dataset, "reward": reward, "workflow": workflow}
        if both := [name for name, value in {**others, "columns": columns, **of_reward}.items() if value is not None]:
            said = "each arl.Task has its own: leave them out"
            raise ConfigError(f"train got tasks, and {', '.join(both)} too; {said}")

    def prepare(config: Config) -> Setup:
        if tasks is not None:
            return Setup(model=config.model, tasks=[*map(_with_rows, tasks)], trackers=own_trackers)
        train = examples_of("dataset", _loaded(dataset, "train"), columns or {}, may_stream=True)
        held_out = _held_out(eval_dataset, columns or {})
        agent = workflow
        if agent is None:
            agent = _single_turn(config.model, cast("Rewards", reward), SamplingParams(**sampling), system, prompt)
            is_stream = isinstance(train, StreamedRows)
            first = train.head(_CHECKED) if is_stream else [train[i] for i in range(min(len(train), _CHECKED))]
            for example in (*first, *(first_of_each(held_out) if held_out is not None else ())):
                agent.check_example(example)  # before anything starts
        rows = cast("Any", train)
        return Setup(model=config.model, workflow=agent, dataset=rows, eval_dataset=held_out, trackers=own_trackers)

    return await Experiment(config=type(settings), prepare=prepare, on_step=on_step).train(settings)


def _blocking(coroutine: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Its blocking twin, with the same parameters. Raises ConfigError for arguments that do not fit."""
    signature = inspect.signature(coroutine)

    @wraps(coroutine)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            unknown = next((name for name in kwargs if name not in signature.parameters), "")
            close = difflib.get_close_matches(PEERS_NAMES.get(unknown, unknown), signature.parameters, n=1)
            raise ConfigError(f"arl.train {error}" + "".join(f"; did you mean {name}?" for name in close)) from None
        again = "arl.train with the same run_dir"
        if is_in_cell():
            return run_in_cell(coroutine(*args, **kwargs), again=again)
        if is_loop_running():
            raise ConfigError("train() blocks, and an event loop runs here: await arl.atrain(...)")
        if threading.current_thread() is not threading.main_thread():
            return asyncio.run(coroutine(*args, **kwargs))
        given = kwargs.get("config")
        config = given if isinstance(given, Config) else None
        with json_console(config is not None and config.log.format == "json"):
            try:
                with asyncio.Runner() as runner:
                    notice_s = config.checkpoint.notice_s if config else None
                    return run_until_stopped(runner, coroutine(*args, **kwargs), notice_s, again=again)
            except ArlError as error:
                told_alone = _alone(error)
            except Stopped as stop:
                if stop.number == signal.SIGINT and hasattr(sys, "ps1"):  # an interactive session goes on
                    raise KeyboardInterrupt from None
                next_call = "arl.train with the same run_dir continues from its newest checkpoint, if there is one"
                exit_with(128 + stop.number, stop.said(next_call))
            raise told_alone

    call.__name__ = call.__qualname__ = coroutine.__name__.removeprefix("a")
    return call


def _alone(error: ArlError) -> ArlError:
    """Without arl's own frames, here and in the trainer's process, where the message says enough."""
    if isinstance(error, _TELLING) and isinstance(error.__cause__, OtherTracebackError):
        error.__cause__ = None
    return error.with_traceback(None)


train = _blocking(atrain)


def _settings(base: Config | None, changes: Mapping[str, Any]) -> Config:
    """The changes that are given, over `base`. Raises ConfigError, which names each wrong setting."""
    kind = Config if base is None else type(base)
    try:
        return kind.model_validate(laid_over(base or Config.model_construct(), _given(changes)))
    except ValidationError as error:
        raise config_error(kind, error) from None


def _given(changes: Mapping[str, Any]) -> dict[str, Any]:
    inner = {name: _given(value) if isinstance(value, dict) else value for name, value in changes.items()}
    return {name: value for name, value in inner.items() if value is not None and value != {}}


def _check_types(model: object, system: object, prompt: object, config: object) -> None:
    if config is None and model is None:
        raise ConfigError("train got no model; give a Hugging Face directory, or a name on the hub")
    if config is not None and not isinstance(config, Config):
        raise ConfigError(f"config is a {type(config).__name__}; give an arl.Config(...)")
    if system is not None and not isinstance(system, str):
        raise ConfigError(f"system is {system!r:.80}; give the text of a system prompt")
    if prompt is not None and not callable(prompt):
        raise ConfigError(f"prompt is {prompt!r:.80}; give a function from an example to its question")


def _with_rows(task: Any) -> Any:
    """The task with datasets that are loaded; what is no task is refused later."""
    if not isinstance(task, Task):
        return task
    held_out = None if task.eval_dataset is None else _held_out(task.eval_dataset, {})
    return replace(task, dataset=_loaded(task.dataset, "train"), eval_dataset=held_out)


def _check_choice(dataset: object, reward: object, workflow: object, of_reward: Mapping[str, object]) -> None:
    if dataset is None:
        raise ConfigError("train got no dataset; give rows, a file or a name on the hub, or tasks=[arl.Task(...)]")
    if (reward is None) == (workflow is None):
        got = "neither" if reward is None else "both"
        raise ConfigError(f"train got {got} of reward and workflow; give a reward for single answers, or an agent")
    if workflow is not None and of_reward:
        raise ConfigError(f"{', '.join(of_reward)} cannot be given beside a workflow, which has its own; set it there")


def _loaded(rows: Any, split: str) -> Any:
    return load_dataset(rows, split=split) if isinstance(rows, str | Path) else rows


def _held_out(rows: Any, columns: Columns) -> Any:
    named = isinstance(rows, Mapping) and any(isinstance(one, str | Path) for one in rows.values())
    loaded = {name: _loaded(one, "test") for name, one in rows.items()} if named else _loaded(rows, "test")
    return held_out_of(loaded, columns)


def _single_turn(
    model: str, reward: Rewards, sampling: SamplingParams, system: str | None, prompt: PromptFunction | None
) -> SingleTurnWorkflow:
    from arl.engine.model_files import load_tokenizer

    if isinstance(reward, Mapping):
        parts = {name: part if isinstance(part, tuple) else (1.0, part) for name, part in reward.items()}
        runnable: Any = {name: (*part[:1], *map(_runnable, part[1:])) for name, part in parts.items()}
        whole: Any = WeightedReward(runnable)  # refuses a part that is not a pair
    else:
        whole = _runnable(reward)
    return SingleTurnWorkflow(load_tokenizer(model), whole, sampling=sampling, system=system, prompt=prompt)


def _runnable(reward: Any) -> RewardLike:
    """Functions of the script itself run in threads; worker processes would have to run the script to find them."""
    if not (inspect.isfunction(reward) or isinstance(reward, TrlReward)) or inspect.iscoroutinefunction(reward):
        return reward
    check_signature(reward)
    try:
        is_importable = bool(pickle.dumps(reward)) and reward.__module__ != "__main__"
    except (pickle.PicklingError, AttributeError, ImportError):
        is_importable = False
    return reward if is_importable else ThreadReward(reward)
