"""The best deployment within a budget: a climb over servers and ranks, from where the ceilings of both meet.

First it climbs to the highest throughput, then it looks for the cheapest deployment within a twentieth of that. Each
deployment is simulated once, and only if its ceilings do not rule it out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from arl.api.errors import ConfigError
from arl.plan.ceilings import ceiling
from arl.plan.costs import Costs, Deployment, with_changes
from arl.plan.prediction import Prediction, rank_bytes

_EQUAL = 0.05
_MOST_TRIED = 40

Split = tuple[int, int]
"""(servers, ranks)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitChoice:
    """The ranges of servers and ranks that may be rented."""

    servers: tuple[int, int]
    """The fewest and the most."""
    ranks: tuple[int, int]
    budget: int | None = None
    """GPUs in total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    best: Prediction
    tried: tuple[Prediction, ...]
    """All that were simulated, by servers and ranks."""

    @property
    def neighbours(self) -> list[Prediction]:
        """The best, and the nearest few with more or fewer servers or ranks."""
        chosen = self.best.deployment
        others = sorted(self.tried, key=lambda one: _distance(one.deployment, chosen))[:9]
        return sorted(others, key=lambda one: (one.deployment.num_ranks, one.deployment.num_servers))


def search(costs: Costs, base: Deployment, choice: SplitChoice, predict: Callable[[Deployment], Prediction]) -> Plan:
    """Find the split with the highest throughput. Raises ConfigError if the budget holds none."""
    splits = _Splits(costs, base, choice, predict)
    splits.climb()
    splits.surround(splits.cheapest())
    best = splits.cheapest_known()
    tried = sorted(splits.tried.items())
    return Plan(best=best, tried=tuple(prediction for _, prediction in tried))


class _Splits:
    def __init__(
        self, costs: Costs, base: Deployment, choice: SplitChoice, predict: Callable[[Deployment], Prediction]
    ) -> None:
        self._costs = costs
        self._base = base
        self._choice = choice
        self._predict = predict
        self.tried: dict[Split, Prediction] = {}

    def first(self) -> Split:
        """Where the lower of both ceilings is highest; of about equals, the cheapest."""
        fewest, most = self._choice.ranks
        found: list[tuple[float, Split]] = []
        for ranks in range(fewest, most + 1):
            for servers in self._servers_for(ranks):
                split = servers, ranks
                found.append((self._ceiling(split), split))
        if not found:
            raise ConfigError(
                f"{self._choice.budget} GPUs hold no {self._choice.servers[0]} servers of {self._base.gpus_per_server} "
                f"beside {fewest} ranks of {self._base.gpus_per_rank}; raise --budget"
            )
        least = (1 - _EQUAL) * max(fastest for fastest, _ in found)
        enough = [split for fastest, split in found if fastest >= least]
        return min(enough, key=lambda split: self._deployment(split).num_gpus)

    def predicted(self, split: Split) -> Prediction:
        if split not in self.tried:
            self.tried[split] = self._predict(self._deployment(split))
        return self.tried[split]

    def climb(self) -> None:
        best = self.predicted(self.first())
        reach = _power_below(best.deployment.num_servers // 4)
        while reach:
            faster = (1 + _EQUAL) * best.episodes_per_s
            ranks = max(reach * best.deployment.num_ranks // best.deployment.num_servers, 1)
            moves = [(reach, 0), (0, ranks), (reach, ranks), (-reach, ranks), (reach, -ranks)]
            found = next((one for one in self._around(best, moves, faster) if one.episodes_per_s > faster), None)
            reach, best = (2 * reach, found) if found else (reach // 2, best)

    def cheapest(self) -> Prediction:
        """From `cheapest_known` on to fewer servers or ranks, as long as these are about as fast."""
        best, enough = self.cheapest_known(), self._enough()
        reach = _power_below(best.deployment.num_servers // 4)
        while reach:
            fewer_ranks = max(reach * best.deployment.num_ranks // best.deployment.num_servers, 1)
            cheaper = self._around(best, [(-reach, 0), (0, -fewer_ranks)], enough)
            found = next((one for one in cheaper if one.episodes_per_s >= enough), None)
            reach, best = (reach, found) if found else (reach // 2, best)
        return best

    def cheapest_known(self) -> Prediction:
        """Of those that were tried, fit into memory and are about as fast as the fastest."""
        enough = self._enough()
        return min((one for one in self._fitting() if one.episodes_per_s >= enough), key=_price)

    def _enough(self) -> float:
        return (1 - _EQUAL) * max(one.episodes_per_s for one in self._fitting())

    def _fitting(self) -> list[Prediction]:
        """Those whose trainer fits into its memory; if none does, all."""
        return [one for split, one in self.tried.items() if self._ceiling(split)] or list(self.tried.values())

    def _around(self, best: Prediction, moves: Iterable[Split], at_least: float) -> Iterator[Prediction]:
        """The predictions of splits so far away whose ceilings are not below `at_least` episodes a second."""
        servers, ranks = best.deployment.num_servers, best.deployment.num_ranks
        for split in self._allowed((servers + more, ranks + ranks_more) for more, ranks_more in moves):
            is_known = split in self.tried
            if is_known or (self._ceiling(split) >= at_least and len(self.tried) < _MOST_TRIED):
                prediction = self.predicted(split)
                if prediction is not best:
                    yield prediction

    def surround(self, best: Prediction) -> None:
        """Try what a reader will want to compare with the best: an eighth more or fewer servers, a rank."""
        servers, ranks = best.deployment.num_servers, best.deployment.num_ranks
        some = max(servers // 8, 1)
        moves = [(servers - some, ranks), (servers + some, ranks), (servers, ranks - 1), (servers, ranks + 1)]
        for split in self._allowed(moves):
            self.predicted(split)

    def _servers_for(self, ranks: int) -> Iterable[int]:
        """All numbers up to a few dozen, then fewer: a start, not the answer."""
        fewest, most = self._choice.servers[0], self._most_servers(ranks)
        step = max((most - fewest) // 64, 1)
        return [*range(fewest, most, step), most] if most >= fewest else []

    def _most_servers(self, ranks: int) -> int:
        most = self._choice.servers[1]
        if self._choice.budget is None or not self._base.gpus_per_server:  # servers on CPUs use up no GPUs
            return most
        return min(most, (self._choice.budget - ranks * self._base.gpus_per_rank) // self._base.gpus_per_server)

    def _allowed(self, splits: Iterable[Split]) -> list[Split]:
        """Within the choice; servers beyond the budget become as many as it holds."""
        found: list[Split] = []
        for servers, ranks in splits:
            if not self._choice.ranks[0] <= ranks <= self._choice.ranks[1]:
                continue
            most = self._most_servers(ranks)
            if most >= self._choice.servers[0]:
                found.append((min(max(servers, self._choice.servers[0]), most), ranks))
        return list(dict.fromkeys(found))

    def _ceiling(self, split: Split) -> float:
        """0 where the trainer does not fit into its memory."""
        deployment, memory = self._deployment(split), self._costs.memory
        is_too_large = 0 < memory.rank_total < rank_bytes(self._costs, deployment)
        return 0.0 if is_too_large else ceiling(self._costs, deployment)

    def _deployment(self, split: Split) -> Deployment:
        return with_changes(self._base, num_servers=split[0], num_ranks=split[1])


def _price(prediction: Prediction) -> tuple[float, int]:
    return prediction.hour_cost, prediction.deployment.num_gpus


def _power_below(number: int) -> int:
    """The largest power of 2 up to a number; at least 1."""
    return 1 << max(number, 1).bit_length() - 1


def _distance(one: Deployment, other: Deployment) -> float:
    return abs(one.num_servers / other.num_servers - 1) + abs(one.num_ranks / other.num_ranks - 1)
