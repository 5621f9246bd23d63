"""`arl.replay`: the steps of a recorded run again, or under other settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arl.api.errors import ConfigError
from arl.engine.model_files import load_tokenizer
from arl.replaying.again import TOLERANCE, ReplayedStep, replay_again
from arl.replaying.otherwise import ComparedStep, Otherwise, replay_otherwise
from arl.replaying.recorded_run import RecordedRun, ReplayRange
from arl.rewards.adapt import RewardLike
from arl.training.kept_tokens import named

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
    reward: RewardLike | None = None,
    follow: bool = False,
    model: str | Path | None = None,
    tolerance: float = TOLERANCE,
    on_step: OnStep | None = None,
) -> Replayed:
    """Train steps of a run with `record=True` again, without sampling or servers, and compare.

    Without changes and reward, it answers: are the weights after each step those of the run? With them: what would the
    same batch have done to the same weights under other settings?

    steps: "10:20" or range(10, 20) are the ten steps that were trained on the versions 10 to 19; None for all that can
        be reached. The replay begins at the newest checkpoint before them, or at the model itself.
    changes: settings of `algorithm`, `train` and `seed`, such as {"algorithm.preset": "gspo"}.
    reward: scores each trajectory's last turn again, from its text and the recorded example.
    follow: the other settings continue from their own weights, instead of beginning each step with the run's.
    model: where the model is that the run began from, if it was moved.
    tolerance: the largest difference of a tensor, as a share of its norm, where builds differ.
    on_step: called with each ReplayedStep or ComparedStep as it comes.

    Raises RecordingError for what is missing or does not belong together, ConfigError for settings.
    """
    run = RecordedRun(Path(run_dir), None if model is None else str(model))
    which = run.which(*_first_and_stop(steps))
    if not changes and reward is None:
        if follow:
            raise ConfigError("follow needs other settings: give changes or a reward")
        again = _all(replay_again(run, which), on_step, which.first)
        return Replayed(which=which, tolerance=tolerance, steps=again)
    what = Otherwise(changes=nested(changes or {}), reward=reward, follow=follow)
    tokenizer = load_tokenizer(str(model or run.step(which.base).settings["model"]))
    compared = replay_otherwise(run, which, what, tokenizer, lambda group: [name for name, _, _ in named(group)])
    return Replayed(which=which, tolerance=tolerance, compared=_all(compared, on_step, which.first))


def _all(steps: Iterator[Any], on_step: OnStep | None, first: int) -> tuple[Any, ...]:
    """The steps from `first` on; earlier ones only lead there."""
    found: list[Any] = []
    for step in steps:
        if step.version >= first:
            found.append(step)
            if on_step:
                on_step(step)
    return tuple(found)


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
