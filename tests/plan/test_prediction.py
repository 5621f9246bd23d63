"""What is told of a simulated run: shares, money, memory, ceilings, and what was not measured."""

import msgspec
import pytest
from made_costs import made_costs

from arl.plan.ceilings import buffers_ceiling, ceiling, servers_ceiling, trainers_ceiling
from arl.plan.costs import Costs, Measured, with_changes
from arl.plan.plan_text import draw, told
from arl.plan.prediction import Prediction, predict
from arl.plan.search import Plan


def predicted(costs: Costs, **changes: int) -> Prediction:
    return predict(costs, with_changes(costs.deployment, **changes), num_steps=5)


@pytest.mark.parametrize("eta", [0, 2])
def test_shares_of_the_time_add_up(eta: int) -> None:
    one = predicted(made_costs(), max_staleness=eta, num_servers=2)
    waits = one.waits
    trainer = waits.trainer_trains + waits.trainer_waits_for_batch + waits.trainer_copies
    assert trainer + waits.trainer_waits_for_delivery == pytest.approx(1)
    assert (waits.trainer_waits_for_delivery > 0.01) == (eta == 0)
    assert waits.servers_compute + waits.servers_load + waits.servers_idle == pytest.approx(1)
    assert sum(one.staleness.values()) == pytest.approx(1)
    assert one.mean_staleness <= eta


def test_money_is_that_of_all_servers_and_ranks() -> None:
    one = predicted(made_costs(shared=False), num_servers=3, num_ranks=2)
    assert one.hour_cost == pytest.approx(3 * 2.0 + 2 * 3.0)
    assert one.step_cost == pytest.approx(12.0 * one.step_s / 3600)
    assert one.episodes_cost == pytest.approx(12.0 / 3600 / one.episodes_per_s * 1000)


def test_memory_of_a_server_is_its_weights_and_its_fullest_batch() -> None:
    one = predicted(made_costs(shared=False))
    assert one.server_bytes > 10**9
    assert (one.server_bytes - 10**9) % 1000 == 0
    assert one.rank_bytes == 0  # nothing is known of the trainer's memory


@pytest.mark.parametrize("servers", [1, 8])
def test_no_prediction_is_above_a_ceiling(servers: int) -> None:
    costs = made_costs(shared=False)
    for eta in (0, 1, 4):
        one = predicted(costs, num_servers=servers, max_staleness=eta)
        assert one.episodes_per_s <= 1.1 * ceiling(costs, one.deployment)  # of mean episodes, and few were drawn


def test_the_ceilings_follow_from_the_costs() -> None:
    costs = made_costs(shared=False)
    base = costs.deployment
    assert servers_ceiling(costs, with_changes(base, num_servers=2)) <= 2 * servers_ceiling(costs, base)
    one, two = (trainers_ceiling(costs, with_changes(base, batch_size=64, num_ranks=n)) for n in (1, 2))
    assert one < two < 2 * one
    assert buffers_ceiling(costs, with_changes(base, max_staleness=5)) == pytest.approx(
        2 * buffers_ceiling(costs, base)
    )
    few = with_changes(base, max_concurrent_episodes=1)
    assert buffers_ceiling(costs, few) < buffers_ceiling(costs, base)


def test_what_was_not_measured_is_named() -> None:
    costs = made_costs(shared=False)
    assert predicted(costs).extrapolated == ("nothing of this was measured",)
    everything = Measured(
        num_servers=(1, 2),
        num_ranks=(1, 1),
        running_requests=(1, 128),
        context_tokens=(0, 10**6),
        step_tokens=(1, 10**6),
    )
    costs = msgspec.structs.replace(costs, measured=everything)
    assert predicted(costs, num_servers=2).extrapolated == ()
    assert predicted(costs, num_servers=3).extrapolated == ("3 servers (1 to 2 measured)",)
    part = msgspec.structs.replace(everything, num_ranks=None)
    assert predicted(msgspec.structs.replace(costs, measured=part)).extrapolated == ("1 trainer ranks (not measured)",)


def test_the_limit_is_what_more_of_would_help() -> None:
    costs = made_costs(shared=False)
    assert predicted(costs, batch_size=16).limit == "servers"
    assert predicted(costs, num_servers=40, max_staleness=8, batch_size=16).limit == "trainer"
    assert predicted(costs, num_servers=40, max_staleness=0).limit == "staleness"
    assert predicted(costs, num_servers=40, batch_size=16, max_concurrent_episodes=4).limit == "episodes"
    slow = msgspec.structs.replace(costs, controller=msgspec.structs.replace(costs.controller, per_request_s=0.5))
    assert predicted(slow).limit == "controller"


def test_a_plan_is_told_and_drawn(tmp_path: object) -> None:
    from pathlib import Path

    costs = made_costs()
    first, second = predicted(costs), predicted(costs, num_servers=2)
    plan = Plan(best=second, tried=(first, second))
    assert told(plan, costs)
    path = Path(str(tmp_path)) / "plan.png"
    draw(plan, costs, path)
    assert path.read_bytes().startswith(b"\x89PNG")
