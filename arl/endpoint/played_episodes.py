"""The episodes that programs elsewhere may play, play and have played: who waits for whom, and what became of each.

| who waits | for | woken by |
|---|---|---|
| an episode (`taken`) | a program | `take`; its cancellation |
| a program (`take`) | an episode | `offer`, `give_back`; `wait_s`; `close` |
| an episode (`ended`) | its end | `end`; its lease; `rollout.episode_timeout_s`, its cancellation |
| a program that ended one (`told`) | what became of it | the episode's task |
| the workflow, as it is left (`close`) | programs that must still be told | their requests; _FAREWELL_S |

All of it belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from bisect import insort
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from http import HTTPStatus
from typing import Annotated, Any, Literal, cast

from pydantic import Field, PlainValidator

from arl.api.errors import ProgramError, TrajectoryError
from arl.api.events import EPISODE
from arl.api.types import Example, Trajectory
from arl.endpoint.session import EpisodeSession
from arl.runtime.clocks import CLOCK, off_the_clock
from arl.runtime.http.bodies import Name, RequestBody, RequestError, must_be

_REMEMBERED = 10_000
"""Episodes that are over, of which programs can still learn what became of them."""
_FAREWELL_S = 2.0
_MOST_NAMES = 256

State = Literal["offered", "running", "ending", "finished", "rejected", "failed", "gone"]
"""offered: no program has it yet. ending: its program ended it, and its reward is computed. gone: the run, or its time,
ended it."""


def _a_reward(value: Any) -> float | dict[str, float]:
    if _is_number(value):
        return float(value)
    roles = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    if not roles or len(roles) > _MOST_NAMES or not all(map(_is_number, roles.values())):
        raise must_be("a finite number, or a JSON object with one for each role")
    return {role: float(reward) for role, reward in roles.items()}


def _is_number(value: Any) -> bool:
    """Whether it is one that a float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


Numbers = Annotated[dict[Name, float], Field(max_length=_MOST_NAMES)]


class PlayedEnd(RequestBody):
    """How a program ended its episode: by one of reward, answer, error and rejected."""

    reward: Annotated[Any, PlainValidator(_a_reward)] = None
    answer: str | None = None
    error: str | None = None
    rejected: bool = False
    rewards: Numbers = Field(default_factory=dict[str, float])
    metrics: Numbers = Field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """An episode's outcome, as its program is told."""

    state: State
    reward: float | Mapping[str, float] | None = None
    num_turns: int = 0
    error: str = ""
    status: int = HTTPStatus.OK
    """The status of the answer to the request that ended it, unless the episode is gone."""


class PlayedEpisode:
    """One attempt at an episode, from its offer to its outcome."""

    def __init__(self, data: Example) -> None:
        loop = asyncio.get_running_loop()
        context, clock = EPISODE.get(), CLOCK.get()
        self.data = data
        self.is_evaluation = context is not None and context.is_evaluation
        self.session: EpisodeSession
        self.state: State = "offered"
        self.began = clock.began if clock else loop.time()
        self.returned: Sequence[Trajectory] | None = None
        """The result of arun_episode, once it returns."""
        self.reward: float | Mapping[str, float] | None = None
        self.digest = b""
        """The digest of the request that ended it."""
        self.taken: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[PlayedEnd] = loop.create_future()
        self.told: asyncio.Future[Outcome] = loop.create_future()
        self._clock = clock
        self._now = loop.time
        self._heard_at = self._now()

    @property
    def id(self) -> str:
        return self.session.name

    @property
    def left_s(self) -> float | None:
        """Seconds until rollout.episode_timeout_s; None without a limit."""
        left_s = self._clock.left_s if self._clock else float("inf")
        return max(0.0, left_s) if left_s < float("inf") else None

    def hear(self) -> None:
        """Note a sign of life of its program."""
        self._heard_at = self._now()

    def silent_s(self) -> float:
        """For how long its program has given no sign of life. A call that runs is one."""
        return 0.0 if self.session.is_answering else self._now() - max(self._heard_at, self.session.called_at)

    async def end_within(self, lease_s: float) -> PlayedEnd:
        """Wait for its end. Raises ProgramError if its program is silent for this long."""
        self.hear()
        while not self.ended.done():
            left_s = lease_s - self.silent_s()
            if left_s <= 0:
                raise ProgramError(
                    f"the program that took the episode gave no sign of life for endpoint.lease_s={lease_s:g}: it made "
                    f"no call, and did not GET /episodes/{self.id}"
                )
            await asyncio.wait({self.ended}, timeout=left_s)
        return self.ended.result()


class PlayedEpisodes:
    """All episodes of a workflow, by id. Programs take the oldest first, so a group's episodes end together."""

    def __init__(self) -> None:
        self.is_over = False
        self._offers: list[tuple[float, int, PlayedEpisode]] = []
        """By when they began; the number tells apart those that began at once."""
        self._numbers = itertools.count()
        self._takers: deque[asyncio.Future[PlayedEpisode | None]] = deque()
        self._running: dict[str, PlayedEpisode] = {}
        self._past: dict[str, tuple[Outcome, bytes]] = {}
        self._untold: set[str] = set()
        """Episodes that are gone, and whose programs do not know it yet."""
        self._all_told = asyncio.Event()

    @property
    def num_offered(self) -> int:
        return len(self._offers)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_asking(self) -> int:
        """Programs that wait for an episode."""
        return len(self._takers)

    @contextmanager
    def following(self, data: Example) -> Generator[PlayedEpisode]:
        """An episode within the block; at the block's end its program is told what became of it."""
        episode = PlayedEpisode(data)
        error: BaseException | None = None
        try:
            yield episode
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._settle(episode, error)

    async def offer(self, episode: PlayedEpisode) -> None:
        """Wait until a program has taken the episode. That does not count against its time limit."""
        with off_the_clock():
            self._push(episode)
            await episode.taken

    async def take(self, wait_s: float) -> PlayedEpisode | None:
        """The oldest offer; waits for one. None if none came, or the run is over. Then call `sent`, or `give_back`."""
        if self.is_over:
            return None
        if self._offers:
            return self._begin(self._offers.pop(0)[-1])
        taker = asyncio.get_running_loop().create_future()
        self._takers.append(taker)
        try:
            await asyncio.wait({taker}, timeout=wait_s)
        except asyncio.CancelledError:
            if taker.done() and (given := taker.result()):
                self.give_back(given)
            raise
        finally:
            if not taker.done():
                self._takers.remove(taker)
        return taker.result() if taker.done() else None

    def sent(self, episode: PlayedEpisode) -> None:
        """A program has the episode's URL and key: its time runs."""
        if not episode.taken.done():
            episode.taken.set_result(None)

    def give_back(self, episode: PlayedEpisode) -> None:
        """The program that was to have it has gone away, and does not know of it: offer it again."""
        if episode.state == "running" and not episode.taken.done():
            del self._running[episode.id]
            self._push(episode)

    def running(self, name: str) -> PlayedEpisode | None:
        """The episode, if it is not over, after a sign of life of its program."""
        if episode := self._running.get(name):
            episode.hear()
        return episode

    def past(self, name: str) -> tuple[Outcome, bytes]:
        """An episode's outcome, and the digest of the request that ended it. Raises RequestError for an unknown
        episode."""
        found = self._past.get(name)
        if found is None:
            raise RequestError(f"there is no episode {name[:80]!r}, or it ended long ago", HTTPStatus.NOT_FOUND)
        self._untold.discard(name)
        if not self._untold:
            self._all_told.set()
        return found

    async def end(self, name: str, end: PlayedEnd, body: bytes) -> Outcome:
        """End an episode, and wait for what becomes of it. The same request again gets the same answer.

        body: the request's. Raises RequestError for an episode that is over.
        """
        digest = blake2b(body, digest_size=16).digest()
        episode = self.running(name)
        if episode is None:
            outcome, ended_by = self.past(name)
            return _same(name, outcome, is_same=ended_by == digest)
        if episode.state == "running":
            episode.state, episode.digest = "ending", digest
            episode.ended.set_result(end)
            self.sent(episode)
        outcome = await asyncio.shield(episode.told)
        return _same(name, outcome, is_same=episode.digest == digest)

    async def close(self) -> None:
        """Tell everybody that the run is over; wait a little for programs that were playing."""
        self.is_over = True
        for taker in self._takers:
            if not taker.done():
                taker.set_result(None)
        if self._untold:
            with suppress(TimeoutError):
                async with asyncio.timeout(_FAREWELL_S):
                    await self._all_told.wait()

    def _push(self, episode: PlayedEpisode) -> None:
        """Give it to the program that has waited longest, if one waits."""
        while self._takers:
            taker = self._takers.popleft()
            if not taker.done():
                taker.set_result(self._begin(episode))
                return
        episode.state = "offered"
        insort(self._offers, (episode.began, next(self._numbers), episode))

    def _begin(self, episode: PlayedEpisode) -> PlayedEpisode:
        episode.state = "running"
        self._running[episode.id] = episode
        return episode

    def _settle(self, episode: PlayedEpisode, error: BaseException | None) -> None:
        was = episode.state
        if was == "offered":  # no program knows of it
            episode.state = "gone"
            self._offers = [offer for offer in self._offers if offer[-1] is not episode]
            return
        outcome = _outcome_of(episode, error)
        episode.state = outcome.state
        episode.told.set_result(outcome)
        del self._running[episode.id]
        self._past[episode.id] = (outcome, episode.digest)
        if was == "running":
            self._untold.add(episode.id)
        if len(self._past) > _REMEMBERED:
            forgotten = next(iter(self._past))
            del self._past[forgotten]
            self._untold.discard(forgotten)


def _same(name: str, outcome: Outcome, *, is_same: bool) -> Outcome:
    """The outcome, for the program whose request ended the episode. Raises RequestError for another request."""
    if outcome.state == "gone":
        raise RequestError(outcome.error, HTTPStatus.GONE)
    if not is_same:
        raise RequestError(f"the episode {name} has ended already: it is {outcome.state}", HTTPStatus.CONFLICT)
    return outcome


def _outcome_of(episode: PlayedEpisode, error: BaseException | None) -> Outcome:
    if error is None and episode.returned is None:
        return Outcome(state="rejected")
    if error is None:
        num_turns = sum(len(trajectory.turns) for trajectory in episode.returned or ())
        return Outcome(state="finished", reward=episode.reward, num_turns=num_turns)
    if isinstance(error, asyncio.CancelledError) or episode.state == "running":
        return Outcome(state="gone", error=f"the episode {episode.id} is over: {_why_gone(episode, error)}")
    status = HTTPStatus.INTERNAL_SERVER_ERROR
    if isinstance(error, ProgramError):  # its program said so
        status = HTTPStatus.OK
    elif isinstance(error, TrajectoryError):
        status = HTTPStatus.CONFLICT
    return Outcome(state="failed", error=f"{type(error).__name__}: {error}", status=status)


def _why_gone(episode: PlayedEpisode, error: BaseException) -> str:
    if not isinstance(error, asyncio.CancelledError):
        return str(error)
    if episode.left_s == 0:
        return "it took longer than rollout.episode_timeout_s"
    return "the run does not need it any more: its group is complete without it or was dropped, or the run ends"
