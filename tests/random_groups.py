"""Finished groups at random, with everything that an algorithm may look at."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from arl.api.types import Group, Trajectory, TurnSpan

VERSION, MAX_STALENESS = 4, 4
"""The trainer's; tokens are of versions 0 to 4."""

GROUP_SIZES = (6, 1, 5, 4)
"""A whole group, one of a single episode, one in which an episode failed, and one of equal rewards."""

ROLES = ("solver", "critic")


def random_groups(seed: int, vocabulary: int = 256) -> list[Group]:
    """Episodes of one or two agents, with turns, process rewards, named rewards, and the rewards of greedy episodes.

    Each group begins with a prompt of its own. Some answers are a single token; one trajectory trains no token, and
    some were cut off. Two agents' trajectories of one episode share its beginning.
    """
    generator = torch.Generator().manual_seed(seed)
    return [_group(number, size, generator, vocabulary) for number, size in enumerate(GROUP_SIZES)]


def _group(number: int, size: int, generator: torch.Generator, vocabulary: int) -> Group:
    prompt = _integers(vocabulary, 10, generator)
    trajectories, episodes = list[Trajectory](), list[int]()
    for episode in range(size):
        roles = ROLES if episode % 3 == 0 else ROLES[:1]
        for role in roles:
            trajectory = _trajectory(prompt, role, generator, vocabulary)
            if number == 3:
                trajectory = replace(trajectory, reward=0.5)
            if (number, episode, role) == (0, 1, "solver"):
                trajectory = replace(trajectory, loss_mask=(0,) * len(trajectory.token_ids))
            trajectories.append(trajectory)
            episodes.append(episode)
    rewards = torch.rand(2, generator=generator).tolist()
    return Group(
        group_id=number,
        example_id=(0, number),
        stamp=0,
        trajectories=tuple(trajectories),
        episode_indices=tuple(episodes),
        greedy_rewards=dict(zip(ROLES, rewards, strict=True)),
    )


def _trajectory(prompt: list[int], role: str, generator: torch.Generator, vocabulary: int) -> Trajectory:
    """A prompt, then one to three turns of 1 to 6 sampled tokens, each followed by an answer of the environment."""
    token_ids, mask, turns = list(prompt), [0] * len(prompt), list[TurnSpan]()
    num_turns = 1 + _integer(3, generator)
    for turn in range(num_turns):
        length = 1 + _integer(6, generator)
        reward, state = 0.1 * _integer(3, generator), f"state {_integer(2, generator)}"
        turns.append(TurnSpan(start=len(token_ids), stop=len(token_ids) + length, reward=reward, state=state))
        token_ids += _integers(vocabulary, length, generator)
        mask += [1] * length
        if turn < num_turns - 1:
            token_ids += _integers(vocabulary, 3, generator)
            mask += [0] * 3
    sampled = torch.tensor(mask)
    versions = torch.randint(0, VERSION + 1, (len(mask),), generator=generator)
    logprobs = -0.1 - 5 * torch.rand(len(mask), generator=generator)
    rewards = torch.rand(2, generator=generator).tolist()
    return Trajectory(
        token_ids=tuple(token_ids),
        loss_mask=tuple(mask),
        behavior_logprobs=tuple((logprobs * sampled).tolist()),
        versions=tuple(torch.where(sampled.bool(), versions, -1).tolist()),
        reward=float(_integer(2, generator)),
        rewards={"right": rewards[0], "short": rewards[1]},
        token_rewards=tuple((0.02 * torch.randn(len(mask), generator=generator) * sampled).tolist()),
        turns=tuple(turns),
        is_truncated=_integer(4, generator) == 0,
        role=role,
        temperature=0.8,
    )


def with_trajectories_reordered(groups: Sequence[Group], seed: int) -> list[Group]:
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(len(group.trajectories), generator=generator).tolist() for group in groups]
    return [
        replace(
            group,
            trajectories=tuple(group.trajectories[i] for i in order),
            episode_indices=tuple(group.episode_indices[i] for i in order),
        )
        for group, order in zip(groups, orders, strict=True)
    ]


def _integer(limit: int, generator: torch.Generator) -> int:
    return int(torch.randint(0, limit, (1,), generator=generator))


def _integers(limit: int, count: int, generator: torch.Generator) -> list[int]:
    return torch.randint(0, limit, (count,), generator=generator).tolist()
