"""Finished groups at random, with everything that an algorithm may look at."""

import random
from collections.abc import Sequence
from dataclasses import replace

from records import grouped

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
    chance = random.Random(seed)
    return [_group(number, size, chance, vocabulary) for number, size in enumerate(GROUP_SIZES)]


def _group(number: int, size: int, chance: random.Random, vocabulary: int) -> Group:
    prompt = chance.choices(range(vocabulary), k=10)
    trajectories, episodes = list[Trajectory](), list[int]()
    for episode in range(size):
        roles = ROLES if episode % 3 == 0 else ROLES[:1]
        for role in roles:
            trajectory = _trajectory(prompt, role, chance, vocabulary)
            if number == 3:
                trajectory = replace(trajectory, reward=0.5)
            if (number, episode, role) == (0, 1, "solver"):
                trajectory = replace(trajectory, loss_mask=(0,) * len(trajectory.token_ids))
            trajectories.append(trajectory)
            episodes.append(episode)
    rewards = {role: chance.random() for role in ROLES}
    return grouped(*trajectories, number=number, episode_indices=tuple(episodes), greedy_rewards=rewards)


def _trajectory(prompt: list[int], role: str, chance: random.Random, vocabulary: int) -> Trajectory:
    """A prompt, then one to three turns of 1 to 6 sampled tokens, each followed by an answer of the environment."""
    token_ids, mask, turns = list(prompt), [0] * len(prompt), list[TurnSpan]()
    num_turns = chance.randint(1, 3)
    for turn in range(num_turns):
        length, reward, state = chance.randint(1, 6), 0.1 * chance.randrange(3), f"state {chance.randrange(2)}"
        turns.append(TurnSpan(start=len(token_ids), stop=len(token_ids) + length, reward=reward, state=state))
        answer = 3 if turn < num_turns - 1 else 0
        token_ids += chance.choices(range(vocabulary), k=length + answer)
        mask += [1] * length + [0] * answer
    return Trajectory(
        token_ids=tuple(token_ids),
        loss_mask=tuple(mask),
        behavior_logprobs=tuple((-0.1 - 5 * chance.random()) * sampled for sampled in mask),
        versions=tuple(chance.randint(0, VERSION) if sampled else -1 for sampled in mask),
        reward=float(chance.randrange(2)),
        rewards={"right": chance.random(), "short": chance.random()},
        token_rewards=tuple(chance.gauss(0, 0.02) * sampled for sampled in mask),
        turns=tuple(turns),
        is_truncated=chance.randrange(4) == 0,
        role=role,
        temperature=0.8,
    )


def with_trajectories_reordered(groups: Sequence[Group], seed: int) -> list[Group]:
    chance = random.Random(seed)
    orders = [chance.sample(range(len(group.trajectories)), len(group.trajectories)) for group in groups]
    return [
        replace(
            group,
            trajectories=tuple(group.trajectories[i] for i in order),
            episode_indices=tuple(group.episode_indices[i] for i in order),
        )
        for group, order in zip(groups, orders, strict=True)
    ]
