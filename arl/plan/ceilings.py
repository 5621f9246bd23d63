"""Throughput that nothing can exceed, without a simulation: where a search begins, and what it need not try."""

from __future__ import annotations

from functools import lru_cache
from statistics import fmean

from arl.plan.costs import Costs, Deployment
from arl.plan.workload import MeasuredEpisode, Workload


def ceiling(costs: Costs, deployment: Deployment) -> float:
    """Episodes a second: the lowest of all."""
    ceilings = (trainers_ceiling, servers_ceiling, buffers_ceiling)
    return min(of_part(costs, deployment) for of_part in ceilings)


def trainers_ceiling(costs: Costs, deployment: Deployment) -> float:
    """Episodes a second that the trainer could train if batches were always there."""
    return deployment.batch_size * deployment.group_size / _step_s(costs, deployment)


def servers_ceiling(costs: Costs, deployment: Deployment) -> float:
    """Episodes a second that the servers could answer in the best batches that they can have, without pauses."""
    most = min(costs.decode.max_running_requests, max(deployment.most_in_flight // deployment.num_servers, 1))
    sizes = sorted({1, *(max(round(most * share / 16), 1) for share in range(1, 17))})
    share_kept = deployment.group_size / (deployment.group_size + deployment.extra_episodes)
    return deployment.num_servers * share_kept / min(_server_s(costs, n) for n in sizes)


def buffers_ceiling(costs: Costs, deployment: Deployment) -> float:
    """Episodes a second if each had a server for itself: a group has a place from its admission until it is published.

    max_concurrent_episodes bounds them, too.
    """
    longest_s, mean_s = _durations(costs, deployment.tool_factor)
    is_whole = deployment.extra_episodes == 0 and deployment.group_size >= _largest_group(costs.workload)
    publish_s = costs.publish.transfer_s + costs.publish.per_server_s * deployment.num_servers + costs.publish.load_s
    charged_s = (longest_s if is_whole else mean_s) + _step_s(costs, deployment) + publish_s
    room = (deployment.max_staleness + 1) * deployment.batch_size * deployment.group_size
    return min(room / charged_s, deployment.max_concurrent_episodes / mean_s)


def _step_s(costs: Costs, deployment: Deployment) -> float:
    """A mean batch, and its snapshot."""
    mean, shared = _tokens(costs.workload)
    number = deployment.batch_size * deployment.group_size
    tokens = number * mean - (number - deployment.batch_size) * shared
    return costs.trainer.step_s(tokens, number, deployment.num_ranks) + costs.trainer.snapshot_s


def _server_s(costs: Costs, num_running: int) -> float:
    """Seconds of one server for an episode, the mean over the workload, with so many running requests."""
    turns, new, context, unread = _turn_means(costs.workload)
    token_s = costs.decode.iteration_s(num_running, round(num_running * context)) / num_running
    decoded = new - turns if costs.prefill.stops_decoding else new
    return token_s * decoded + costs.prefill.per_token_s * unread + costs.prefill.per_request_s * turns


def _alone_s(costs: Costs, episode: MeasuredEpisode, tool_factor: float) -> float:
    """Seconds of an episode with a server for itself."""
    seconds = tool_factor * (episode.before_s + sum(turn.tool_s for turn in episode.turns))
    for turn in episode.turns:
        reading_s = costs.prefill.per_token_s * (turn.prompt_tokens - turn.cached_tokens) + costs.prefill.per_request_s
        context = turn.prompt_tokens + turn.new_tokens // 2
        seconds += reading_s + (turn.new_tokens - 1) * costs.decode.iteration_s(1, context)
        seconds += costs.controller.latency_s
    return seconds


# What takes a look at all episodes, kept for the costs of one search.


@lru_cache(maxsize=8)
def _durations(costs: Costs, tool_factor: float) -> tuple[float, float]:
    """The longest of a group, the mean over groups; and the mean over episodes."""
    groups: dict[int, list[float]] = {}
    for episode in costs.workload.episodes:
        groups.setdefault(episode.group, []).append(_alone_s(costs, episode, tool_factor))
    return fmean(max(group) for group in groups.values()), fmean(s for group in groups.values() for s in group)


@lru_cache(maxsize=8)
def _largest_group(workload: Workload) -> int:
    groups = [episode.group for episode in workload.episodes]
    return max(groups.count(group) for group in set(groups))


@lru_cache(maxsize=8)
def _tokens(workload: Workload) -> tuple[float, float]:
    """Tokens of a finished episode, and those of them that it shares: means."""
    episodes = [one for one in workload.episodes if one.how == "finished"] or workload.episodes
    return fmean(one.tokens for one in episodes), fmean(one.shared_tokens for one in episodes)


@lru_cache(maxsize=8)
def _turn_means(workload: Workload) -> tuple[float, float, float, float]:
    """Means of an episode: turns, new tokens, the context that a new token sees, uncached prompt tokens."""
    number = len(workload.episodes)
    turns = [turn for episode in workload.episodes for turn in episode.turns]
    new = sum(turn.new_tokens for turn in turns)
    context = sum(turn.new_tokens * (turn.prompt_tokens + turn.new_tokens / 2) for turn in turns) / max(new, 1)
    unread = sum(turn.prompt_tokens - turn.cached_tokens for turn in turns)
    return len(turns) / number, new / number, context, unread / number
