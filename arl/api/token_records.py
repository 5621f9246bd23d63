"""What the event log gets of the token ledger (arl/rollout/token_ledger.py)."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from arl.api.events import Event


class Fate(StrEnum):
    """What became of a token that a server sampled and the client received."""

    TRAINED = "trained"
    """It was in a trained batch, with loss_mask 1."""
    MASKED = "masked"
    """Its episode was trained, but not this token: loss_mask 0, a truncated trajectory, or in no trajectory."""
    REJECTED = "rejected"
    """Its episode returned None, or its group was rejected."""
    DROPPED = "dropped"
    """Its group was dropped: too many others failed, or advantages could not compare them."""
    FAILED = "failed"
    """Its episode raised or timed out."""
    RETRIED = "retried"
    """Of an attempt that failed and was followed by another."""
    SURPLUS = "surplus"
    """Its episode finished, but enough others of its group had."""
    OVERTAKEN = "overtaken"
    """Its episode was cut because enough others of its group had finished."""
    STRAGGLER = "straggler"
    """Its group was cut because it kept the trainer waiting."""
    BASELINE = "baseline"
    """Of a greedy episode, whose reward alone is used."""
    EVALUATION = "evaluation"
    STOPPED = "stopped"
    """In flight, or not yet in a checkpoint, when a start of the run ended: its example runs again."""
    RETURNED = "returned"
    """Of a checkpoint's group that no batch could hold in time under changed settings: its example runs again."""


class TokenTally(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tokens of one fate."""

    tokens: int = 0
    episodes: int = 0
    """Or attempts, or groups' episodes. One of which some tokens are trained and some masked counts as trained."""
    server_s: float = 0.0
    """How long servers had their requests, by their own clocks; shared by tokens where fates differ."""
    by_length: dict[str, int] = {}
    """Tokens by the length of their episode in received tokens: n stands for 2^(n-1) to 2^n - 1, 0 for none."""


class TokensCounted(Event, frozen=True, kw_only=True):
    """The token ledger, over all starts of the run. `received` is the sum of `open`, `waiting` and the fates."""

    received: int
    open: int = 0
    """Of episodes that run, or whose group runs."""
    waiting: int = 0
    """Of groups that wait to be trained."""
    fates: dict[str, TokenTally] = msgspec.field(default_factory=dict[str, TokenTally])
    trained_again: int = 0
    """Trained in a later batch, too (rollout.replay_groups). Not part of the sum."""
    unknown: int = 0
    """Trained, but no response to their episode had them: of another sampler, or twice in an episode's trajectories.
    Not part of the sum."""
