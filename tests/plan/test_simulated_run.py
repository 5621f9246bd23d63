"""Simulated runs: what they conserve, what bounds them, and that the real buffer keeps its promises in them."""

import logging
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_costs import made_costs, made_workload

from arl.api.errors import StarvedError
from arl.plan.costs import Costs, TrainerCosts, with_changes
from arl.plan.simulated_run import SimulatedRun, simulate

costs_of_runs = st.builds(
    lambda seed, shared, eta, servers, ranks, mode, order, extra: (
        made_costs(seed, shared),
        {
            "max_staleness": eta,
            "num_servers": servers,
            "num_ranks": ranks,
            "pause_mode": mode,
            "update_order": order,
            "extra_episodes": extra,
        },
    ),
    seed=st.integers(0, 1000),
    shared=st.booleans(),
    eta=st.integers(0, 3),
    servers=st.integers(1, 3),
    ranks=st.integers(1, 2),
    mode=st.sampled_from(["in_place", "retract", "abort"]),
    order=st.sampled_from(["all", "rolling"]),
    extra=st.integers(0, 1),
)


def run(costs: Costs, num_steps: int = 6, seed: int = 0, **changes: Any) -> SimulatedRun:
    return simulate(costs, with_changes(costs.deployment, **changes), num_steps, seed=seed)


@settings(max_examples=15)
@given(costs_of_runs)
def test_tokens_and_episodes_are_conserved_and_no_trained_token_is_too_old(given: tuple[Costs, dict[str, Any]]):
    costs, changes = given
    done = run(costs, **changes)
    deployment = done.deployment
    sizes = {sum(turn.new_tokens for turn in one.turns) for one in costs.workload.episodes}
    for step in done.steps:
        assert step.num_episodes == deployment.batch_size * deployment.group_size
        assert sum(step.staleness.values()) == step.num_tokens
        assert min(step.staleness) >= 0
        assert max(step.staleness) <= deployment.max_staleness
        assert step.num_episodes * min(sizes) <= step.num_tokens <= step.num_episodes * max(sizes)
    assert done.counters["episodes_trained"] == sum(step.num_episodes for step in done.steps)
    last = done.steps[-1]
    assert last.servers_decoded >= sum(step.num_tokens for step in done.steps)
    assert all(a.ended <= b.began for a, b in pairwise(done.steps))


@settings(max_examples=5)
@given(costs_of_runs)
def test_the_same_seed_gives_the_same_run_and_another_seed_another(given: tuple[Costs, dict[str, Any]]) -> None:
    costs, changes = given
    assert run(costs, seed=5, **changes) == run(costs, seed=5, **changes)
    assert run(costs, seed=5, **changes) != run(costs, seed=6, **changes)


@settings(max_examples=6)
@given(costs_of_runs)
def test_littles_law(given: tuple[Costs, dict[str, Any]]) -> None:
    """Mean number of requests = rate * mean time, over a run whose open requests are few beside the answered ones."""
    costs, changes = given
    last = run(costs, num_steps=30, **changes).steps[-1]
    assert last.num_answered > 500
    assert last.in_flight_s == pytest.approx(last.request_s, rel=0.15)


def trainers_ceiling(costs: Costs, step_tokens: float, num_episodes: int) -> float:
    """Episodes a second that the trainer could train if it never waited."""
    return num_episodes / (costs.trainer.step_s(step_tokens, num_episodes, 1) + costs.trainer.snapshot_s)


@settings(max_examples=8)
@given(seed=st.integers(0, 1000), eta=st.integers(0, 4), num_servers=st.integers(1, 4), slow=st.sampled_from([1, 20]))
def test_throughput_is_below_the_ceilings_of_trainer_and_servers(
    seed: int, eta: int, num_servers: int, slow: int
) -> None:
    costs = made_costs(seed, shared=False)
    costs = msgspec.structs.replace(costs, trainer=TrainerCosts(base_s=0.1, per_token_s=1e-4 * slow, snapshot_s=0.01))
    done = run(costs, num_steps=20, max_staleness=eta, num_servers=num_servers)
    first, last = done.steps[0], done.steps[-1]
    seconds = last.ended - first.ended
    trained_s = sum(costs.trainer.step_s(s.forwarded, s.num_episodes, 1) + 0.01 for s in done.steps[1:])
    assert trained_s <= seconds * (1 + 1e-9)
    tokens = sum(step.num_tokens for step in done.steps)
    fastest = min(costs.decode.iteration_s(n, n) / n for n in range(1, 129))  # a token, in a batch of the best size
    assert tokens * fastest <= last.ended * num_servers
    assert last.servers_busy_s <= last.ended * num_servers * (1 + 1e-9)


def test_without_staleness_rollouts_and_training_alternate() -> None:
    done = run(made_costs(shared=False), num_steps=8, max_staleness=0, num_servers=2)
    for before, step in pairwise(done.steps):
        assert step.staleness.keys() == {0}
        busy_s = step.servers_busy_s - before.servers_busy_s
        assert busy_s <= 2 * (step.taken - before.ended) + 1e-9  # servers compute only while the trainer waits
        assert step.ended - step.copied > 0.149  # transfer and load, for which the step waits
    slow = [step.trained - step.taken for step in done.steps]
    assert min(slow) > 0


def test_with_staleness_servers_compute_while_the_trainer_trains() -> None:
    fresh, stale = (
        run(made_costs(shared=False), num_steps=12, max_staleness=eta, num_servers=2).steps[-1].ended for eta in (0, 3)
    )
    assert stale < 0.8 * fresh


def test_slower_tools_make_steps_longer_and_more_staleness_makes_up_for_some_of_it() -> None:
    costs = made_costs(shared=False)
    usual, slow, stale = (
        run(costs, num_steps=15, num_servers=2, tool_factor=factor, max_staleness=eta).steps[-1].ended
        for factor, eta in ((1.0, 1), (5.0, 1), (5.0, 6))
    )
    assert usual < 0.7 * slow
    assert stale < 0.7 * slow


def test_a_rolling_update_leaves_other_servers_at_work() -> None:
    slow_load = msgspec.structs.replace(made_costs().publish, load_s=3.0)
    costs = made_costs(shared=False, publish=slow_load)
    done = {order: run(costs, num_steps=15, num_servers=3, update_order=order) for order in ("all", "rolling")}
    waits = {order: one.steps[-1].queued_s / one.steps[-1].num_answered for order, one in done.items()}
    assert waits["rolling"] < 0.2 * waits["all"]


def test_processes_that_share_cores_are_slower_together() -> None:
    own, shared = (run(made_costs(shared=shares), num_steps=10, num_servers=3).steps[-1] for shares in (False, True))
    assert shared.ended > 1.1 * own.ended


def test_groups_with_equal_rewards_are_replaced_by_others() -> None:
    done = run(made_costs(shared=False), num_steps=10, drop_equal_rewards=True, group_size=2)
    assert done.counters["episodes_rejected"] > 0
    assert done.counters["episodes_trained"] == 10 * 4 * 2


def test_a_workload_without_any_difference_in_reward_starves_without_advice_for_runs_that_train(
    caplog: pytest.LogCaptureFixture,
) -> None:
    costs = made_costs(shared=False, workload=made_workload(reward=1.0))
    with pytest.raises(StarvedError, match="nothing to train on"):
        run(costs, drop_equal_rewards=True, group_size=2)
    assert caplog.records == []
    logging.getLogger("arl.rollout").warning("a run that trains")
    assert [record.getMessage() for record in caplog.records] == ["a run that trains"]


def test_failed_episodes_run_again_as_often_as_the_setting_says() -> None:
    costs = made_costs(shared=False)
    half = [
        msgspec.structs.replace(one, how="failed" if i % 3 == 0 else "finished")
        for i, one in enumerate(costs.workload.episodes)
    ]
    costs = msgspec.structs.replace(costs, workload=msgspec.structs.replace(costs.workload, episodes=tuple(half)))
    done = run(costs, num_steps=10, min_group_size=4, episode_retries=2)
    assert done.counters["episodes_retried"] > 0
    assert run(costs, num_steps=10, min_group_size=1, episode_retries=0).counters["episodes_retried"] == 0


def test_a_busy_controller_is_the_limit() -> None:
    costs = made_costs(shared=False)
    slow = msgspec.structs.replace(costs.controller, per_request_s=0.2)
    steps = run(msgspec.structs.replace(costs, controller=slow), num_steps=12, num_servers=3).steps
    seconds, work_s = steps[-1].ended - steps[2].ended, steps[-1].controller_s - steps[2].controller_s
    assert 0.9 * seconds < work_s
    assert steps[-1].num_answered * 0.2 <= steps[-1].ended
