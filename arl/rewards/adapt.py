"""as_reward turns a user's function into a reward that workflows await, from_trl one that was written for TRL.
WeightedReward adds up several rewards, and try_rewards tries rewards before a run."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Generic, ParamSpec, cast

from arl.api.errors import ConfigError, RewardError, RewardTimeoutError, users_frames
from arl.api.types import Example
from arl.api.workflow import Shared
from arl.rewards.pool import RewardPool, is_typed_in
from arl.rewards.score import (
    ResultT,
    Reward,
    Score,
    check_example,
    check_limits,
    checked,
    is_finite,
    name_of,
    ran_too_long,
    reported,
    reports,
    score_of,
)
from arl.rewards.threads import ThreadReward, contained, together

log = logging.getLogger(__name__)

P = ParamSpec("P")
_PATIENCE_S = 60.0
"""How long a made-up answer is scored before a run, by a reward without a time limit of its own."""

RewardLike = Callable[[str, Example], float | Score | Awaitable[float | Score]]
"""A function of answer and example, sync or async, or a ready-made reward."""


class AsyncReward(Generic[P, ResultT]):
    """Awaits a coroutine function for at most timeout_s seconds. Raises RewardTimeoutError and RewardError."""

    def __init__(self, function: Callable[P, Awaitable[ResultT]], *, timeout_s: float = 30.0) -> None:
        check_limits(timeout_s)
        self._function = function
        self._name = name_of(function)
        self._timeout_s = timeout_s

    @reported
    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                result = await self._function(*args, **kwargs)
        except (Exception, SystemExit) as error:
            if limit.expired():
                raise ran_too_long(self._name, self._timeout_s) from error
            raise RewardError(f"reward function {self._name} failed: {error!r}") from error
        return checked(result, self._name)


class InlineReward(Generic[P, ResultT]):
    """Calls a function on the event loop and blocks it meanwhile: for microseconds of work. Raises RewardError."""

    def __init__(self, function: Callable[P, ResultT]) -> None:
        self._function = function
        self._name = name_of(function)

    @reported
    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        try:
            result = self._function(*args, **kwargs)
        except (Exception, SystemExit) as error:
            raise RewardError(f"reward function {self._name} failed: {error!r}") from error
        return checked(result, self._name)


class WorkflowReward(Shared):
    """The result of as_reward: opened with the workflow, awaited with an answer and its example; returns a Score."""

    def __init__(self, reward: Reward, name: str) -> None:
        super().__init__()
        self._reward = reward
        self.name = name

    def check_example(self, data: Example) -> None:
        check_example(self._reward, data)

    async def __call__(self, answer: str, data: Example) -> Score:
        """Raises RewardError, RewardTimeoutError, and the errors of a user's own reward class."""
        return await (self._ask(answer, data) if reports(self._reward) else self._ask_users_own(answer, data))

    async def _ask(self, answer: str, data: Example) -> Score:
        return score_of(await self._reward(answer, data), f"reward {self.name}")

    _ask_users_own = reported(_ask)

    async def _open(self, opened: AsyncExitStack) -> None:
        if isinstance(self._reward, Shared):
            await opened.enter_async_context(self._reward)


def as_reward(reward: RewardLike, *, timeout_s: float | None = None, workers: int | None = None) -> WorkflowReward:
    """A reward for a workflow: enter it in `__aenter__`, leave it in `__aexit__`, and await it for each episode.

    reward: a function `(answer, data)`, or an object with an async `__call__` of these arguments. A plain function runs
        in a RewardPool, so it must be importable; one typed into a notebook in a ThreadReward, with a warning; a
        coroutine function in an AsyncReward. arl's own rewards (a RewardPool, a judge) stay open until everybody who
        entered them has left. An object of another class is neither opened nor closed.
    timeout_s, workers: of the RewardPool, ThreadReward or AsyncReward made here; unset, 30 s and 2 workers.

    Raises ConfigError for anything else, and for limits that the reward does not take; RewardError for a function that
    no worker can import.
    """
    if isinstance(reward, type) or not callable(reward):
        raise ConfigError(f"reward is {reward!r}; give a function (answer, data), or an instance of a reward")
    check_signature(reward)
    if is_ready(reward):
        if timeout_s is not None or workers is not None:
            raise ConfigError(f"{name_of(reward)} has its own limits; set timeout_s and workers where it is made")
        return reward if isinstance(reward, WorkflowReward) else WorkflowReward(cast("Reward", reward), name_of(reward))
    return WorkflowReward(_made(reward, 30.0 if timeout_s is None else timeout_s, workers), name_of(reward))


def is_ready(reward: object) -> bool:
    """Whether the reward can be awaited as it is, without a RewardPool or AsyncReward."""
    return not inspect.isroutine(reward) and inspect.iscoroutinefunction(type(reward).__call__)


def _made(function: Any, timeout_s: float, workers: int | None) -> Reward:
    if not inspect.iscoroutinefunction(function):
        num_workers = 2 if workers is None else workers
        if is_typed_in(function):
            log.warning(
                "reward function %s was typed in interactively, so no worker process can import it: it runs in threads "
                "of this process, which can't be killed; write it to a module (in a notebook by %%%%writefile) and "
                "import it from there, or pass a ThreadReward",
                name_of(function),
            )
            return ThreadReward(function, timeout_s=timeout_s, workers=num_workers)
        return RewardPool(function, timeout_s=timeout_s, workers=num_workers)
    if workers is not None:
        raise ConfigError(
            f"workers is {workers}, but {name_of(function)} is async and uses no worker processes; leave it out"
        )
    return AsyncReward(function, timeout_s=timeout_s)


def check_signature(function: Any) -> None:
    """Raise ConfigError unless the function can be called with an answer and its example."""
    if takes := {"completions", "completion_ids"} & _needed(function):
        raise ConfigError(
            f"reward {name_of(function)} takes {min(takes)}, as TRL calls rewards, and arl calls (answer, data); give "
            "arl.rewards.from_trl(...) of it"
        )
    try:
        inspect.signature(function).bind("", {})
    except TypeError as error:
        raise ConfigError(
            f"reward {name_of(function)} cannot be called with (answer, data): {error}; if it makes a reward, call it"
        ) from None
    except ValueError:  # a C function without a signature
        return


def _needed(function: Callable[..., Any]) -> set[str]:
    """The names of parameters without a default."""
    try:
        return {name for name, one in inspect.signature(function).parameters.items() if one.default is one.empty}
    except ValueError:  # a C function without a signature
        return set()


class WeightedReward(Shared):
    """Runs several rewards at once and adds them up. The Score has each as a named part, before weighting.

        reward = WeightedReward({"correct": (1.0, math_reward()), "format": (0.1, Tags("think", "answer"))})

    parts: name -> (weight, reward); a reward is anything that as_reward takes. A negative weight makes a penalty. A
    part of weight 0 is only logged, among the episode's metrics; a part's own parts and metrics, as `NAME/...`.

    If a part fails, the sum fails: RewardTimeoutError or RewardError, with the part's name in front.
    """

    def __init__(self, parts: Mapping[str, tuple[float, RewardLike]]) -> None:
        super().__init__()
        if not parts:
            raise ConfigError("WeightedReward has no parts; give name: (weight, reward) for each")
        for name, part in parts.items():
            if not isinstance(part, tuple) or len(part) != 2 or not is_finite(part[0]):
                raise ConfigError(f"the part {name!r} is {part!r}; it must be (weight, reward) with a finite weight")
        self._weights = {name: float(weight) for name, (weight, _) in parts.items()}
        self._rewards = {name: as_reward(reward) for name, (_, reward) in parts.items()}

    def check_example(self, data: Example) -> None:
        for reward in self._rewards.values():
            reward.check_example(data)

    async def _open(self, opened: AsyncExitStack) -> None:
        for reward in self._rewards.values():
            await opened.enter_async_context(reward)

    @reported
    async def __call__(self, answer: str, data: Example) -> Score:
        given = await together(_part(name, reward, answer, data) for name, reward in self._rewards.items())
        scores = dict(zip(self._rewards, given, strict=True))
        values = {name: score.value for name, score in scores.items()}
        metrics = {name: value for name, value in values.items() if self._weights[name] == 0.0}
        for name, score in scores.items():
            metrics |= {f"{name}/{inner}": number for inner, number in {**score.parts, **score.metrics}.items()}
        return Score(
            value=math.fsum(self._weights[name] * value for name, value in values.items()),
            parts={name: value for name, value in values.items() if self._weights[name] != 0.0},
            metrics=metrics,
        )


async def _part(name: str, reward: WorkflowReward, answer: str, data: Example) -> Score:
    try:
        return await reward(answer, data)
    except RewardTimeoutError as error:
        raise RewardTimeoutError(f"the part {name!r} of the reward: {error}") from error
    except (Exception, SystemExit) as error:
        said = str(error) if isinstance(error, RewardError) else repr(error)
        raise RewardError(f"the part {name!r} of the reward: {said}") from error


def from_trl(
    function: Callable[..., Any], *, conversational: bool | None = None, tokenizer: Any = None, timeout_s: float = 30.0
) -> RewardLike:
    """A reward from one of TRL's trainers: it gets lists of one prompt, one completion and one value of each column.

    conversational: whether the completion is a list of one message; unset, if the row's prompt is one of messages.
    tokenizer: makes `completion_ids` of the answer's text. timeout_s: of an async function. What the function gives to
    `log_metric` is a metric. None or NaN, TRL's "not applicable", counts as 0, as in TRL's sum, with the metric
    not_applicable. Raises ConfigError for a function that needs the trainer's state, or ids without a tokenizer.
    """
    reward: Any = TrlReward(function, conversational, tokenizer)
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    return AsyncReward(reward, timeout_s=timeout_s) if is_async else reward


class TrlReward:
    """The result of from_trl. It has the name of the function, which loggers and workers see."""

    def __init__(self, function: Callable[..., Any], conversational: bool | None, tokenizer: Any) -> None:
        self._function, self._conversational, self._tokenizer = function, conversational, tokenizer
        self.__qualname__, self.__module__ = name_of(function), function.__module__
        lacking = {"trainer_state", "environments"} | ({"completion_ids"} if tokenizer is None else set())
        if takes := lacking & _needed(function):
            advice = "; give from_trl the tokenizer" if "completion_ids" in takes else ""
            raise ConfigError(f"reward {self.__qualname__} takes {min(takes)}, which arl does not have{advice}")

    def __call__(self, answer: str, data: Example) -> Any:
        """A Score, or a coroutine of one."""
        prompt = next((data[name] for name in ("prompt", "messages", "question") if data.get(name) is not None), None)
        is_chat = not isinstance(prompt, str) if self._conversational is None else self._conversational
        said = [{"role": "assistant", "content": answer}] if is_chat else answer
        metrics: dict[str, float] = {}
        given: dict[str, Any] = {name: [value] for name, value in data.items() if name not in ("prompt", "completion")}
        given |= {"prompts": [prompt], "completions": [said]}
        given |= {"log_metric": metrics.__setitem__, "log_extra": lambda *_: None}
        if self._tokenizer is not None:
            given["completion_ids"] = [self._tokenizer.encode(answer, add_special_tokens=False)]
        parameters = inspect.signature(self._function).parameters
        if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            given = {name: value for name, value in given.items() if name in parameters}

        result = self._function(**given)
        return self._later(result, metrics) if inspect.isawaitable(result) else self._score(result, metrics)

    async def _later(self, result: Awaitable[Any], metrics: dict[str, float]) -> Score:
        return self._score(await result, metrics)

    def _score(self, result: Iterable[float | None], metrics: dict[str, float]) -> Score:
        values = [math.nan if one is None else float(one) for one in result]
        if len(values) != 1:
            raise RewardError(f"reward {self.__qualname__} returned {len(values)} numbers for one completion")
        is_none = math.isnan(values[0])
        return Score(0.0 if is_none else values[0], metrics=metrics | ({"not_applicable": 1.0} if is_none else {}))


async def try_rewards(
    rewards: Iterable[WorkflowReward], examples: Sequence[Example], *, gets_text: bool, is_open: bool
) -> None:
    """Before a run, call each user's reward with made-up answers to an example; if all fail, to the next examples, too.

    Raises RewardError, with the user's line, if every call failed. A reward that fails for some answers or takes too
    long gets a warning. arl's own are not called: check_example says what they need, and judges cost money. gets_text:
    whether answers are what the model writes; else all failures are warnings. is_open: whether the objects are open
    that users open themselves; else these are not called either.
    """
    for reward in rewards:
        given, tried = reward._reward, list[tuple[str, Score | BaseException]]()
        if isinstance(given, WeightedReward):
            await try_rewards(given._rewards.values(), examples, gets_text=gets_text, is_open=is_open)
        is_opened_here = isinstance(given, Shared) or _is_arls(given)
        if _is_arls(getattr(given, "_function", given)) or not (is_open or is_opened_here):
            continue
        async with reward:
            for data in examples:
                answers = _made_up(data)
                calls = (asyncio.wait_for(contained(reward(answer, data)), _PATIENCE_S) for answer in answers)
                tried += zip(answers, await asyncio.gather(*calls, return_exceptions=True), strict=True)
                if any(isinstance(result, Score | TimeoutError) for _, result in tried):
                    break
        if failures := [(answer, error) for answer, error in tried if isinstance(error, BaseException)]:
            answer, error = failures[0]
            frames = users_frames(error.__cause__ or error)
            place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
            said = f"reward {getattr(given, '_name', reward.name)} failed for {len(failures)} of {len(tried)} made-up "
            said += f"answers, such as {answer!r:.80}{place}: {error}"
            if gets_text and len(failures) == len(tried) and not any(isinstance(e, TimeoutError) for _, e in failures):
                raise RewardError(f"{said}; for an answer that it cannot read it should return 0.0") from error
            log.warning("%s; an episode with such an answer fails, and is not trained on", said)


def _is_arls(code: object) -> bool:
    return str(getattr(code, "__module__", "")).startswith("arl.")


def _made_up(data: Example) -> list[str]:
    """The reference alone, in the usual tags, and in JSON; and an empty answer."""
    known = next((data[name] for name in ("answer", "solution", "ground_truth") if data.get(name) is not None), 0)
    tagged = f"<think>\nIt is {known}.\n</think>\n\n<answer>\\boxed{{{known}}}</answer>\n#### {known}"
    return [str(known), tagged, json.dumps({"answer": known}, default=str), ""]
