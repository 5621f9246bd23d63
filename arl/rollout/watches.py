"""Two watches over a run: for code that blocks the event loop, and for groups that give nothing to train on."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from dataclasses import dataclass
from enum import Enum
from statistics import fmean

from arl.api.errors import StarvedError
from arl.rollout.ledger import GroupOutcome

log = logging.getLogger(__name__)

_BLOCKED_S = 1.0
"""A longer lag is a block."""
_WINDOW_S = 60.0
_TOLERATED_S = 3.0
"""A window whose blocks take longer together causes a warning."""


class LagMonitor:
    """Wakes up every `period_s`, notes how late it was, and warns if the loop is blocked again and again.

    The first window does not count, as modules are imported and kernels compiled then; nor does the window after a
    warning. culprit: what the warning names. recent_s: the last `keep` lags, in seconds.
    """

    def __init__(self, culprit: str, *, period_s: float = 0.1, keep: int = 1000) -> None:
        self.recent_s: deque[float] = deque(maxlen=keep)
        self._culprit = culprit
        self._period_s = period_s
        self._blocks: deque[tuple[float, float]] = deque()
        self._quiet_until: float | None = None

    @property
    def worst_s(self) -> float:
        """The longest of the recent lags."""
        return max(self.recent_s, default=0.0)

    async def run(self) -> None:
        """Watch until cancelled."""
        clock = asyncio.get_running_loop()
        while True:
            due = clock.time() + self._period_s
            await asyncio.sleep(self._period_s)
            now = clock.time()
            self.note(now - due, now)

    def note(self, lag_s: float, now: float) -> None:
        """Count a lag that ended at `now`, in seconds of any clock."""
        self.recent_s.append(lag_s)
        if self._quiet_until is None:
            self._quiet_until = now + _WINDOW_S
        if now < self._quiet_until or lag_s <= _BLOCKED_S:
            return
        self._blocks.append((now, lag_s))
        while self._blocks[0][0] < now - _WINDOW_S:
            self._blocks.popleft()
        blocked_s = sum(block_s for _, block_s in self._blocks)
        if blocked_s > _TOLERATED_S:
            log.warning(
                "the event loop was blocked for %.1f of the last %.0f s, probably by %s (or the machine has no core to "
                "spare): every episode and request stood still. Await slow work, or move it off the loop "
                "(asyncio.to_thread, RewardPool)",
                blocked_s,
                _WINDOW_S,
                self._culprit,
            )
            self._blocks.clear()
            self._quiet_until = now + _WINDOW_S


# Groups that give nothing to train on.

_MOSTLY = 0.9
"""A window is worth a warning if this share of its groups was fruitless."""


class Reason(Enum):
    """Why a group is not trained: a description of such groups, and what to do about them."""

    RETURNED_NONE = (
        "too many of their episodes returned None",
        "see why arun_episode returns None: it is for examples that turn out useless, not for wrong answers",
    )
    FAILED = (
        "too many of their episodes failed",
        "see the errors above; rollout.min_group_size and rollout.extra_episodes say how many of a group may fail",
    )
    NO_BASELINE = (
        "their greedy episode failed or returned None",
        "see why greedy episodes do not finish, which algorithm.advantage.baseline needs",
    )
    NOT_COMPARABLE = (
        "advantages cannot compare them",
        "let arun_episode return what algorithm.advantage needs, or choose another algorithm",
    )
    EQUAL_REWARDS = (
        "the rewards of each, process rewards included, are equal",
        "take examples that are sometimes solved, raise rollout.group_size, or unset algorithm.dynamic_sampling",
    )
    FILTERED = ("the filter given as keep refused them", "see what keep refuses")
    STRAGGLED = (
        "they kept the trainer waiting",
        "see whether rollout.drop_stragglers_after_s is shorter than a usual episode",
    )

    def __init__(self, description: str, advice: str) -> None:
        self.description = description
        self.advice = advice


@dataclass(frozen=True, slots=True, kw_only=True)
class Fruitless:
    """A group that is not trained."""

    outcome: GroupOutcome
    """Of its example."""
    reason: Reason
    detail: str = ""
    """More about the reason, if more is known."""
    reward: float | None = None
    """The mean over its episodes that finished."""


class StarvationWatch:
    """Looks at groups as they end, in windows, and warns of a window that was mostly fruitless.

    The first window holds `window` groups, and each warning doubles it, so that warnings become rarer. A detail is
    logged at once, and once. After `patience` fruitless groups in a row it raises StarvedError.
    """

    def __init__(self, *, window: int, patience: int) -> None:
        self._window = window
        self._patience = patience
        self._seen = 0
        self._recent: list[Fruitless] = []
        self._in_a_row: list[Fruitless] = []
        self._details: set[str] = set()

    def fruitful(self) -> None:
        """Note a group that can be trained on."""
        self._in_a_row.clear()
        self._end_of_group()

    def fruitless(self, group: Fruitless) -> None:
        """Note a group that cannot be trained on. Raises StarvedError."""
        if group.detail not in {"", *self._details}:
            self._details.add(group.detail)
            log.warning("a group was %s: %s", group.outcome.name.lower(), group.detail)
        self._recent.append(group)
        self._in_a_row.append(group)
        if len(self._in_a_row) >= self._patience:
            raise StarvedError(
                f"the last {len(self._in_a_row)} groups were all rejected or dropped, so there is nothing to train on: "
                f"{_account(self._in_a_row)}"
            )
        self._end_of_group()

    def _end_of_group(self) -> None:
        self._seen += 1
        if self._seen < self._window:
            return
        seen, recent = self._seen, self._recent
        self._seen, self._recent = 0, []
        if len(recent) >= _MOSTLY * seen:
            self._window *= 2
            log.warning(
                "%d of the last %d groups gave nothing to train on, and others run in their place: %s",
                len(recent),
                seen,
                _account(recent),
            )


def _account(groups: list[Fruitless]) -> str:
    """How many groups there were for each reason, the most frequent first, and what to do about that one."""
    (worst, _), *_ = counts = Counter(group.reason for group in groups).most_common()
    told = "; ".join(_told(reason, [group for group in groups if group.reason is reason]) for reason, _ in counts)
    return f"{told}. What to do: {worst.advice}"


def _told(reason: Reason, groups: list[Fruitless]) -> str:
    ended = " and ".join(sorted({group.outcome.name.lower() for group in groups}))
    rewards = [group.reward for group in groups if group.reward is not None]
    more = [f"mean reward {fmean(rewards):.3g}"] if rewards and reason is Reason.EQUAL_REWARDS else []
    more += [f"the last one: {groups[-1].detail}"] if groups[-1].detail else []
    return f"{len(groups)} {ended}, as {reason.description}" + (f" ({'; '.join(more)})" if more else "")
