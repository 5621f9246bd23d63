"""An episode as an OpenEnv environment sees it: its steps, their rewards, and the calls of its MCP tools."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

from arl.api.errors import ArlError, EnvironmentFailedError, ToolError
from arl.workflow.openenv.openenv_client import EnvSession, StepResult
from arl.workflow.tool_results import text_of
from arl.workflow.tools import Tool

ResultT = TypeVar("ResultT")


@dataclass(kw_only=True, eq=False)
class EnvPlay:
    """An episode as the environment sees it: its steps and their rewards."""

    session: EnvSession
    timeout_s: float
    rewards: list[float] = field(default_factory=list[float])
    num_steps: int = 0
    num_refused: int = 0
    done: bool = False

    async def step(self, action: Any) -> StepResult:
        """Raises ToolError if the environment refuses the action."""
        result = await self.answered("step", self.session.step(action))
        self.num_steps += 1
        self.done = bool(result.done)
        if result.reward is not None:
            self.rewards.append(float(result.reward))
        return result

    async def tools(self) -> list[Tool]:
        """The environment's MCP tools. Raises EnvironmentFailedError if it has none."""
        try:
            result = await self.answered("list_tools", self.session.step({"type": "list_tools"}))
        except ToolError as error:
            raise EnvironmentFailedError(f"the environment has no MCP tools ({error}); leave out tools=True") from error
        listed = plain(result.observation).get("tools") or []
        if not listed:
            raise EnvironmentFailedError("the environment lists no MCP tools; leave out tools=True")
        return [
            Tool.from_schema(
                _called_by_step, name=tool["name"], description=tool["description"], parameters=tool["input_schema"]
            )
            for tool in map(plain, listed)
        ]

    def refused(self, error: ToolError) -> str:
        self.num_refused += 1
        return f"error: {error}"

    def reward(self, kind: Literal["sum", "last"]) -> float:
        if kind == "last":
            return self.rewards[-1] if self.rewards else 0.0
        return sum(self.rewards)

    @property
    def metrics(self) -> dict[str, float]:
        return {"steps": self.num_steps, "invalid_actions": self.num_refused, "done": float(self.done)}

    async def answered(self, what: str, answer: Awaitable[ResultT]) -> ResultT:
        """The environment's answer in time. Raises ToolError for a refused action, else EnvironmentFailedError."""
        try:
            async with asyncio.timeout(self.timeout_s):
                return await answer
        except ArlError:
            raise
        except TimeoutError as error:
            raise EnvironmentFailedError(
                f"the environment did not answer {what} within {self.timeout_s:g} s"
            ) from error
        except Exception as error:
            if "VALIDATION_ERROR" in str(error):  # OpenEnv's own client says so only in words
                raise ToolError("this is no action of the environment") from error
            raise EnvironmentFailedError(f"the environment failed in {what}: {error!r}") from error


def _called_by_step(**arguments: Any) -> str:
    raise AssertionError("a call of this tool is a step of the environment")


def plain(record: Any) -> Any:
    """A record of OpenEnv's as a dict."""
    if hasattr(record, "model_dump"):
        return record.model_dump()
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return dataclasses.asdict(record)
    return record


def tool_text(observation: Mapping[str, Any]) -> str:
    """What a tool returned. Raises ToolError if it failed."""
    if error := observation.get("error"):
        raise ToolError(str(plain(error).get("message", error)))
    result = plain(observation.get("result"))
    if not isinstance(result, Mapping):
        return text_of(result)
    parts = cast("Mapping[str, Any]", result)
    texts = [part["text"] for part in parts.get("content") or () if isinstance(part, Mapping) and "text" in part]
    text = "\n".join(texts) or text_of(parts.get("structured_content") or dict(parts))
    if parts.get("is_error"):
        raise ToolError(text)
    return text
