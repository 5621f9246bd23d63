"""The analytic model of a run: a fixed point of mean values over one step, without random events.

    admission of batch k + max_staleness + 1 <-- weights published <-- snapshot <-- batch k trained, after k - 1
        |                                                                          ^
    episodes: turns on servers, tools between them --> the slowest group has finished

**Staleness is a queue.** A batch of groups is admitted when the batch max_staleness + 1 before it is published, and is
trained when all of its groups have finished and the trainer is free (docs/staleness.md). With s seconds for a step and
p to publish, batch k is taken at

    taken[k] = max(taken[k - 1] + s, taken[k - 1 - max_staleness] + s + p + slowest[k])

`Steady._mean_period` follows this recurrence; the slowest of a batch is drawn from the groups at even quantiles.
`max_concurrent_episodes` bounds the period from below by Little's law, the controller by its work.

**Servers.** Requests decode at the pace 1 / iteration_s(n), with n the mean number of requests on a server at this
moment of the step; reading prompts and loading weights take time from it. The pace gives the durations of turns and
episodes, these give n at each moment, and n gives the pace: rounds of `Steady._update` until nothing changes.

Not in the model: imbalance between servers, cut stragglers, replayed groups, evaluations, failures of machines.
"""

from __future__ import annotations

import math
from itertools import repeat

import numpy as np

from arl.api.errors import ConfigError
from arl.cluster.plan.costs import Costs, Deployment, MeasuredEpisode, SharedCores, Workload

_CELLS = 200
"""Moments of a step."""
_ROUNDS, _EXACT = 150, 2e-4
_EPISODES, _GROUPS = 1600, 150
"""So many episodes, and so many groups at least, stand for all."""
_FILLING, _STEPS = 60, 400
"""Steps of the recurrence before those that count, and those."""


class DrawnEpisodes:
    """Groups drawn from a workload, as arrays [E, T] of their episodes and turns."""

    def __init__(self, workload: Workload, deployment: Deployment) -> None:
        size = self.size = deployment.group_size + deployment.extra_episodes
        groups: dict[int, list[MeasuredEpisode]] = {}
        for episode in workload.episodes:
            groups.setdefault(episode.group, []).append(episode)
        known = list(groups.values())
        # Each measured group in turn; one that is drawn again goes on with its next episodes.
        drawn = [
            known[i % len(known)][(i // len(known) * size + j) % len(known[i % len(known)])]
            for i in range(max(-(-_EPISODES // size), _GROUPS))
            for j in range(size)
        ]
        turns = np.zeros((4, len(drawn), max(len(episode.turns) for episode in drawn)))
        for i, episode in enumerate(drawn):
            for j, turn in enumerate(episode.turns):
                turns[:, i, j] = turn.prompt_tokens, turn.cached_tokens, turn.new_tokens, turn.tool_s
        prompt, cached, self.new, self.tool_s = turns
        self.unread, self.has_turn = prompt - cached, self.new > 0
        self.before_s = np.array([episode.before_s for episode in drawn])
        self.context = float((self.new * (prompt + self.new / 2)).sum() / self.new.sum())
        """Tokens that a running request holds, the mean over sampled tokens."""
        finished = np.array([episode.how == "finished" for episode in drawn]).reshape(-1, size)
        is_trained = finished.sum(1) >= min(deployment.min_group_size, deployment.group_size)
        if deployment.drop_equal_rewards:
            is_trained &= np.ptp(np.array([episode.reward for episode in drawn]).reshape(-1, size), axis=1) > 0
        if not is_trained.any():
            raise ConfigError("no measured group can be trained: all failed, were rejected, or have equal rewards")
        self.finished = finished.reshape(-1)
        self.share_trained = float(is_trained.mean())
        """Of the groups."""
        self.group_episodes = float(np.minimum(finished.sum(1), deployment.group_size)[is_trained].mean())
        """Trained episodes of a trained group; below, its forwarded and its sampled tokens."""
        whole = [episode for episode in drawn if episode.how == "finished"]
        tokens, shared = (np.mean([getattr(e, name) for e in whole]) for name in ("tokens", "shared_tokens"))
        self.group_forwarded = float(self.group_episodes * tokens - (self.group_episodes - 1) * shared)
        self.group_sampled = self.group_episodes * float(self.new[self.finished].sum() / len(whole))


class Steady:
    """A run that has settled: each step is like the one before. Arrays [N] are for the moments of a step."""

    def __init__(self, costs: Costs, deployment: Deployment) -> None:
        self.costs, self.deployment = costs, deployment
        episodes = self.episodes = DrawnEpisodes(costs.workload, deployment)
        self.num_groups = deployment.batch_size / episodes.share_trained
        """Groups admitted in a step."""
        self.weight = self.num_groups * episodes.size / len(episodes.new)
        """How many of a step's episodes one drawn episode stands for."""
        self.slower = np.ones(3)
        """How many times as long servers, ranks and the controller take because they share cores."""
        self.pace = np.full(_CELLS, 1.0 / costs.decode.points[0][1])
        """[N] Tokens that a request gets in a second."""
        self.controlling, self.left_over, self.mean_s = 0.0, 0.0, 0.0
        self.period_s = self.trains_s + costs.trainer.snapshot_s + self.publish_s
        for i in range(_ROUNDS):
            if self._update(0.5 * min(1.0, _ROUNDS / (8 * i + 1))) < _EXACT:
                break

    @property
    def trains_s(self) -> float:
        """Seconds in which the trainer computes in a step."""
        size, episodes = self.deployment.batch_size, self.episodes
        number, tokens = size * episodes.group_episodes, size * episodes.group_forwarded
        return float(self.slower[1]) * self.costs.trainer.step_s(tokens, number, self.deployment.num_ranks)

    @property
    def load_s(self) -> float:
        return float(self.slower[0]) * self.costs.publish.load_s

    @property
    def publish_s(self) -> float:
        num_loads = self.deployment.num_servers if self.deployment.update_order == "rolling" else 1
        return self.costs.publish.transfer_s + num_loads * self.load_s

    @property
    def most_running(self) -> float:
        """Requests that one server can run at once."""
        decode = self.costs.decode
        room = decode.kv_tokens / self.episodes.context if decode.kv_tokens else math.inf
        return max(min(decode.max_running_requests, room), 1.0)

    def _update(self, share: float) -> float:
        """One round. share: of the way to its result that is gone. Returns the relative change that it wanted."""
        costs, deployment, episodes = self.costs, self.deployment, self.episodes
        self._play()
        per_server = self.weight / deployment.num_servers
        self.running = per_server * self._fold(self.begun[episodes.has_turn], self.ended[episodes.has_turn])
        """[N] Requests on each server."""
        self.playing = self.weight * self._fold(self.starts, self.ends)
        """[N] Episodes that run."""
        pace = self._pace(per_server)
        change = float(np.abs(pace / self.pace - 1).mean())
        self.pace = self.pace ** (1 - share) * pace**share
        controller = costs.controller
        work_s = controller.per_request_s * episodes.has_turn.sum() + controller.per_episode_s * len(episodes.new)
        controller_s = float(self.slower[2] * self.weight * work_s)
        self.controlling = min(controller_s / self.period_s, 1.0)
        self.computing = float(((1 - np.exp(-self.running)) * (1 - self.loading)).mean())
        busy = (self.computing + self.loading.mean(), min(self.trains_s / self.period_s, 1.0), self.controlling)
        self.slower = (self.slower + _slower(costs.shared, deployment, busy)) / 2
        places_s = self.weight * float((self.ends - self.starts).sum()) / deployment.max_concurrent_episodes
        waiting_s = max(self._mean_period(), controller_s)
        self.is_bound_by_places = places_s > waiting_s
        period_s = max(waiting_s, places_s)
        change = max(change, abs(period_s / self.period_s - 1))
        self.period_s = self.period_s ** (1 - share) * period_s**share
        return change

    def _play(self) -> None:
        """When episodes and their turns begin and end, in seconds since the admission of their batch."""
        episodes, costs, factor = self.episodes, self.costs.controller, self.deployment.tool_factor
        grid = np.linspace(0.0, self.period_s, _CELLS + 1)
        work = np.concatenate([[0.0], np.cumsum(self.pace)]) * self.period_s / _CELLS

        def after(t: np.ndarray, tokens: np.ndarray) -> np.ndarray:
            """When a request that begins at t has got so many tokens."""
            steps, rest = np.divmod(t, self.period_s)
            more, rest = np.divmod(np.interp(rest, grid, work) + tokens, work[-1])
            return (steps + more) * self.period_s + np.interp(rest, work, grid)

        busy = min(self.controlling, 0.98)
        request_s = self.slower[2] * costs.per_request_s * (1 + busy / (2 * (1 - busy)))  # M/D/1
        # The controller starts one after another; beyond max_concurrent_episodes, one starts when another ends.
        order, limit = (np.arange(len(episodes.new)) + 0.5) * self.weight, self.deployment.max_concurrent_episodes
        waiting = np.maximum(order + self.left_over - limit, 0.0)
        self.starts = (
            order * self.slower[2] * (costs.per_episode_s + costs.per_request_s) + waiting * self.mean_s / limit
        )
        self.begun, self.ended = np.zeros_like(episodes.new), np.zeros_like(episodes.new)
        at = self.starts + factor * episodes.before_s
        for turn, has in enumerate(episodes.has_turn.T):
            self.begun[:, turn] = at = at + has * (request_s + costs.latency_s / 2)
            # It waits for the end of an iteration: half of one.
            self.ended[:, turn] = at = np.where(has, after(at, episodes.new[:, turn] + 0.5), at)
            at = at + has * costs.latency_s / 2 + factor * episodes.tool_s[:, turn]
        # A group ends with the last episode that it needs; extra ones are cut then.
        self.group_ends = np.sort(at.reshape(-1, episodes.size), axis=1)[:, self.deployment.group_size - 1]
        cut = np.repeat(self.group_ends, episodes.size)
        self.begun, self.ended = (np.minimum(times, cut[:, None]) for times in (self.begun, self.ended))
        self.ends = np.minimum(at, cut)
        self.mean_s = float((self.ends - self.starts).mean())
        self.left_over = self.weight * float((self.ends // self.period_s - self.starts // self.period_s).sum())
        """Episodes that run when the next batch is admitted."""

    def _fold(self, begun: np.ndarray, ended: np.ndarray) -> np.ndarray:
        """[N] How many spans hold each moment, with those that earlier steps began."""
        counts = np.zeros(_CELLS)
        for times, sign in ((begun, 1.0), (ended, -1.0)):
            steps, cell = np.divmod(times / self.period_s * _CELLS, _CELLS)
            place = np.minimum(cell.astype(int), _CELLS - 1)
            inside = np.bincount(place, place + 1 - cell, _CELLS)  # the part of its first moment
            counts += sign * (np.cumsum(np.bincount(place, minlength=_CELLS)) - steps.sum())
            counts -= sign * (np.bincount(place, minlength=_CELLS) - inside)
        return counts

    def _pace(self, per_server: float) -> np.ndarray:
        """[N] By the requests that run, those that arrive, and the load of new weights at the end of a step."""
        costs, episodes, cell_s = self.costs, self.episodes, self.period_s / _CELLS
        has = episodes.has_turn
        cells = (self.begun[has] / cell_s).astype(int) % _CELLS
        reads = costs.prefill.per_token_s * episodes.unread[has] + costs.prefill.per_request_s
        reads_s = per_server * np.bincount(cells, reads, _CELLS)
        if (mode := self.deployment.pause_mode) != "in_place":  # running requests are read again after an update
            again_s = costs.prefill.per_token_s * episodes.context + costs.prefill.per_request_s * (mode == "abort")
            reads_s[0] += again_s * min(self.running[-1], self.most_running)
        left_s = np.arange(_CELLS, 0, -1) * cell_s
        self.loading = np.clip((self.load_s - left_s) / cell_s + 1, 0.0, 1.0)
        """[N] Share of each moment in which servers stand still."""
        reading = _spent(self.slower[0] * reads_s, cell_s * (1 - self.loading)) / cell_s
        number, most = np.maximum(self.running, 1.0), self.most_running
        iteration_s = self.slower[0] * costs.decode.iteration_s(np.minimum(number, most), episodes.context)
        return np.maximum(1 - self.loading - reading, 1e-6) / iteration_s * np.minimum(most / number, 1.0)

    def _mean_period(self) -> float:
        deployment, snapshot_s = self.deployment, self.costs.trainer.snapshot_s
        ends = np.sort(self.group_ends)
        quantiles = np.arange(1, _FILLING + _STEPS + 1) * 0.6180339887498949 % 1.0
        places = (len(ends) * quantiles ** (1 / self.num_groups)).astype(int)
        slowest = ends[np.minimum(places, len(ends) - 1)]
        step_s, ahead = self.trains_s + snapshot_s, deployment.max_staleness + 1
        taken = list(repeat(0.0, ahead))
        for wait_s in (step_s + self.publish_s + slowest).tolist():
            taken.append(max(taken[-1] + step_s, taken[-ahead] + wait_s))
        return (taken[-1] - taken[-1 - _STEPS]) / _STEPS

    def staleness(self) -> dict[int, float]:
        """Versions behind -> share of the trained tokens."""
        episodes, eta, period_s = self.episodes, self.deployment.max_staleness, self.period_s
        after_s = self.trains_s + self.costs.trainer.snapshot_s + self.publish_s
        is_trained = episodes.has_turn & episodes.finished[:, None]
        counts = np.zeros(eta + 1)
        for share in (np.arange(8) + 0.5) / 8:
            sampled = self.begun + share * (self.ended - self.begun)
            taken = np.full(len(sampled), (eta + 1) * period_s - after_s)
            if self.is_bound_by_places:  # groups are admitted all the time, and wait for half a batch
                taken = np.repeat(self.group_ends, episodes.size) + share * period_s
            behind = np.ceil((taken[:, None] - sampled + after_s) / period_s) - 1
            counts += np.bincount(behind.clip(0, eta).astype(int)[is_trained], episodes.new[is_trained], eta + 1)
        return {versions: float(share) for versions, share in enumerate(counts / counts.sum()) if share > 0}


def _spent(arriving_s: np.ndarray, room_s: np.ndarray) -> np.ndarray:
    """[N] Seconds of each moment spent on work that has arrived; what is left when a step ends goes on in the next."""
    left_s, spent_s = 0.0, np.zeros(len(arriving_s))
    for _ in range(2):
        for i, (new_s, most_s) in enumerate(zip(arriving_s.tolist(), room_s.tolist(), strict=True)):
            spent_s[i] = min(left_s + new_s, most_s)
            left_s += new_s - spent_s[i]
    return spent_s


def _slower(shared: SharedCores | None, deployment: Deployment, busy: tuple[float, float, float]) -> np.ndarray:
    """How many times as long servers, ranks and the controller take.

    busy: shares of their time. Each process computes independently of the others, except that ranks compute together.
    """
    if shared is None:
        return np.ones(3)
    cores = (shared.server, shared.rank * deployment.num_ranks, shared.controller)
    numbers = (deployment.num_servers if shared.server else 0, 1, 1)
    found = np.ones(3)
    for own in np.flatnonzero(cores):
        wanted = np.eye(1, cores[own] + 1, cores[own])[0]  # [K] chances that k cores are wanted
        for kind in range(3):
            one = np.zeros(cores[kind] + 1)
            one[0] += 1 - busy[kind]
            one[-1] += busy[kind]
            for _ in range(numbers[kind] - (kind == own)):
                wanted = np.convolve(wanted, one)
        found[own] = wanted @ np.maximum(np.arange(len(wanted)) / shared.cores, 1.0)
    return found
