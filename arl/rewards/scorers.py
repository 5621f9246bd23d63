"""reasoning-gym's scorers, in worker processes that no answer can hang or escape.

The second half keeps answers from escaping, those to math_reward too: it limits the workers' memory, and evaluates no
Python in a model's text.
"""

from __future__ import annotations

import ast
import importlib.util
import random
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arl.api.errors import DatasetError, RewardError
from arl.api.types import Example
from arl.api.version import install_command
from arl.rewards.pool import RewardPool
from arl.rewards.score import Score, shown

Datasets = str | Sequence[str] | Mapping[str, Mapping[str, Any]]
"""A dataset of reasoning-gym, several names, or name -> parameters, such as {"chain_sum": {"max_terms": 3}}."""

NOTHING_COUNTED: dict[str, float] = dict.fromkeys(("killed", "unreadable", "unreadable_reference"), 0.0)
"""The metrics of a score: the answer ended its worker; the scorer raises for it; the scorer cannot read the example."""

_MOST_DRAWN = 8
"""Items drawn for each requested example, before giving up on finding enough different ones."""


def reasoning_gym_examples(
    datasets: Datasets, size: int, *, seed: int = 0, excluding: Sequence[Example] = ()
) -> list[Example]:
    """`size` examples with different questions, from all the datasets in turn. Equal seeds give equal examples.

        held_out = reasoning_gym_examples("chain_sum", 200, seed=1)
        training = reasoning_gym_examples("chain_sum", 4000, excluding=held_out)

    Each has `question`, `answer` and `metadata`. excluding: examples whose questions are left out. Raises DatasetError
    for unknown names and parameters, and if there are too few different questions.
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
    streams: list[Iterator[Any]] = []
    for name, given in parameters.items():  # reasoning-gym draws item i from seed + i, and takes no seed above 2**32
        start = random.Random(f"{seed} {name}").randrange(2**31)
        streams.append(iter(_dataset(name, {**given, "seed": start, "size": each})))
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
    """The score, 0 to 1, that the scorer of the example's dataset gives the answer, in a worker process.

    The example names its dataset in `metadata["source_dataset"]`. The answer should be the bare answer: most scorers
    compare the whole text. datasets: the parameters that the examples were made with, for scorers that need them.

    An answer that takes longer than timeout_s or kills its worker scores 0.0, with `killed` 1.0 in the metrics. If the
    scorer raises, the answer scores 0.0, with `unreadable` 1.0, and `unreadable_reference` 1.0 if it raises for the
    example's own answer, too. Scorers that evaluate answers as Python evaluate only
    arithmetic and mathematics here. Raises RewardError if reasoning-gym is not installed, or did not make the example.
    """
    require("reasoning_gym", "reasoning-gym", "rewards")
    parameters = {name: dict(given) for name, given in _parameters(datasets).items()}
    return RewardPool(
        GymScore(parameters=parameters),
        timeout_s=timeout_s,
        workers=workers,
        prepare=_prepare_gym,
        if_killed=Score(0.0, metrics=NOTHING_COUNTED | {"killed": 1.0}),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GymScore:
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])

    def check_example(self, data: Example) -> None:
        if (data.get("metadata") or {}).get("source_dataset") is None:
            raise RewardError("the example has no metadata['source_dataset'], so reasoning-gym did not make it")

    def __call__(self, answer: str, data: Example) -> Score:
        self.check_example(data)
        scorer = _scorer(data["metadata"]["source_dataset"], self.parameters)
        try:
            return Score(float(scorer.score_answer(answer, data)), metrics=NOTHING_COUNTED)
        except Exception:  # noqa: BLE001 - some scorers raise for answers of an unexpected form
            lost = 1.0
            with suppress(Exception):  # which they may raise for the example's own answer, too
                scorer.score_answer(data["answer"], data)
                lost = 0.0
            return Score(0.0, metrics=NOTHING_COUNTED | {"unreadable": 1.0, "unreadable_reference": lost})


def _prepare_gym() -> None:
    """Load slow modules in a new worker, and keep scorers from evaluating an answer as arbitrary Python."""
    import reasoning_gym  # noqa: F401

    guard_evaluation("reasoning_gym")
    limit_memory()


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


def _dataset(name: str, parameters: Mapping[str, Any]) -> Any:
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(name, **parameters)
    except Exception as error:
        raise DatasetError(
            f"reasoning-gym makes no dataset {name!r} with {shown(dict(parameters))}: {error}"
        ) from error


# Precautions that a worker takes before it scores text that a model wrote.

Names = dict[str, Any]

MEMORY_BYTES = 2**30
"""The memory that scoring may use, in addition to the worker's memory when it is ready."""

_ARITHMETIC = (
    *(ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.BinOp, ast.UnaryOp, ast.Compare),
    *(ast.operator, ast.unaryop, ast.cmpop, ast.expr_context),
)
_MATHEMATICS = (*_ARITHMETIC, ast.Call, ast.Name, ast.keyword)
_FUNCTIONS = frozenset(("sqrt", "cbrt", "root", "abs", "pow", "round"))
"""Allowed names of sympy and Python that are not classes of sympy."""
_NAMING = frozenset(("Symbol", "Integer", "Float", "Rational", "Function"))
"""Calls that sympy's parser writes around names and numbers. It parses a string in any other call again: none may have
one."""

_OWN_IMPORT = ("from sympy import *", b"from sympy import *")
"""What sympy's parser executes for the names that an expression may use."""


def require(module: str, package: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise RewardError(f"this reward needs {package}: {install_command(extra)}")


def limit_memory() -> None:
    """Let allocations beyond MEMORY_BYTES fail, so that a huge power raises MemoryError instead of using all memory."""
    try:
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = now + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def guard_evaluation(*packages: str) -> None:
    """Let these packages, and sympy's parser, evaluate nothing but literals, arithmetic and mathematics from now on.

    Scorers pass answers to both, and both evaluate them as Python. An audit hook (PEP 578) sees whatever they compile,
    and stays for the rest of the process.
    """
    from sympy.parsing.sympy_parser import parse_expr

    def check(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "compile":
            return
        caller = sys._getframe(1)  # which compiles, or evaluates a text
        module: str = caller.f_globals.get("__name__", "")
        if module == "sympy.parsing.sympy_parser" and arguments[0] not in _OWN_IMPORT:
            names = {**caller.f_locals.get("global_dict", {}), **caller.f_locals.get("local_dict", {})}
            _check_mathematics(_tree(arguments[0]), names)
        elif module.partition(".")[0] in packages:
            _check_arithmetic(_tree(arguments[0]))

    sys.addaudithook(check)
    with suppress(ValueError):
        parse_expr("abs.__name__")
        raise RewardError("this Python does not say what sympy's parser evaluates, so no answer can be scored safely")


def _tree(source: ast.AST | str | bytes) -> ast.AST:
    return source if isinstance(source, ast.AST) else ast.parse(source.strip(), mode="eval")


def _check_arithmetic(tree: ast.AST) -> None:
    for node in ast.walk(tree):
        if not isinstance(node, _ARITHMETIC):
            raise ValueError(f"{type(node).__name__} is neither a literal nor arithmetic")


def _check_mathematics(tree: ast.AST, names: Names) -> None:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    named = {id(argument) for call in calls if _name(call.func) in _NAMING for argument in call.args}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            is_allowed = node.id in _FUNCTIONS or _is_of_sympy(names.get(node.id))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            is_allowed = id(node) in named
        else:
            is_allowed = isinstance(node, _MATHEMATICS)
        if not is_allowed:
            raise ValueError(f"{_name(node) or type(node).__name__} is not mathematics")


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _is_of_sympy(known: object) -> bool:
    from sympy import Basic

    return isinstance(known, Basic) or (isinstance(known, type) and issubclass(known, Basic))
