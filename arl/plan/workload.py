"""What episodes ask of the servers and the trainer: measured episodes, from which simulated ones are drawn."""

from __future__ import annotations

import math
from typing import Literal

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of all records of costs. Numbers are finite, and at least 0 unless a field says otherwise."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, (int, float)) and not (math.isfinite(value) and (value >= 0 or name in self._signed)):
                raise ValueError(f"{name} is {value}; give a finite number of at least 0")

    @property
    def _signed(self) -> tuple[str, ...]:
        """The fields that may be below 0."""
        return ()


class MeasuredTurn(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One request to the model, and what the episode does after it."""

    prompt_tokens: int
    """Tokens of the prompt, cached ones included."""
    cached_tokens: int = 0
    """Of these, how many the server need not compute while the session stays with the same server and weights. Of an
    episode's first turn: how many it finds cached whatever the server, as they are common to all episodes or to the
    group. A later turn whose session had to move finds as many as the first turn did."""
    new_tokens: int
    """Tokens that the model samples; at least 1."""
    tool_s: float = 0.0
    """Seconds from the answer to the next request, or to the end of the episode: tools, rewards, the environment. CPU
    time of the controller's own process is in ControllerCosts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.new_tokens < 1 or not 0 <= self.cached_tokens <= self.prompt_tokens or self.prompt_tokens < 1:
            raise ValueError(
                f"a turn has {self.prompt_tokens} prompt tokens, {self.cached_tokens} of them cached, and "
                f"{self.new_tokens} new ones; give at least 1 of prompt and new, and no more cached than prompt"
            )


class MeasuredEpisode(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One attempt at an episode."""

    group: int
    """Episodes with the same number are of one example: simulated groups are drawn group by group."""
    turns: tuple[MeasuredTurn, ...]
    """In order. Simulated episodes take them one after another."""
    before_s: float = 0.0
    """Seconds from the beginning of the episode to its first request."""
    tokens: int
    """Tokens that the trainer forwards for it, over all its trajectories."""
    shared_tokens: int = 0
    """Of these, how many it shares with the other episodes of its group, where the trainer forwards them once."""
    reward: float = 0.0
    """May be below 0. With drop_equal_rewards, groups whose rewards are all equal are rejected."""
    how: Literal["finished", "rejected", "failed"] = "finished"
    """rejected: arun_episode returned None. failed: it raised, or took too long."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shared_tokens > self.tokens:
            raise ValueError(f"an episode of {self.tokens} tokens shares {self.shared_tokens} of them")

    @property
    def _signed(self) -> tuple[str, ...]:
        return ("reward",)


class Workload(Record, frozen=True, kw_only=True):
    """Measured episodes. A simulated group draws one measured group, and its episodes from those of that group."""

    episodes: tuple[MeasuredEpisode, ...]
    num_examples: int = 10_000
    """Examples of the dataset: the ledger shuffles them in each epoch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.episodes or not self.num_examples:
            raise ValueError("a workload needs at least one measured episode, and one example")
        if not any(episode.turns for episode in self.episodes):
            raise ValueError("no episode of the workload has a turn")
