"""`arl.replay`: the recorded steps of a run again, to the bit or under other settings. No sampling, no servers.

checkpoint, or model --> learner --step--> weights --compared with the recording--> ReplayedStep
                            ^    batch --> the same weights under other settings --> ComparedStep

`RecordedRun` says which steps there are, from which checkpoint they can be reached, and under which settings. Only
functions that run in the learners' process import torch.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from pydantic import ValidationError

from arl.api.errors import ConfigError, RecordingError
from arl.api.events import ranges_text
from arl.api.settings.engines import TrainConfig
from arl.api.settings.run import Config, EventsConfig
from arl.api.settings.sections import config_error, laid_over
from arl.api.train_engine import Head, TensorPrint, digest_of
from arl.api.version import __version__
from arl.engine.model_files import model_digest
from arl.run.learner import host_learner, load_learner
from arl.runtime.processes.actor import ObjectProcess
from arl.training.batch_codec import FlatBatch
from arl.training.learner_process import RemoteLearner
from arl.training.recording import DIRECTORY, Build, RecordedStep, recorded_versions, step_file
from arl.training.run_dir import checkpoint_of, saved_versions

if TYPE_CHECKING:
    from arl.engine.fsdp.train_engine import WatchedEngine
    from arl.training.learner import Learner

TOLERANCE = 1e-3
"""The largest difference of a tensor, as a share of its norm, that rounding on other hardware may make."""
_MATTER = ("seed", "train", "algorithm", "rollout")
"""The sections on which a step's numbers depend, besides its batch."""
_ABOUT_TRAINING = ("algorithm", "train", "seed")
"""The sections that a replay can change."""
_OF_RANKS = ("num_ranks", "min_ranks", "tensor_parallel", "ray_address", "max_recoveries")
"""Of `train`, but without effect: other settings are compared on one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRange:
    """The steps to train, and where the replay begins."""

    checkpoint: Path | None
    """None: the model that the run began from."""
    base: int
    """The version of these weights."""
    first: int
    """The first step that was asked for. The steps from `base` to it are only trained to reach it."""
    stop: int
    """The last one is stop - 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """One step that was trained again."""

    version: int
    """The version on which it was trained."""
    digest: str
    """The digest of the weights after it."""
    recorded_digest: str
    """The same digest in the run; empty if it was lost with a process."""
    difference: float
    """The largest difference of a tensor, as a share of its norm, estimated by a projection; 0 if all are identical."""
    tensor: str
    """The tensor that differs most; empty if none differs."""
    loss: float
    recorded_loss: float
    build: tuple[str, ...]
    """How this build differs from the run's: versions of arl, Python, torch; the processor."""
    is_on_cpu: bool

    @property
    def is_known(self) -> bool:
        """Whether the run's weights are known."""
        return bool(self.recorded_digest)

    @property
    def is_identical(self) -> bool:
        return self.digest == self.recorded_digest

    def is_good(self, tolerance: float) -> bool:
        """Whether these are the run's numbers, as far as those are known: identical, or within the tolerance on another
        build or a GPU. The same build computes the same numbers on a CPU."""
        if self.is_identical or not self.is_known:
            return True
        must_be_identical = self.is_on_cpu and not self.build
        return not must_be_identical and self.difference <= tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChange:
    """How one layer's gradient and update change under other settings."""

    layer: str
    gradient: float
    """The norm of the run's own gradient, before clipping."""
    other_gradient: float
    gradient_cosine: float
    """Between both gradients; NaN if one is 0."""
    update: float
    """The norm of the change of the weights."""
    other_update: float
    update_cosine: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedStep:
    """One step under the run's own settings and under others, from the same weights and batch."""

    version: int
    """The version on which both were trained."""
    metrics: Mapping[str, float]
    other_metrics: Mapping[str, float]
    layers: Sequence[LayerChange]
    """In the order of the parameters."""


OnStep = Callable[[ReplayedStep | ComparedStep], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The results of a replay."""

    which: ReplayRange
    tolerance: float
    steps: tuple[ReplayedStep, ...] = ()
    """The results under the run's own settings."""
    compared: tuple[ComparedStep, ...] = ()
    """The results under other settings."""

    @property
    def is_good(self) -> bool:
        """Whether all steps gave the run's numbers: to the bit, or within the tolerance where builds differ."""
        return all(step.is_good(self.tolerance) for step in self.steps)


def replay(
    run_dir: str | Path,
    steps: str | range | None = None,
    *,
    changes: Mapping[str, Any] | None = None,
    model: str | Path | None = None,
    tolerance: float = TOLERANCE,
    on_step: OnStep | None = None,
) -> Replayed:
    """Train steps of a run with `record=True` again, without sampling or servers, and compare.

    Without changes, it answers: are the weights after each step those of the run? With them: what would the same batch
    have done to the same weights under other settings?

    steps: "10:20" or range(10, 20) are the ten steps that were trained on the versions 10 to 19; None for all that can
        be reached. The replay begins at the newest checkpoint before them, or at the model itself.
    changes: settings of `algorithm`, `train` and `seed`, such as {"algorithm.preset": "gspo"}.
    model: where the model is that the run began from, if it was moved.
    tolerance: the largest difference of a tensor, as a share of its norm, where builds differ.
    on_step: called with each ReplayedStep or ComparedStep as it comes.

    Raises RecordingError for what is missing or does not belong together, ConfigError for settings.
    """
    run = RecordedRun(Path(run_dir), None if model is None else str(model))
    which = run.which(*_first_and_stop(steps))
    found = _compared_steps(run, which, nested(changes)) if changes else _replayed_steps(run, which)
    shown: list[Any] = []
    for step in found:
        if step.version >= which.first:  # earlier ones only lead there
            shown.append(step)
            if on_step:
                on_step(step)
    kinds = {"compared": tuple(shown)} if changes else {"steps": tuple(shown)}
    return Replayed(which=which, tolerance=tolerance, **kinds)


def nested(changes: Mapping[str, Any]) -> dict[str, Any]:
    """{"algorithm.preset": "gspo"} -> {"algorithm": {"preset": "gspo"}}."""
    found: dict[str, Any] = {}
    for name, value in changes.items():
        *sections, last = name.split(".")
        place = found
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{name} cannot be set beside a value for the setting that contains it")
        inner = nested(value) if isinstance(value, Mapping) else value
        if isinstance(inner, dict) and isinstance(place.get(last), dict):
            place[last] |= inner
        else:
            place[last] = inner
    return found


def _first_and_stop(steps: str | range | None) -> tuple[int | None, int | None]:
    if steps is None:
        return None, None
    if isinstance(steps, range):
        if steps.step != 1 or steps.start < 0:
            raise ConfigError(f"steps is {steps}; give a range without gaps, such as range(10, 20)")
        return steps.start, steps.stop
    first, colon, stop = steps.partition(":")
    try:
        start = int(first) if first else None
        end = (int(stop) if stop else None) if colon else int(first) + 1
    except ValueError:
        raise ConfigError(f"steps is {steps!r}; write FIRST:STOP, such as 10:20, or one step's number") from None
    return start, end


# The recording -----------------------------------------------------------------------------------------------------


class RecordedRun:
    """Raises RecordingError for a directory without recorded steps."""

    def __init__(self, run_dir: Path, model: str | None = None) -> None:
        """model: where the model is that the run began from, if it was moved."""
        self.run_dir, self._model = run_dir, model
        self._checkpoints, self._checked = run_dir / "checkpoints", set[str]()
        self.versions = recorded_versions(run_dir)
        if not self.versions:
            raise RecordingError(
                f"{run_dir} has no recorded steps (in {run_dir / DIRECTORY}): only a run with record=True keeps them"
            )

    def which(self, first: int | None = None, stop: int | None = None) -> ReplayRange:
        """The range of a replay. Raises RecordingError if a step or its beginning is missing; the error says what
        exists.

        first: default, the first step that can be reached. stop: default, the end of the recording.
        """
        saved, stop = saved_versions(self._checkpoints), self.versions[-1] + 1 if stop is None else stop
        if first is None:
            first = next((version for version in self.versions if self._base_of(version) is not None), self.versions[0])
        if first >= stop:
            raise ConfigError(f"the range {first}:{stop} contains no step")
        base = self._base_of(first)
        missing = first if base is None else min({*range(base, stop)} - {*self.versions}, default=None)
        if base is None or missing is not None:
            raise RecordingError(
                f"{self.run_dir} cannot replay step {missing}: the recorded steps are {ranges_text(self.versions)}, "
                f"the checkpoints {', '.join(map(str, sorted(saved))) or 'none'} (and version 0, the model itself); a "
                "replay begins at a checkpoint and needs every step from there on"
            )
        return ReplayRange(
            checkpoint=checkpoint_of(self._checkpoints, base) if base in saved else None,
            base=base,
            first=first,
            stop=stop,
        )

    def step(self, version: int) -> RecordedStep:
        return RecordedStep.read(step_file(self.run_dir / DIRECTORY, version))

    def settings_of(self, step: RecordedStep, scratch: Path) -> Config:
        """The settings that trained the step, on as many ranks as trained it. scratch: a directory for its files."""
        sections = {name: step.settings[name] for name in _MATTER if name in step.settings}
        model = self._model or str(step.settings["model"])
        if step.model_digest is not None and model not in self._checked:
            if (here := model_digest(model)) != step.model_digest:
                other = "is another model than the run began from (its digest differs)"
                what = "cannot be read here" if here is None else other
                raise RecordingError(f"{model} {what}; say where the run's model is (--model DIR)")
            self._checked.add(model)
        laid = laid_over(sections, {"train": {"num_ranks": step.num_ranks, "min_ranks": None}})
        given = {**laid, "model": model, "run_dir": scratch, "record": True, "log": {"events": None, "console": False}}
        builds = f"arl {step.build.arl} recorded the run, and its settings do not fit this arl {__version__}"
        return _validated(given, f"{builds}; replay it with that one")

    def _base_of(self, version: int) -> int | None:
        """The newest version from which recorded steps lead to `version`; None without one."""
        bases = {0, *saved_versions(self._checkpoints)}
        for base in range(version, -1, -1):
            if base in bases:
                return base
            if base - 1 not in self.versions:
                return None
        return None


def other_settings(config: Config, changes: Mapping[str, Any]) -> Config:
    """`config` with changes, merged section by section. Raises ConfigError for a change that no replay can make."""
    if not changes:
        return config
    for name in changes:
        if name not in _ABOUT_TRAINING:
            raise ConfigError(
                f"{name} has no effect in a replay, which samples nothing; change settings of "
                f"{', '.join(_ABOUT_TRAINING)}"
            )
    train = changes.get("train")
    if isinstance(train, Mapping) and (of_ranks := [name for name in _OF_RANKS if name in train]):
        raise ConfigError(f"train.{of_ranks[0]} has no effect here: both settings are compared on one rank")
    before = config.model_dump(mode="json", exclude={"log", "run_dir"})
    given = {**laid_over(before, changes), "run_dir": config.run_dir, "log": config.log}
    return _validated(given, "other settings")


def _validated(given: Mapping[str, Any], what: str) -> Config:
    try:
        return Config.model_validate(given)
    except ValidationError as error:
        raise ConfigError(f"{what}: {config_error(Config, error)}") from None


def fingerprint_of(config: Config) -> str:
    """Equal for settings that train alike, so that neighbouring steps can share a learner."""
    matter = config.model_dump(mode="json", include={*_MATTER, "model"}, fallback=str)
    return json.dumps(matter, sort_keys=True)


def _steps_with(
    run: RecordedRun, which: ReplayRange, start: Callable[[Config], Any]
) -> Iterator[tuple[RecordedStep, Any, Config]]:
    """The steps from `which.base` on, each with what trains it: `start` makes a learner's process, which trains
    neighbouring steps of the same settings. Where the run continued with other settings, the next one begins with what
    the last one saved."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="arl-replay-")))
        trainer, of_trainer = None, ""
        saved = which.checkpoint and which.checkpoint.absolute() / "engine"
        for version in range(which.base, which.stop):
            step = run.step(version)
            config = run.settings_of(step, scratch)
            if trainer is None or fingerprint_of(config) != of_trainer:
                if trainer is not None:
                    saved = scratch / f"engine-{version}"
                    trainer.save(saved).wait()
                    trainer.close()
                trainer, of_trainer = start(config), fingerprint_of(config)
                stack.callback(trainer.close)
                if saved is not None:
                    trainer.load(saved)
            yield step, trainer, config


# To the bit --------------------------------------------------------------------------------------------------------


def _replayed_steps(run: RecordedRun, which: ReplayRange) -> Iterator[ReplayedStep]:
    here = Build()
    for step, learner, config in _steps_with(run, which, _learner):
        trained = learner.train(learner.prepare_flat(step.batch))
        weights = trained.weights
        if step.version == which.base and which.checkpoint and step.before and weights.before != step.before:
            raise RecordingError(
                f"{which.checkpoint} holds other weights than step {which.base} of {run.run_dir} was trained on: "
                f"their digest is {weights.before}, not {step.before}"
            )
        differences = {name: _difference(weights.after.get(name), one) for name, one in step.after.items()}
        worst = max(differences, key=lambda name: differences[name], default="")
        yield ReplayedStep(
            version=step.version,
            digest=digest_of(weights.after),
            recorded_digest=digest_of(step.after) if step.after else "",
            difference=differences.get(worst, 0.0),
            tensor=worst if differences.get(worst) else "",
            loss=trained.metrics.get("loss", 0.0),
            recorded_loss=step.metrics.get("loss", 0.0),
            build=tuple(here.differences(step.build)),
            is_on_cpu=config.train.device.startswith("cpu"),
        )


def _learner(config: Config) -> RemoteLearner:
    return RemoteLearner(partial(host_learner, config), config.run_dir / "trainer.log", config.train.num_threads)


def _difference(here: TensorPrint | None, there: TensorPrint) -> float:
    if here is None:
        return float("inf")
    if here.bits == there.bits:
        return 0.0
    return max(abs(here.projection - there.projection), abs(here.norm - there.norm)) / max(there.norm, 1e-30)


# Under other settings ----------------------------------------------------------------------------------------------


def _compared_steps(run: RecordedRun, which: ReplayRange, changes: Mapping[str, Any]) -> Iterator[ComparedStep]:
    for step, learners, _ in _steps_with(run, which, lambda own: _LearnersProcess(own, other_settings(own, changes))):
        metrics, other_metrics, layers = learners.call("compare", step.batch)
        yield ComparedStep(version=step.version, metrics=metrics, other_metrics=other_metrics, layers=layers)


class _LearnersProcess(ObjectProcess):
    """ComparedLearners in a process of their own, on one rank each."""

    def __init__(self, own: Config, other: Config) -> None:
        if differing := set(own.algorithm.trained_models) ^ set(other.algorithm.trained_models):
            role = min(differing)
            what = role.replace("_", " ")
            raise ConfigError(f"algorithm.{role} cannot be added or left out: a {what} learns over the whole run")
        if own.train.lora != other.train.lora:
            raise ConfigError("train.lora cannot differ: the recorded weights belong to the run's own parameters")
        alone = {"num_ranks": 1, "min_ranks": None, "tensor_parallel": 1, "ray_address": None}
        log = own.log.model_copy(update={"events": EventsConfig(tokens="none")})
        configs = [c.model_copy(update={"train": c.train.model_copy(update=alone), "log": log}) for c in (own, other)]
        threads = str(own.train.num_threads)
        environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        build = partial(ComparedLearners, *configs)
        super().__init__("the process of the replay", build, own.run_dir / "replay.log", environment)

    def load(self, directory: Path) -> None:
        self.call("load", directory)

    def save(self, directory: Path) -> _LearnersProcess:
        self.call("save", directory)
        return self

    def wait(self) -> None:
        """`save` has waited."""


class ComparedLearners:
    """Two learners: one trains as the run did, the other each step from the same weights under other settings."""

    def __init__(self, own: Config, other: Config) -> None:
        from arl.engine.fsdp.train_engine import WatchedEngine

        def load(model: str | Path, settings: TrainConfig, *, seed: int, head: Head) -> WatchedEngine:
            return WatchedEngine(str(model), settings, seed, head)

        self._own, self._other = (load_learner(config, load) for config in (own, other))

    def load(self, directory: Path) -> None:
        self._own.load(directory)

    def save(self, directory: Path) -> None:
        self._own.save(directory).wait()

    def compare(self, batch: FlatBatch) -> tuple[Mapping[str, float], Mapping[str, float], list[LayerChange]]:
        """The metrics of both, and how the policy's layers change."""
        engines, others = (_watched(learner) for learner in (self._own, self._other))
        for role, engine in engines.items():
            others[role].take_state(engine)
        metrics, other_metrics = (
            learner.train(learner.prepare(*batch.groups())).metrics for learner in (self._own, self._other)
        )
        return metrics, other_metrics, _layers(self._own, self._other)

    def close(self) -> None:
        try:
            self._own.close()
        finally:
            self._other.close()


def _watched(learner: Learner) -> dict[str, WatchedEngine]:
    """Role -> its engine."""
    return {role: cast("WatchedEngine", engine) for role, engine in learner.engines.items()}


def _layers(own: Learner, other: Learner) -> list[LayerChange]:
    """Of the last step's gradients and updates."""
    mine, theirs = (_watched(learner)["policy"] for learner in (own, other))
    sums: dict[str, np.ndarray] = {}
    for name in mine.gradients:
        pairs = ((mine.gradients[name], theirs.gradients[name]), (mine.updates[name], theirs.updates[name]))
        found = re.search(r"layers\.\d+", name)
        layer = found[0] if found else name.removesuffix(".weight").rpartition(".")[2]
        products = [[float((x.double() * y.double()).sum()) for x, y in ((a, a), (b, b), (a, b))] for a, b in pairs]
        sums[layer] = sums.get(layer, np.zeros((2, 3))) + np.array(products)
    return [
        LayerChange(
            layer=layer,
            gradient=math.sqrt(gradient[0]),
            other_gradient=math.sqrt(gradient[1]),
            gradient_cosine=_cosine(gradient),
            update=math.sqrt(update[0]),
            other_update=math.sqrt(update[1]),
            update_cosine=_cosine(update),
        )
        for layer, (gradient, update) in sums.items()
    ]


def _cosine(products: np.ndarray) -> float:
    a, b, both = products.tolist()
    return both / math.sqrt(a * b) if a and b else math.nan
