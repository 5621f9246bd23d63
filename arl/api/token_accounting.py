"""Records of the token ledger (arl/rollout/token_ledger.py) for the event log."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from arl.api.events import Event


class Fate(StrEnum):
    """The fate of a token that a server sampled and the client received."""

    TRAINED = "trained"
    """It was in a trained batch, with loss_mask 1."""
    MASKED = "masked"
    """It was in a trained batch, but not trained: loss_mask 0, in no trajectory, or in one that the algorithm leaves
    out, as truncated or compared with nothing."""
    REJECTED = "rejected"
    """Its episode returned None, or its group was rejected."""
    DROPPED = "dropped"
    """Its group was dropped: too many others failed, or advantages could not compare them."""
    FAILED = "failed"
    """Its episode raised or timed out."""
    RETRIED = "retried"
    """Its attempt failed, and another attempt followed."""
    SURPLUS = "surplus"
    """Its episode finished after enough others of its group had finished."""
    OVERTAKEN = "overtaken"
    """Its episode was cut because enough others of its group had finished."""
    STRAGGLER = "straggler"
    """Its group was cut because it kept the trainer waiting."""
    BASELINE = "baseline"
    """It belongs to a greedy episode, of which only the reward is used."""
    EVALUATION = "evaluation"
    STOPPED = "stopped"
    """In flight, or not yet in a checkpoint, when a start of the run ended: its example runs again."""
    RETURNED = "returned"
    """Its group was in a checkpoint, but changed settings made it too old for any batch: its example runs again."""


class TokenTally(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tokens of one fate."""

    tokens: int = 0
    episodes: int = 0
    """Episodes, or attempts for RETRIED. An episode with both trained and masked tokens counts as trained."""
    server_s: float = 0.0
    """How long servers had their requests, by the servers' clocks; divided by tokens if an episode has several
    fates."""
    by_length: dict[str, int] = {}
    """Tokens by the length of their episode, in received tokens: n stands for 2^(n-1) to 2^n - 1, and 0 for none."""


class TokensCounted(Event, frozen=True, kw_only=True):
    """The token ledger, over all starts of the run. `received` is the sum of `open`, `waiting` and the fates.

    `asked` is the sum of `received` and `unreceived`: tokens that episodes asked for, by requests that have ended.
    """

    received: int
    open: int = 0
    """Tokens of episodes that run, or whose group runs."""
    waiting: int = 0
    """Tokens of groups that wait to be trained."""
    fates: dict[str, TokenTally] = msgspec.field(default_factory=dict[str, TokenTally])
    asked: int = 0
    unreceived: int = 0
    """Tokens that were asked for and not received: max_new_tokens of each unanswered request. Servers generated at most
    so many for them."""
    unanswered: int = 0
    """Requests that were cancelled, timed out, or failed too often."""
    trained_again: int = 0
    """Trained in a later batch, too (rollout.replay_groups). Not part of the sum."""
    unknown: int = 0
    """Trained, but no response to their episode had them: of another sampler, or twice in an episode's trajectories.
    Not part of the sum."""
