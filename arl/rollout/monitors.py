"""Observers of a run: they count how episodes end, and watch for blocking code, useless groups and failures."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from arl.api.errors import FailureBudgetError, StarvedError
from arl.api.types import Group
from arl.rollout.episode import Episode
from arl.rollout.group import Fruitless, GroupRun, Reason
from arl.rollout.ledger import GroupOutcome

if TYPE_CHECKING:
    import numpy as np

log = logging.getLogger(__name__)

_BLOCKED_S = 1.0
"""A longer lag is a block."""
_WINDOW_S = 60.0
_TOLERATED_S = 3.0
"""A window whose blocks take longer together causes a warning."""


class LagMonitor:
    """Wakes up every `period_s`, notes how late it was, and warns if the loop is blocked repeatedly.

    The first window does not count, because of imports and compilation. The window after a warning does not count
    either.
    culprit: what the warning names. recent_s: the last `keep` lags, in seconds.
    """

    def __init__(self, culprit: str, *, period_s: float = 0.1, keep: int = 1000) -> None:
        self.recent_s: deque[float] = deque(maxlen=keep)
        self._culprit = culprit
        self._period_s = period_s
        self._blocks: deque[tuple[float, float]] = deque()
        self._quiet_until: float | None = None

    @property
    def worst_s(self) -> float:
        return max(self.recent_s, default=0.0)

    async def run(self) -> None:
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


_MOSTLY = 0.9
"""A window is worth a warning if this share of its groups was fruitless."""


class StarvationWatch:
    """Looks at groups as they end, and warns of a window of groups that were mostly fruitless.

    The first window holds `window` groups; each warning doubles it. A detail is logged at once, and once. After
    `patience` fruitless groups in a row it raises StarvedError.
    """

    def __init__(self, *, window: int, patience: int) -> None:
        self._window = window
        self._patience = patience
        self._seen = 0
        self._recent: list[Fruitless] = []
        self._in_a_row: list[Fruitless] = []
        self._details: set[str] = set()

    def fruitful(self) -> None:
        self._in_a_row.clear()
        self._end_of_group()

    def fruitless(self, group: Fruitless) -> None:
        """Raises StarvedError."""
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
    told, counts = list[str](), Counter(group.reason for group in groups).most_common()
    for reason, number in counts:
        own = [group for group in groups if group.reason is reason]
        ended = " and ".join(sorted({group.outcome.name.lower() for group in own}))
        rewards = [group.reward for group in own if group.reward is not None]
        more = [f"mean reward {fmean(rewards):.3g}"] if rewards and reason is Reason.EQUAL_REWARDS else []
        more += [f"the last one: {own[-1].detail}"] if own[-1].detail else []
        told.append(f"{number} {ended}, as {reason.description}" + (f" ({'; '.join(more)})" if more else ""))
    return f"{'; '.join(told)}. What to do: {counts[0][0].advice}"


_BY_CHANCE = 1e-4
"""A run whose first episodes all failed is ended when that would happen in fewer runs than this, if episodes failed at
the rate that is allowed."""


class FirstEpisodes:
    """Ends a run in which each of the first `number` episodes failed: it would go on like that."""

    def __init__(self, number: int, what: str = "") -> None:
        """what: whose episodes, for the message, such as ` of the first evaluation`."""
        self._number = number
        self._what = what
        self._errors: list[Exception] = []
        self._is_over = False

    def record(self, error: Exception | None) -> None:
        """Count an episode, which failed with `error` or did not. Raises FailureBudgetError from the first error."""
        self._is_over |= error is None
        if error is None or self._is_over:
            return
        self._errors.append(error)
        if len(self._errors) == self._number:
            first = self._errors[0]
            raise FailureBudgetError(
                f"all of the first {self._number} episodes{self._what} failed, so the run does not go on. The first "
                f"failed with {type(first).__name__}: {first}"
            ) from first


WINDOW = 64
"""How many of the last episodes FailureBudget looks at."""


class FailureBudget:
    """Ends the run when too many of the last `window` episodes failed, or all of the first ones did."""

    def __init__(self, max_failure_rate: float, window: int = WINDOW) -> None:
        self._max_failure_rate = max_failure_rate
        self._recent: deque[Exception | None] = deque(maxlen=window)
        self._window = window
        self._num_failed = 0
        # So many failures, with no other end, show that more fail than are allowed: 14 at the default rate of 0.5.
        enough = math.ceil(math.log(_BY_CHANCE) / math.log(max_failure_rate)) if max_failure_rate < 1 else 0
        self._first = FirstEpisodes(enough) if enough else None

    def record(self, error: Exception | None) -> None:
        """Count an episode, which failed with `error` or did not. Raises FailureBudgetError from the window's first."""
        self._num_failed += error is not None
        if len(self._recent) == self._window:
            self._num_failed -= self._recent[0] is not None
        self._recent.append(error)
        if self._first is not None:
            self._first.record(error)
        if len(self._recent) == self._window and self._num_failed > self._max_failure_rate * self._window:
            first = next(error for error in self._recent if error is not None)
            raise FailureBudgetError(
                f"{self._num_failed} of the last {self._window} episodes failed, and rollout.max_failure_rate is "
                f"{self._max_failure_rate:g}. The first failed with {type(first).__name__}: {first}"
            ) from first


FORGOTTEN_RETURN = (
    "every one of the first {number:,} episodes{what} returned None, which means rejected, so there is nothing to "
    "train on. Did {workflow}.arun_episode forget its return?"
)


class ReturnWatch:
    """Asks about a forgotten `return` when all episodes of the first batch returned None, and ends the run if no other
    comes: after 4 batches, and not before 1,000 episodes.

    One episode that returns something ends the watch, so it leaves alone a workflow that means to reject 99 of 100.
    """

    def __init__(self, workflow: str, batch: int) -> None:
        """workflow: its name, for messages. batch: the episodes of a batch."""
        self._workflow = workflow
        self._batch = max(batch, 16)
        self._patience = max(4 * batch, 1000)
        self._num_rejected = 0
        self._is_over = False

    def record(self, *, is_rejected: bool) -> None:
        """Count an episode that did not fail. Raises StarvedError."""
        self._is_over |= not is_rejected
        if self._is_over:
            return
        self._num_rejected += 1
        said = FORGOTTEN_RETURN.format(number=self._num_rejected, what="", workflow=self._workflow)
        if self._num_rejected == self._batch:
            log.warning("%s If that goes on, the run ends after %d episodes", said, self._patience)
        if self._num_rejected == self._patience:
            raise StarvedError(said)


@dataclass(slots=True, kw_only=True)
class RolloutTotals:
    """Episodes by how they ended, counted since the beginning of the run: trained, rejected, dropped or surplus.

    Times are sums, in seconds. Greedy episodes count only in `episodes_retried` and `baselines_*`.
    """

    episodes_trained: int = 0
    episodes_rejected: int = 0
    """Returned None, or belonged to a group that was rejected."""
    episodes_dropped: int = 0
    """Failed, or belonged to a group that was dropped."""
    episodes_surplus: int = 0
    """Over-sampled: neither rejected nor failed, and not kept."""
    episodes_failed: int = 0
    """Dropped episodes that raised or timed out."""
    episodes_retried: int = 0
    """Attempts that failed and were followed by another."""
    groups_finished: int = 0
    """Groups handed to the buffer."""
    groups_returned: int = 0
    """Finished groups of a checkpoint that ran again: with changed settings, no batch could hold them in time."""
    straggler_groups: int = 0
    """Groups cut because they kept the trainer waiting."""
    straggler_episodes: int = 0
    """Their episodes that were cut while running."""
    straggler_s: float = 0.0
    """How long these had run by then."""
    overtaken_episodes: int = 0
    """Episodes cut while running because enough others of their group had finished."""
    overtaken_s: float = 0.0
    finished_episodes: int = 0
    """Episodes that returned trajectories."""
    finished_s: float = 0.0
    baselines_finished: int = 0
    baselines_missing: int = 0
    """Greedy episodes that failed or were rejected, and their groups with them."""

    def count_episode(self, episode: Episode, *, is_greedy: bool) -> None:
        self.episodes_retried += episode.attempts - 1
        if is_greedy:
            self.baselines_finished += episode.is_finished
            self.baselines_missing += not episode.is_finished
            return
        self.episodes_failed += episode.error is not None
        if episode.is_finished:
            self.finished_episodes += 1
            self.finished_s += episode.elapsed_s

    def count_cancelled(self, run: GroupRun, elapsed_s: float) -> None:
        """Count an episode that was cancelled after `elapsed_s`, if its group is the reason."""
        if run.is_cut:
            self.straggler_episodes += 1
            self.straggler_s += elapsed_s
        elif run.is_full:
            self.overtaken_episodes += 1
            self.overtaken_s += elapsed_s

    def count_group(self, run: GroupRun, judged: Group | Fruitless) -> None:
        """Count the episodes that will not be trained. All others of a cut group are dropped."""
        num_kept = len(run.kept)
        surplus = 0 if run.is_cut else len(run.episodes) - num_kept - run.num_rejected - run.num_failed
        is_group = isinstance(judged, Group)
        is_rejected = not is_group and judged.outcome is GroupOutcome.REJECTED
        rejected = run.num_rejected + (num_kept if is_rejected else 0)
        trained = num_kept if is_group else 0
        self.groups_finished += is_group
        self.episodes_surplus += surplus
        self.episodes_rejected += rejected
        self.episodes_dropped += len(run.episodes) - trained - rejected - surplus

    def counters(self) -> dict[str, float]:
        """For logs: sums of seconds become means over their episodes, where there are any."""
        totals = asdict(self)
        counters = {name: value for name, value in totals.items() if not name.endswith("_s")}
        for kind in ("finished", "straggler", "overtaken"):
            if number := totals[f"{kind}_episodes"]:
                counters[f"{kind}_episode_s"] = totals[f"{kind}_s"] / number
        return counters


_YOUNG_EVERY_S = 0.05
_ALL_EVERY_S = 10.0
"""Objects that live longer than _YOUNG_EVERY_S, and refer to each other when they are left, take memory until then."""
_ALL_SHARE = 0.02
"""Of the time that looking at all objects may take: more objects are looked at less often."""
_BACKSTOP = (100_000, 1 << 30, 1 << 30)
"""For gc.set_threshold: while something blocks the event loop, Python looks at young objects itself."""
_PYTHONS = 10_000
"""Thresholds up to Python's defaults are replaced (700; 2,000 in newer ones). Others, and 0, were chosen by someone."""


async def collect_garbage() -> None:
    """Collect Python's garbage by the clock until cancelled, beside an event loop with thousands of episodes.

    Python looks at new objects after 700 more were made than were freed, and at older ones after some such rounds. With
    many episodes, as many are freed as made: young objects become hundreds of thousands before they are looked at, and
    each look blocks the event loop for up to half a second. Here they are looked at when they are still few. Does
    nothing if the process has turned the collector off or made it rarer itself.

    What was there before, such as all that was imported (0.2 s each time), is not looked at. What the process has
    frozen itself stays frozen.
    """
    before = gc.get_threshold()
    if not gc.isenabled() or not 0 < before[0] < _PYTHONS:
        return
    gc.collect()  # what is garbage now, such as a notebook's last model, would else stay until the end
    freezes = gc.get_freeze_count() == 0
    if freezes:
        gc.freeze()
    gc.set_threshold(*_BACKSTOP)
    try:
        next_all = time.monotonic() + _ALL_EVERY_S
        while True:
            await asyncio.sleep(_YOUNG_EVERY_S)
            began = time.monotonic()
            gc.collect(2 if began > next_all else 0)
            if began > next_all:
                ended = time.monotonic()
                next_all = ended + max(_ALL_EVERY_S, (ended - began) / _ALL_SHARE)
    finally:
        gc.set_threshold(*before)
        if freezes:
            gc.unfreeze()


_MOST_GROUPS = 1000
"""The test looks at this many of the last groups."""
_FEWEST_GROUPS = 30
"""With fewer groups, their sum is not close enough to a normal distribution."""
SIGNIFICANT = 3.3
"""Standard errors; exceeded by chance in one run of a thousand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBias:
    """How trained episodes compare with all that ran, trained or not."""

    trained: float
    """Mean length of trained episodes, in tokens."""
    asked: float
    """Mean length of all episodes; a lower bound if some were cut."""
    low: float
    """In standard errors, above 0 if trained episodes are longer, assuming that cut episodes needed no further
    token."""
    high: float
    """The same, assuming that they needed any number of tokens."""

    @property
    def direction(self) -> Literal["shorter", "longer"] | None:
        """How trained episodes differ, whatever cut ones would have become; None if it may be chance."""
        if self.low < -SIGNIFICANT:
            return "shorter"
        return "longer" if self.high > SIGNIFICANT else None

    def remark(self) -> str | None:
        if self.direction is None:
            return None
        return (
            f"what is trained is {self.direction} than what was asked for: {self.trained:.0f} tokens an episode, "
            f"against {self.asked:.0f} of all that ran, cut ones counted to their cut. Look in summary.json which "
            "tokens are not trained, and why (docs/running.md)"
        )


class LengthWatch:
    """Whether trained episodes differ in length from those that were asked for: it keeps those of the last groups.

    Cuts, failures and filters choose among episodes. If they remove the long ones, the model is trained on short ones.
    The test uses ranks: each episode's score is the share of shorter episodes minus the share of longer ones, and
    without a bias trained episodes have the same mean score as all. Episodes of a group are alike, and share their
    fate, so the variance is that of the groups' sums (Liang and Zeger 1986).

    An episode that was cut or failed is at least as long as it was by then. The test assumes the length that speaks
    against its finding: "shorter" must hold if cut episodes needed no further token, and "longer" must hold if they
    needed any number of tokens.
    """

    def __init__(self) -> None:
        self._groups: deque[list[tuple[int, bool, bool]]] = deque(maxlen=_MOST_GROUPS)
        """For each episode: its length, whether it ended by itself, whether it is trained."""

    def note(self, lengths: Mapping[int, tuple[int, bool]], kept: Collection[int]) -> None:
        """Add a group whose episodes have all ended. lengths: index -> tokens, and whether it ended by itself."""
        if lengths:
            self._groups.append([(tokens, whole, index in kept) for index, (tokens, whole) in lengths.items()])

    def bias(self) -> LengthBias | None:
        """None if there are too few groups, or if all or no episodes are trained: then there is nothing to compare."""
        import numpy as np

        rows = [(number, *row) for number, group in enumerate(self._groups) for row in group]
        if len(self._groups) < _FEWEST_GROUPS:
            return None
        group, length, is_whole, is_trained = (np.array(column) for column in zip(*rows, strict=True))
        if is_trained.all() or not is_trained.any():
            return None
        endless = np.where(is_whole, length, length.max() + 1)
        return LengthBias(
            trained=float(length[is_trained].mean()),
            asked=float(length.mean()),
            low=_deviation(length, is_trained, group),
            high=_deviation(endless, is_trained, group),
        )

    def summary(self) -> dict[str, float]:
        """For summary.json."""
        found = self.bias()
        return {f"length_bias/{name}": value for name, value in asdict(found).items()} if found else {}


def _deviation(lengths: np.ndarray, is_trained: np.ndarray, group: np.ndarray) -> float:
    """The deviation of the trained episodes' scores from the mean, in standard errors."""
    import numpy as np

    ordered = np.sort(lengths)
    shorter = np.searchsorted(ordered, lengths, side="left")
    longer = len(lengths) - np.searchsorted(ordered, lengths, side="right")
    scores = (shorter - longer) / len(lengths)
    sums = np.bincount(group, weights=(is_trained - is_trained.mean()) * scores)
    spread = float(np.sqrt((sums**2).sum()))
    return float(sums.sum()) / spread if spread else 0.0
