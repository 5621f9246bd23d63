"""TaskWorkflows: the workflows of a run's tasks, entered and left as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import NoReturn, Self

from arl.api.engine import Sampler
from arl.api.errors import left
from arl.api.types import Example, Trajectory
from arl.api.workflow import RolloutWorkflow


class TaskWorkflows(RolloutWorkflow):
    """Holds the workflows of several tasks. A workflow that several tasks share is entered once."""

    def __init__(self, workflows: Mapping[str, RolloutWorkflow]) -> None:
        """workflows: by the names of their tasks."""
        self._workflows = dict(workflows)
        self._entered: AsyncExitStack | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._workflows)

    def of(self, task: str) -> RolloutWorkflow:
        return self._workflows[task]

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for workflow in {id(one): one for one in self._workflows.values()}.values():
                await stack.enter_async_context(workflow)
            self._entered = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._entered is not None:
            await left(self._entered.aclose(), exc[1] if isinstance(exc[1], BaseException) else None)

    @property
    def declared_roles(self) -> frozenset[str] | None:
        declared = [workflow.declared_roles for workflow in self._workflows.values()]
        known = [roles for roles in declared if roles is not None]
        return frozenset[str]().union(*known) if len(known) == len(declared) else None

    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory | Sequence[Trajectory] | None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RuntimeError("an episode belongs to one task; run it with `of`")
