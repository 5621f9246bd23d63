"""`arl.replay`: the recorded steps of a run again, to the bit or under other settings.

checkpoint, or model --> learner --step--> weights --compared with the recording--> ReplayedStep
                            ^    batch --> the same weights under other settings --> ComparedStep

Only functions that run in the learners' process import torch.
"""

from __future__ import annotations

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

from arl.api.errors import ConfigError, RecordingError
from arl.api.settings.engines import TrainConfig
from arl.api.settings.run import Config, EventsConfig
from arl.api.train_engine import Head, TensorPrint, digest_of
from arl.run.learner import host_learner, load_learner
from arl.run.replay.recorded_run import RecordedRun, ReplayRange, fingerprint_of, other_settings
from arl.runtime.processes.actor import ObjectProcess
from arl.training.batch_codec import FlatBatch
from arl.training.learner_process import RemoteLearner
from arl.training.recording import Build, RecordedStep

if TYPE_CHECKING:
    from arl.engine.fsdp.watched_engine import WatchedEngine
    from arl.training.learner import Learner

TOLERANCE = 1e-3
"""The largest difference of a tensor, as a share of its norm, that rounding on other hardware may make."""


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
        self._own, self._other = (load_learner(config, _watched_engine) for config in (own, other))

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


def _watched_engine(model: str | Path, settings: TrainConfig, *, seed: int, head: Head) -> WatchedEngine:
    from arl.engine.fsdp.watched_engine import WatchedEngine

    return WatchedEngine(str(model), settings, seed, head)


def _watched(learner: Learner) -> dict[str, WatchedEngine]:
    """Role -> its engine."""
    return {role: cast("WatchedEngine", engine) for role, engine in learner.engines.by_role.items()}


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
