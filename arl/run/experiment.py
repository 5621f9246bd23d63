"""Experiment: what a script trains, on what, and how. `arl try` and `arl eval` run the same agent without training."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

from pydantic import model_validator

from arl.api.errors import ConfigError, HookError
from arl.api.html import run_html
from arl.api.settings.run import Config
from arl.api.settings.sections import laid_over, settings_without_keys
from arl.api.tracking import Tracker
from arl.api.types import Evaluation, StepStats
from arl.observe.health.digest import Digest
from arl.observe.health.rules import remarks
from arl.observe.tracking import check_trackers
from arl.run.inputs import Given, check_choice
from arl.run.script import run_script
from arl.runtime.console import is_json, json_console, tell
from arl.runtime.processes.rpc import check_is_no_import
from arl.runtime.stopping import kernel_shell
from arl.runtime.threads import offload
from arl.training.display import hide_progress_bars
from arl.training.evaluator import with_error
from arl.training.metrics_log import plot_run, read_jsonl
from arl.training.run_dir import BEST, make_run_dir, write_atomically
from arl.training.run_result import OpenRun

if TYPE_CHECKING:
    from arl.training.trainer import Trainer

log = logging.getLogger(__name__)

ConfigT = TypeVar("ConfigT", bound=Config)

StepHook = Callable[[StepStats, "Trainer"], Awaitable[object] | None]
"""Called after each step. A coroutine function is awaited, and the next step waits for it."""

TINY = "tiny"
TRAINED = "trained"
"""Where in run_dir the trained model is written, as a Hugging Face directory."""


class ExperimentConfig(Config):
    """Settings of an experiment that makes a tiny model if no other is named."""

    tiny_settings: ClassVar[Mapping[str, Any]] = {}
    """Defaults for the tiny model alone. Flags and files override them one by one; a section of another kind or preset
    stands alone."""

    model: str = TINY
    """A Hugging Face model directory or name; `tiny` builds one and warm-starts it on demonstrations."""

    @property
    def is_tiny(self) -> bool:
        return self.model == TINY

    @model_validator(mode="before")
    @classmethod
    def _with_tiny_settings(cls, given: Any) -> object:
        if not isinstance(given, dict):
            return given
        settings = cast("dict[str, Any]", given)
        return laid_over(cls.tiny_settings, settings) if settings.get("model", TINY) == TINY else settings


IS_LOADED_FOR_ITS_EXPERIMENT: ContextVar[bool] = ContextVar("is_loaded_for_its_experiment", default=False)
"""Whether a command such as `arl try` imports a script, which must not train now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup(Given):
    """The model, agent and data of one run, or its tasks, as `launch` takes them. Raises ConfigError."""

    model: str
    """A Hugging Face directory or name, instead of config.model."""
    trackers: Sequence[Tracker] = ()
    """Your own, beside those of log.trackers."""

    def __post_init__(self) -> None:
        check_choice(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment(Generic[ConfigT]):
    """Describes what a script trains. The script names it `experiment`."""

    config: type[ConfigT]
    """The class of its settings."""
    prepare: Callable[[ConfigT], Setup | Awaitable[Setup]]
    """Makes everything from the settings; run_dir exists by then. A plain function runs on a thread, since it may take
    minutes (fine-tuning a tiny model, say); a first Ctrl-C waits for its end, a second one does not. A coroutine
    function is awaited."""
    on_step: StepHook | None = None
    """Called with each step's numbers and the trainer, once the step is logged and its weights are on their way. Its
    error ends the run, with a checkpoint, as HookError. A plain function runs on the event loop, and everything waits
    for it: slow work belongs in a coroutine function."""

    def main(self, argv: Sequence[str] | None = None) -> TrainingResult | None:
        """Train with the settings in argv (unset: sys.argv[1:]): a script's last line. Ends as `arl.run_script` does.

        In a notebook's cell argv is empty if unset, and the result is returned; in a script, None.
        """
        return run_script(self.train, self.config, argv)

    async def train(self, config: ConfigT) -> TrainingResult:
        """Evaluate, train, evaluate again, and leave in run_dir summary.json, reward.png and the trained model.

        Run again on the same run_dir, it continues, and knows the evaluation from before any training.
        """
        if IS_LOADED_FOR_ITS_EXPERIMENT.get():
            raise ConfigError(
                "it trains when it is loaded; put the line that trains under `if __name__ == '__main__':`, and write "
                "at the top level: experiment = Experiment(config=..., prepare=...), see docs/running.md"
            )
        check_is_no_import()  # before run_dir is taken, which the run that the script started holds
        with json_console(config.log.format == "json"):
            async with OpenRun(config) as held:  # before `prepare`, which may write there
                return await self._train(config, held)

    async def _train(self, config: ConfigT, held: OpenRun) -> TrainingResult:
        from arl.run.launch import launch
        from arl.runtime.http.server import check_endpoint
        from arl.training.prometheus import check_metrics_address

        check_endpoint(config.endpoint)
        check_metrics_address(config.log)  # before a preparation, which may take minutes
        check_trackers(config.log.trackers, ())
        config, setup = await self.aprepare(config)
        async with launch(
            config,
            workflow=setup.workflow,
            dataset=setup.dataset,
            eval_dataset=setup.eval_dataset,
            keep=setup.keep,
            curriculum=setup.curriculum,
            tasks=setup.tasks,
            task_curriculum=setup.task_curriculum,
            trackers=setup.trackers,
            held=held,
        ) as trainer:
            before = await _evaluated(trainer, 0)
            async for stats in trainer:
                try:
                    waiting = self.on_step and self.on_step(stats, trainer)
                    if inspect.isawaitable(waiting):
                        await waiting
                except (Exception, SystemExit) as error:
                    said = f"on_step raised {type(error).__name__} after step {stats.version}: {error}"
                    raise HookError(said) from error
            after = await _evaluated(trainer, trainer.version)
            await trainer.export(config.run_dir / TRAINED)
        summary = _summary(trainer.summary(), before, after)
        said = await offload(_write_results, config, summary)
        if is_json():
            tell("result", said, summary=summary)
        else:
            sys.stdout.write(said + "\n")
        return TrainingResult(run_dir=config.run_dir, summary=summary)

    async def aprepare(self, config: ConfigT) -> tuple[ConfigT, Setup]:
        """The settings with the prepared model, and the setup. Raises ConfigError (run_dir), and as `prepare` does."""
        await offload(make_run_dir, config.run_dir)
        await offload(hide_progress_bars)
        preparing = offload(self.prepare, config)
        try:
            prepared = await asyncio.shield(preparing)
        except asyncio.CancelledError:
            now = "press Ctrl-C again" if kernel_shell() is None else "restart the kernel"
            log.warning("a thread cannot be stopped, so the preparation runs to its end; %s to end it now", now)
            await asyncio.wait([preparing])  # with run_dir's lock held, as it may write there
            preparing.exception()  # else asyncio would report an error that nobody retrieved
            raise
        setup = await prepared if inspect.isawaitable(prepared) else prepared
        return config.model_copy(update={"model": setup.model}), setup


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """The results of a run, in `run_dir`."""

    run_dir: Path
    summary: Mapping[str, float]
    """As in summary.json: held-out reward before and after, steps, seconds, samples per second, counts of episodes."""

    @property
    def model(self) -> str:
        """The trained model, a Hugging Face directory."""
        return str(self.run_dir / TRAINED)

    @property
    def best(self) -> str | None:
        """The best evaluated model (evaluation.keep_best), likewise; None if none was kept."""
        link = self.run_dir / BEST
        return str(link) if link.is_symlink() else None

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A row for each step, as in metrics.jsonl."""
        return read_jsonl(self.run_dir / "metrics.jsonl")

    def _repr_html_(self) -> str:
        """For a notebook."""
        evaluations = read_jsonl(self.run_dir / "evaluations.jsonl")
        return run_html("TrainingResult", {"model": self.model, **self.summary}, self.metrics, evaluations)

    def plot(self) -> Path:
        """Draw the run into reward.png, which a notebook shows. Raises ImportError without matplotlib."""
        path = plot_run(self.run_dir)
        if kernel_shell() is not None:
            from IPython.display import Image, display

            display(Image(filename=str(path)))
        return path


_WHEN = ("before", "after")


async def _evaluated(trainer: Trainer, version: int) -> Evaluation | None:
    """The evaluation of `version`; if there was none of all suites, one of the weights that are served now."""
    if trainer.evaluator is None:
        return None
    known = trainer.evaluations.get(version)
    num_suites = sum(1 for suite in trainer.evaluator.suites if suite.name)
    return known if known and len(known.by_name or {}) == num_suites else await trainer.evaluate()


def _write_results(config: Config, summary: Mapping[str, float]) -> str:
    write_atomically(config.run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
    where = f"see {config.run_dir}/summary.json"
    try:
        where += f" and {plot_run(config.run_dir)}"
    except ImportError as missing:
        log.warning("%s", missing)
    if "eval_reward_before" not in summary:
        return f"trained {summary['steps']} steps, {summary['wall_s']:.0f} s; {where}{_worst_finding(config)}"
    before, after = ((summary[f"eval_reward_{when}"], summary.get(f"eval_standard_error_{when}")) for when in _WHEN)
    what = " -> ".join(with_error(reward, error) for reward, error in (before, after))
    said = f"held-out reward {what} in {summary['steps']} steps, {summary['wall_s']:.0f} s; {where}"
    not_risen = _not_risen(before, after, config.run_dir)
    return said + not_risen + (_worst_finding(config) if not_risen else "")


def _worst_finding(config: Config) -> str:
    """The first finding of `arl view`, unless it is a mere note."""
    metrics, evaluations = (read_jsonl(config.run_dir / f"{name}.jsonl") for name in ("metrics", "evaluations"))
    digest = Digest(settings_without_keys(config), metrics, evaluations)
    worst = next((one for one in remarks(digest) if one.severity != "note"), None)
    return f"\n{worst.text} {worst.advice}" if worst else ""


def _not_risen(first: tuple[float, float | None], last: tuple[float, float | None], run_dir: Path) -> str:
    """A sentence about a reward that has not risen by two standard errors of the difference.

    first, last: reward and standard error. The evaluations count as independent, which overestimates the error: they
    share their examples.
    """
    (before, error_before), (after, error_after) = first, last
    error = math.hypot(error_before or 0.0, error_after or 0.0)
    if after - before > 2 * error:
        return ""
    if error_before == error_after == 0.0 and before == after:
        return (
            f"\nall held-out episodes had the reward {after:.3f}, before and after: others would tell more; if it can "
            "be higher, see docs/reward.md"
        )
    return (
        f"\nthe held-out reward has not risen by more than twice its standard error ({after - before:+.3f} ± "
        f"{error:.3f}): see docs/reward.md, and the Health page of: arl view {run_dir}"
    )


def _summary(totals: Mapping[str, float], before: Evaluation | None, after: Evaluation | None) -> dict[str, float]:
    if before is None or after is None:
        return dict(totals)
    rewards, errors, of_names, metrics = (dict[str, float]() for _ in range(4))
    for when, evaluation in zip(_WHEN, (before, after), strict=True):
        rewards[f"eval_reward_{when}"] = evaluation.reward
        if evaluation.standard_error is not None:
            errors[f"eval_standard_error_{when}"] = evaluation.standard_error
        for name, part in (evaluation.by_name or {}).items():
            of_names[f"eval_reward_{when}/{name}"] = part.reward
        for name, value in evaluation.metrics.items():
            if name in before.metrics:
                metrics[f"{name.removeprefix('episode/')}_per_episode_{when}"] = value
    return {**rewards, **errors, **of_names, **totals, **metrics}
