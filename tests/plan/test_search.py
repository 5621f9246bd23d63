"""The best split of a budget over servers and ranks."""

import msgspec
import pytest
from made_costs import made_costs

from arl.api.errors import ConfigError
from arl.plan.costs import Costs, Deployment, MemoryCosts, with_changes
from arl.plan.prediction import Prediction, predict
from arl.plan.search import Plan, SplitChoice, search

COSTS = made_costs(shared=False)
SAMPLE = predict(COSTS, COSTS.deployment, num_steps=1)


def split_of(plan: Plan) -> tuple[int, int]:
    return plan.best.deployment.num_servers, plan.best.deployment.num_ranks


class Rule:
    """Predicts without a simulation: each server gives `server` episodes a second, each rank trains `rank` of them.

    asked: the splits that were asked for.
    """

    def __init__(self, server: float, rank: float, most: float = 1e9) -> None:
        self.server, self.rank, self.most = server, rank, most
        self.asked: list[tuple[int, int]] = []

    def __call__(self, deployment: Deployment) -> Prediction:
        servers, ranks = deployment.num_servers, deployment.num_ranks
        assert (servers, ranks) not in self.asked
        self.asked.append((servers, ranks))
        speed = min(self.server * servers, self.rank * ranks, self.most)
        hour = servers * COSTS.prices.server_hour + ranks * COSTS.prices.rank_hour
        return msgspec.structs.replace(SAMPLE, deployment=deployment, episodes_per_s=speed, hour_cost=hour)


def fast(costs: Costs = COSTS) -> tuple[Costs, Deployment]:
    """Costs whose ceilings rule nothing out."""
    trainer = msgspec.structs.replace(costs.trainer, base_s=1e-9, per_episode_s=0.0, per_token_s=1e-9, snapshot_s=0.0)
    decode = msgspec.structs.replace(costs.decode, points=((1, 1e-9),), per_context_token_s=0.0)
    prefill = msgspec.structs.replace(costs.prefill, base_s=0.0, per_token_s=1e-12)
    costs = msgspec.structs.replace(costs, trainer=trainer, decode=decode, prefill=prefill)
    deployment = with_changes(costs.deployment, batch_size=1000, max_staleness=100, max_concurrent_episodes=10**9)
    return costs, deployment


@pytest.mark.parametrize(("server", "rank"), [(1.0, 1.0), (1.0, 4.0), (3.0, 1.0), (1.0, 20.0)])
def test_the_search_finds_the_split_where_servers_and_ranks_meet(server: float, rank: float) -> None:
    rule = Rule(server, rank)
    plan = search(*fast(), SplitChoice(servers=(1, 64), ranks=(1, 64), budget=64), rule)
    best = max(min(server * s, rank * r) for s in range(1, 64) for r in range(1, 65 - s))
    assert plan.best.episodes_per_s >= 0.9 * best
    assert len(rule.asked) <= 44
    assert all(s + r <= 64 for s, r in rule.asked)


def test_of_equals_the_cheapest_is_best() -> None:
    plan = search(*fast(), SplitChoice(servers=(1, 32), ranks=(1, 8)), Rule(1.0, 10.0, most=8.0))
    assert split_of(plan) == (8, 1)


def test_a_cheaper_neighbour_that_is_about_as_fast_is_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arl.plan.search._MOST_TRIED", 1)  # so that it is only tried as a neighbour
    costs, deployment = fast()
    slow = msgspec.structs.replace(costs, trainer=msgspec.structs.replace(costs.trainer, per_token_s=1.0))
    plan = search(slow, deployment, SplitChoice(servers=(8, 8), ranks=(1, 8)), Rule(1.0, 10.0))
    assert [one.deployment.num_ranks for one in plan.tried] == [7, 8]
    assert split_of(plan) == (8, 7)


def test_servers_on_cpus_use_up_no_budget() -> None:
    costs, deployment = fast()
    plan = search(
        costs, with_changes(deployment, gpus_per_server=0), SplitChoice(servers=(1, 4), ranks=(1, 1), budget=1),
        Rule(1.0, 10.0),
    )  # fmt: skip
    assert split_of(plan) == (4, 1)


def test_a_budget_that_holds_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="4 GPUs hold no 4 servers of 1 beside 2 ranks of 1; raise --budget"):
        search(*fast(), SplitChoice(servers=(4, 8), ranks=(2, 4), budget=4), Rule(1.0, 1.0))


def test_a_trainer_that_does_not_fit_into_its_memory_is_not_planned() -> None:
    costs, deployment = fast()
    memory = MemoryCosts(trainer_state=100, per_rank=10, rank_total=40)
    costs = msgspec.structs.replace(costs, memory=memory)
    plan = search(costs, deployment, SplitChoice(servers=(1, 8), ranks=(1, 8)), Rule(1.0, 100.0))
    assert split_of(plan)[1] >= 4


def test_a_single_choice_is_simulated_once() -> None:
    rule = Rule(1.0, 1.0)
    plan = search(*fast(), SplitChoice(servers=(3, 3), ranks=(2, 2)), rule)
    assert rule.asked == [(3, 2)]
    assert plan.neighbours == [plan.best]


def test_with_simulations_the_best_split_keeps_the_trainer_busy() -> None:
    deployment = with_changes(COSTS.deployment, batch_size=8, max_staleness=4)

    def simulated(deployment: Deployment) -> Prediction:
        return predict(COSTS, deployment, num_steps=3)

    plan = search(COSTS, deployment, SplitChoice(servers=(1, 6), ranks=(1, 1)), simulated)
    alone = next(
        one for one in plan.tried if one.deployment.num_servers == min(s.deployment.num_servers for s in plan.tried)
    )
    assert plan.best.episodes_per_s >= alone.episodes_per_s
    assert plan.best.waits.trainer_idle < 0.2
