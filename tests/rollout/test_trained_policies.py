"""With several policies, an episode's trajectories are trained by the policies that sampled them, or end the run."""

from typing import Any

import pytest
from records import trajectory

from arl.api.engine import Sampler
from arl.api.errors import RoleError, TrajectoryError
from arl.api.fakes import ScriptedEngine
from arl.api.settings.engines import PolicyRoles
from arl.api.train_engine import ModelLimits
from arl.api.types import Example, ModelRequest, Trajectory
from arl.api.workflow import RolloutWorkflow
from arl.rollout.episode import Episode, EpisodeRunner, TrainedPolicies

POLICIES = TrainedPolicies(
    roles=PolicyRoles({"author": "writer", "editor": "writer", "critic": "reader"}),
    limits={"writer": ModelLimits(vocab_size=2), "reader": ModelLimits(vocab_size=10)},
)


class Asks(RolloutWorkflow):
    """Asks in some roles, and returns these trajectories."""

    def __init__(self, asked: tuple[str, ...], *made: Trajectory) -> None:
        self.asked, self.made, self.num_runs = asked, made, 0

    async def arun_episode(self, engine: Sampler, data: Example) -> Any:
        self.num_runs += 1
        for role in self.asked:
            await engine.agenerate(ModelRequest(input_ids=[1], role=role))
        return self.made


async def run(workflow: Asks) -> Episode:
    runner = EpisodeRunner(workflow=workflow, timeout_s=5, retries=1, policies=POLICIES)
    return await runner.run(ScriptedEngine(lambda _: [1]), {}, name="an episode")


async def test_roles_of_one_policy_may_share_trajectories() -> None:
    made = trajectory(role="author")
    assert (await run(Asks(("editor",), made))).trajectories == (made,)


async def test_tokens_that_another_policy_sampled_end_the_run_and_name_both_roles() -> None:
    workflow = Asks(("author",), trajectory(role="critic"))
    with pytest.raises(RoleError, match=r"role 'critic', but asked for author alone: the policy reader would be"):
        await run(workflow)
    assert workflow.num_runs == 1, "another try would not mend the settings"


async def test_a_role_of_no_policy_ends_the_run() -> None:
    with pytest.raises(RoleError, match="no policy plays the role 'judge'"):
        await run(Asks(("author",), trajectory(role="judge")))


async def test_tokens_that_are_not_trained_may_be_of_any_policy() -> None:
    seen = trajectory(role="critic", loss_mask=(0, 0, 0))
    assert (await run(Asks(("author",), seen, trajectory(role="author")))).trajectories[0] == seen


async def test_each_policys_trajectories_have_the_limits_of_its_model() -> None:
    long = {"token_ids": (1, 5, 5)}
    assert (await run(Asks(("critic",), trajectory(role="critic", **long)))).error is None
    error = (await run(Asks(("author",), trajectory(role="author", **long)))).error
    assert isinstance(error, TrajectoryError)
    assert "the model has 2 tokens" in str(error)
