"""reasoning-gym: examples that it makes up, and its own scorers for the answers to them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from arl.api.errors import DatasetError, RewardError
from arl.api.types import Example
from arl.rewards.pool import RewardPool
from arl.rewards.score import Score, shown
from arl.rewards.untrusted import guard_evaluation, limit_memory, require

Datasets = str | Sequence[str] | Mapping[str, Mapping[str, Any]]
"""Names of reasoning-gym's datasets; or name -> parameters, such as {"chain_sum": {"max_terms": 3}}."""

_MOST_DRAWN = 8
"""Items drawn for each example asked for, before there are not enough different ones."""


def reasoning_gym_examples(
    datasets: Datasets, size: int, *, seed: int = 0, excluding: Sequence[Example] = ()
) -> list[Example]:
    """`size` examples with different questions, from all the datasets in turn; the same ones for the same seed.

        held_out = reasoning_gym_examples("chain_sum", 200, seed=1)
        training = reasoning_gym_examples("chain_sum", 4000, excluding=held_out)

    Each has `question`, `answer` and `metadata`. excluding: examples whose questions none of the new ones may have.
    Raises DatasetError for unknown names and parameters, and where there are not as many different questions.
    """
    try:
        require("reasoning_gym", "reasoning-gym", "rewards")
    except RewardError as error:
        raise DatasetError(str(error)) from None
    parameters = _parameters(datasets)
    if size < 1 or not parameters:
        raise DatasetError(f"size is {size} and the datasets are {shown(datasets)}; give at least one of each")
    seen, found = {example["question"] for example in excluding}, list[Example]()
    each = _MOST_DRAWN * (-(-size // len(parameters)) + len(seen))
    streams = [iter(_dataset(name, {**given, **_place(seed, name, each)})) for name, given in parameters.items()]
    for entry in (entry for row in zip(*streams, strict=True) for entry in row):
        if entry["question"] not in seen:
            seen.add(entry["question"])
            found.append(entry)
            if len(found) == size:
                return found
    raise DatasetError(
        f"{', '.join(parameters)} made {len(found)} different questions that are not excluded, of {size}; ask for "
        "fewer, or give parameters that allow more"
    )


def reasoning_gym_reward(
    datasets: Datasets = (), *, timeout_s: float = 10.0, workers: int = 2
) -> RewardPool[[str, Example], Score]:
    """What the scorer of the example's own dataset gives for the answer, 0 to 1, in a worker process.

    The example says which one: `metadata["source_dataset"]`. The answer should be the bare answer: most scorers compare
    all of the text. datasets: the parameters that the examples were made with, for scorers that look at them.

    An answer that takes longer than timeout_s or kills its worker scores 0.0, with `killed` 1.0 in the metrics; so does
    one that the scorer raises for, with `unreadable` 1.0. Some scorers evaluate answers as Python: here they get to see
    arithmetic and mathematics alone, and no other code runs.
    Raises RewardError where reasoning-gym is not installed or the example is not one of its.
    """
    require("reasoning_gym", "reasoning-gym", "rewards")
    parameters = {name: dict(given) for name, given in _parameters(datasets).items()}
    return RewardPool(
        GymScore(parameters=parameters),
        timeout_s=timeout_s,
        workers=workers,
        prepare=prepare,
        if_killed=Score(0.0, metrics={"killed": 1.0, "unreadable": 0.0}),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GymScore:
    """What the workers of reasoning_gym_reward do; without time limit."""

    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])

    def __call__(self, answer: str, data: Example) -> Score:
        name = (data.get("metadata") or {}).get("source_dataset")
        if name is None:
            raise RewardError("the example has no metadata['source_dataset'], so it is none of reasoning-gym's")
        scorer = _scorer(name, self.parameters)
        try:
            score, failed = scorer.score_answer(answer, data), 0.0
        except Exception as error:  # noqa: BLE001 - some raise for answers of another form than theirs
            _check_example(scorer, name, data, error)
            score, failed = 0.0, 1.0
        return Score(float(score), metrics={"killed": 0.0, "unreadable": failed})


def prepare() -> None:
    """In a new worker: load what is slow to load, and see to it that no scorer evaluates an answer as any Python."""
    import reasoning_gym  # noqa: F401

    guard_evaluation("reasoning_gym")
    limit_memory()


def _check_example(scorer: Any, name: str, data: Example, error: Exception) -> None:
    """Raise RewardError where it is the example's fault that its scorer raised, and not the answer's."""
    try:
        scorer.score_answer(data["answer"], data)
    except Exception:  # noqa: BLE001
        raise RewardError(
            f"the scorer of {name} cannot score the example's own answer either: {type(error).__name__}: {error}"
        ) from error


_scorers: dict[str, Any] = {}


def _scorer(name: str, parameters: Mapping[str, Mapping[str, Any]]) -> Any:
    if name not in _scorers:
        try:
            _scorers[name] = _dataset(name, parameters.get(name, {}))
        except DatasetError as error:
            raise RewardError(str(error)) from None
    return _scorers[name]


def _parameters(datasets: Datasets) -> Mapping[str, Mapping[str, Any]]:
    if isinstance(datasets, Mapping):
        return datasets
    return {name: {} for name in ((datasets,) if isinstance(datasets, str) else datasets)}


def _place(seed: int, name: str, size: int) -> dict[str, int]:
    """Where a dataset's stream begins. reasoning-gym draws item i from seed + i, and knows no seed above 2**32."""
    return {"seed": random.Random(f"{seed} {name}").randrange(2**31), "size": size}


def _dataset(name: str, parameters: Mapping[str, Any]) -> Any:
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(name, **parameters)
    except Exception as error:
        raise DatasetError(
            f"reasoning-gym makes no dataset {name!r} with {shown(dict(parameters))}: {error}"
        ) from error
