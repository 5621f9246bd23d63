"""Each request says for which role it is sampled: the role of the trajectory that its tokens become."""

from typing import Any

import pytest
from scripted_answers import TOKENIZER, exact, saying

from arl.api.engine import Sampler
from arl.api.types import Example, SamplingParams, Trajectory
from arl.api.workflow import RolloutWorkflow
from arl.rollout.tasks import TaskWorkflows
from arl.workflow.agent import SingleTurnWorkflow
from arl.workflow.compacting import CompactingConversation, Compaction
from arl.workflow.conversation import Conversation
from arl.workflow.tool_agent import SubAgent, ToolAgentWorkflow

ASKED = [{"role": "user", "content": "?"}]
WRITER = SubAgent(name="writer", description="Writes.", role="author")
READER = SubAgent(name="reader", description="Reads.", sub_agents=[WRITER])


async def test_a_conversation_asks_and_is_trained_in_its_role() -> None:
    engine = saying("yes", "no")
    for chat in (Conversation(TOKENIZER, ASKED, role="critic"), Conversation(TOKENIZER, ASKED)):
        await chat.agenerate(engine, SamplingParams())
        (made,) = chat.trajectories(1.0)
        assert made.role == engine.requests[-1].role
    assert [request.role for request in engine.requests] == ["critic", "agent"]


async def test_summaries_are_asked_for_in_the_role_of_their_conversation() -> None:
    engine = saying("a", forever=True)
    compaction = Compaction(context_length=250, summary_tokens=30, instruction="Sum up.", handover="So far: {summary}")
    chat = CompactingConversation(TOKENIZER, ASKED, compaction, role="critic")
    for _ in range(4):
        await chat.agenerate(engine, SamplingParams(max_new_tokens=20))
        chat.add({"role": "user", "content": "x" * 80})
    assert chat.summaries
    assert {request.role for request in engine.requests} == {made.role for made in chat.trajectories(1.0)} == {"critic"}


class Own(RolloutWorkflow):
    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory | None:
        return None


class OwnEpisodes(SingleTurnWorkflow):
    async def arun_episode(self, engine: Sampler, data: Example) -> Any:
        return ()


class OwnConversation(SingleTurnWorkflow):
    def conversation(self, data: Example, tools: Any = ()) -> Conversation:
        return Conversation(self.tokenizer, self.messages(data), role="critic")


class Pair(Own):
    declared_roles = frozenset({"solver", "checker"})


AGENT = SingleTurnWorkflow(TOKENIZER, exact)


@pytest.mark.parametrize(
    ("workflow", "roles"),
    [
        (AGENT, {"agent"}),
        (ToolAgentWorkflow(TOKENIZER, exact, sub_agents=[READER]), {"agent", "reader", "author"}),
        (Pair(), {"solver", "checker"}),
        (TaskWorkflows({"a": AGENT, "b": Pair()}), {"agent", "solver", "checker"}),
        (TaskWorkflows({"a": AGENT, "b": Own()}), None),
        (Own(), None),
        (OwnEpisodes(TOKENIZER, exact), None),
        (OwnConversation(TOKENIZER, exact), None),
    ],
)
def test_ready_made_workflows_declare_their_roles_and_episodes_of_ones_own_are_unknown(
    workflow: RolloutWorkflow, roles: set[str] | None
) -> None:
    assert workflow.declared_roles == roles
