"""TokenLedger: records the fate of every token that servers generated for this run.

    a response --answered--> open, by episode --settle--> a Fate
                                |
                                +--hold--> waiting, by group --trained--> TRAINED, MASKED
                                                             --returned--> RETURNED

At every moment `received` is the sum of open, waiting and settled tokens. Only `answered` adds to it. `unreceived` is
what was asked for and not received; `asked` is the sum of both. Checkpoints hold the ledger. When a start continues
from a checkpoint, tokens that were open in it, or came after it, are STOPPED.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from arl.api.events import Fate, TokensCounted, TokenTally
from arl.api.types import Group


@dataclass(slots=True)
class Spent:
    """The cost of an episode's responses."""

    tokens: int = 0
    server_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Tally:
    """The mutable form of TokenTally."""

    tokens: int = 0
    episodes: int = 0
    server_s: float = 0.0
    by_length: Counter[int] = field(default_factory=Counter[int])

    def add(self, spent: Spent, tokens: int, *, episodes: int = 1) -> None:
        """Count `tokens` of an episode's tokens, and their share of its seconds."""
        self.tokens += tokens
        self.episodes += episodes
        self.server_s += spent.server_s * tokens / spent.tokens if spent.tokens else spent.server_s * episodes
        if tokens:
            self.by_length[spent.tokens.bit_length()] += tokens


class TokenLedger:
    """Accounts for the tokens of one run. All calls are made on one event loop."""

    def __init__(self) -> None:
        self.received = 0
        self.unreceived = 0
        self.num_unanswered = 0
        self.trained_again = 0
        self.unknown = 0
        self._open: dict[str, Spent] = {}
        self._waiting: dict[int, dict[int, Spent]] = {}
        """Group -> the index of each episode to train -> its cost."""
        self._tallies = {fate: Tally() for fate in Fate}

    @property
    def asked(self) -> int:
        """What episodes asked for, by requests that have ended."""
        return self.received + self.unreceived

    @property
    def num_open(self) -> int:
        return sum(spent.tokens for spent in self._open.values())

    @property
    def num_waiting(self) -> int:
        return sum(spent.tokens for group in self._waiting.values() for spent in group.values())

    def answered(self, episode: str, tokens: int, server_s: float) -> None:
        """Count a response. episode: the name in the event log."""
        self.received += tokens
        spent = self._open.setdefault(episode, Spent())
        spent.tokens += tokens
        spent.server_s += server_s

    def unanswered(self, tokens: int) -> None:
        """Count a request that ended without a response. tokens: the most that it asked for."""
        self.unreceived += tokens
        self.num_unanswered += 1

    def length(self, episode: str) -> int:
        """The number of tokens of an open episode so far."""
        return self._open[episode].tokens if episode in self._open else 0

    def settle(self, episode: str, fate: Fate) -> None:
        """Settle all open tokens of an episode, or of one attempt of it, with this fate."""
        self._tallies[fate].add(spent := self._open.pop(episode, Spent()), spent.tokens)

    def hold(self, group_id: int, episodes: Mapping[int, str]) -> None:
        """Let the open tokens of a group's episodes, given by index, wait for `trained`."""
        self._waiting[group_id] = {index: self._open.pop(name, Spent()) for index, name in episodes.items()}

    def trained(self, group: Group, is_trained: Sequence[bool] | None = None) -> None:
        """Settle a group that was in a trained batch. One whose episodes were never held is ignored.

        is_trained: whether the algorithm trained each trajectory; None: it trained all.
        """
        waiting = self._waiting.pop(group.group_id, None)
        if waiting is None:
            return
        trained = _trained_tokens(group, is_trained)
        for index, spent in waiting.items():
            tokens = min(trained[index], spent.tokens)
            self.unknown += trained[index] - tokens
            is_masked = not trained[index]
            self._tallies[Fate.TRAINED].add(spent, tokens, episodes=not is_masked)
            self._tallies[Fate.MASKED].add(spent, spent.tokens - tokens, episodes=is_masked)

    def replayed(self, group: Group, is_trained: Sequence[bool] | None = None) -> None:
        """Count a group that was trained once more. is_trained: as in `trained`."""
        self.trained_again += _trained_tokens(group, is_trained).total()

    def counted(self) -> TokensCounted:
        return TokensCounted(
            asked=self.asked,
            received=self.received,
            open=self.num_open,
            waiting=self.num_waiting,
            fates={
                fate.value: TokenTally(
                    tokens=tally.tokens,
                    episodes=tally.episodes,
                    server_s=round(tally.server_s, 6),
                    by_length={str(bits): number for bits, number in sorted(tally.by_length.items())},
                )
                for fate, tally in self._tallies.items()
                if tally.episodes or tally.tokens
            },
            unreceived=self.unreceived,
            unanswered=self.num_unanswered,
            trained_again=self.trained_again,
            unknown=self.unknown,
        )

    def summary(self) -> dict[str, float]:
        """Flat, for summary.json and metrics: tokens by fate, with their seconds and number of episodes."""
        found: dict[str, float] = {"tokens/asked": self.asked, "tokens/received": self.received}
        found |= {"tokens/unreceived": self.unreceived, "tokens/unanswered_requests": self.num_unanswered}
        found |= {"tokens/open": self.num_open, "tokens/waiting": self.num_waiting}
        for fate, tally in self._tallies.items():
            if not tally.episodes and not tally.tokens:
                continue
            found[f"tokens/{fate}"] = tally.tokens
            if tally.server_s:
                found[f"tokens/{fate}/server_s"] = tally.server_s
            if tally.episodes:
                found[f"tokens/{fate}/episodes"] = tally.episodes
        extra = {"tokens/trained_again": self.trained_again, "tokens/unknown": self.unknown}
        return found | {name: value for name, value in extra.items() if value}

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as JSON values."""
        return {
            "received": self.received,
            "trained_again": self.trained_again,
            "unknown": self.unknown,
            "unreceived": [self.unreceived, self.num_unanswered],
            "open": [[spent.tokens, spent.server_s] for spent in self._open.values()],
            "waiting": [
                [group_id, [[index, spent.tokens, spent.server_s] for index, spent in group.items()]]
                for group_id, group in self._waiting.items()
            ],
            "fates": {
                fate.value: [tally.tokens, tally.episodes, tally.server_s, sorted(tally.by_length.items())]
                for fate, tally in self._tallies.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any], waiting: Collection[int]) -> None:
        """Continue from `state_dict`. waiting: the ids of the checkpoint's groups that may still be trained.

        Open episodes, and those of other groups, run again.
        """
        self.received, self.trained_again, self.unknown = state["received"], state["trained_again"], state["unknown"]
        self.unreceived, self.num_unanswered = state["unreceived"]
        self._open = {}
        self._waiting = {}
        for name, (tokens, episodes, server_s, lengths) in state["fates"].items():
            by_length = Counter({int(bits): number for bits, number in lengths})
            self._tallies[Fate(name)] = Tally(tokens=tokens, episodes=episodes, server_s=server_s, by_length=by_length)
        for tokens, server_s in state["open"]:
            self._tallies[Fate.STOPPED].add(Spent(tokens, server_s), tokens)
        for group_id, episodes in state["waiting"]:
            spent = {index: Spent(tokens, server_s) for index, tokens, server_s in episodes}
            if group_id in waiting:
                self._waiting[group_id] = spent
            else:
                for one in spent.values():
                    self._tallies[Fate.RETURNED].add(one, one.tokens)

    def note_undone(self, told: TokensCounted) -> None:
        """Count tokens that earlier starts received, or missed, after the checkpoint. told: by the last of them."""
        self.unreceived = max(self.unreceived, told.unreceived)
        self.num_unanswered = max(self.num_unanswered, told.unanswered)
        if (tokens := told.received - self.received) > 0:
            self.received += tokens
            self._tallies[Fate.STOPPED].tokens += tokens


def _trained_tokens(group: Group, is_trained: Sequence[bool] | None) -> Counter[int]:
    """Episode index -> the number of its trained tokens."""
    trained = Counter[int]()
    chosen = [True] * len(group.trajectories) if is_trained is None else is_trained
    for index, trajectory, is_in in zip(group.episode_indices, group.trajectories, chosen, strict=True):
        trained[index] += trajectory.num_trained_tokens * is_in
    return trained
