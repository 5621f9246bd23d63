"""The episode of an agent with tools: the loop in which it calls them, and what became of its calls.

prompt -> turn -> calls -> tools (arun_tools) -> messages -> turn -> ... -> a turn without a call: the answer
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from arl.workflow.tools import Tool, ToolLimits, ToolResult, arun_tools

if TYPE_CHECKING:
    from arl.api.engine import Sampler
    from arl.api.types import Example, SamplingParams
    from arl.workflow.call_formats import CallFormat
    from arl.workflow.conversation import Conversation
    from arl.workflow.dialogue import Turn


@dataclass(slots=True, kw_only=True, eq=False)
class ToolEpisode:
    """The state of an episode, for its workflow's methods."""

    data: Example
    conversation: Conversation
    tools: Sequence[Tool]
    results: list[ToolResult] = field(default_factory=list[ToolResult])
    """The results of all calls so far, in order."""
    answer: Turn | None = None
    """The turn without a call that ended the episode; None if max_turns, is_done or a full context ended it."""

    @property
    def metrics(self) -> dict[str, float]:
        failures = [result.failure for result in self.results]
        malformed = failures.count("malformed")
        return {
            "tool_calls": len(self.results) - malformed,
            "tool_errors": failures.count("refused") + failures.count("failed"),
            "malformed_calls": malformed,
            "turns": self.conversation.num_turns,
            "answered": float(self.answer is not None),
        }

    async def aspeak(
        self,
        engine: Sampler,
        sampling: SamplingParams,
        *,
        call_format: CallFormat,
        limits: ToolLimits,
        max_turns: int,
        is_done: Callable[[ToolEpisode], bool] = lambda _: False,
    ) -> None:
        """Let the model call tools until it answers or must stop; sets `answer`. Raises as agenerate and tools do."""
        chat, self.answer = self.conversation, None
        for _ in range(max_turns):
            turn = await chat.agenerate(engine, sampling)
            if chat.is_full:
                return
            calls = call_format.parse(turn.text).calls
            if not calls:
                self.answer = turn
                return
            results = await arun_tools(calls, self.tools, limits)
            self.results += results
            chat.add(*(result.message for result in results))
            if is_done(self):
                return
