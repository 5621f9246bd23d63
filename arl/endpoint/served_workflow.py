"""ServedWorkflow: trains programs that arl does not start. They open episodes over HTTP, and post their rewards.

controller --> arun_episode --offer--> PlayedEpisodes --POST /episodes--> program, anywhere
                    |                        |                               | its calls: the episode's URL and key
                    +<------ its end --------+<----POST /episodes/ID/end-----+

    POST /episodes           201: id, URLs, key, example, time limits; 503 with Retry-After: none is free now
    POST /episodes/ID/end    200: its outcome
    GET  /episodes/ID        200: its state; a sign of life of its program
    GET  /episodes           200: how many wait for a program and run, and how many programs ask for one

A request needs the operator's key. The keys of episodes do not open these paths, so a program that was given only those
cannot set its own reward. 410 means that an episode, or the run, is over.

| who waits | for | woken by |
|---|---|---|
| an episode (`taken`) | a program | `take`; its cancellation |
| a program (`take`) | an episode | `offer`, `give_back`; `wait_s`; `close` |
| an episode (`ended`) | its end | `end`; its lease; `rollout.episode_timeout_s`, its cancellation |
| a program that ended one (`told`) | its outcome | the episode's task |
| the workflow, as it is left (`close`) | programs that must still be told | their requests; _FAREWELL_S |

All of it belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, cast
from urllib.parse import urlsplit

from aiohttp import web
from pydantic import Field, PlainValidator

from arl.api.errors import ArlError, ConfigError, ProgramError, TrajectoryError
from arl.api.events import EPISODE
from arl.api.types import Example, SamplingParams, Trajectory
from arl.api.workflow import RolloutWorkflow, Shared
from arl.endpoint.proxy import OpenAIProxy, proxy_of
from arl.endpoint.session import EpisodeSession
from arl.rewards.adapt import RewardLike, as_reward, try_rewards
from arl.runtime.clocks import CLOCK, off_the_clock
from arl.runtime.http.bodies import Name, RequestBody, RequestError, must_be, parse
from arl.runtime.http.server import answering, body_of, is_same, json_response

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from arl.api.engine import Sampler

_PATH = "episodes"
_MAX_BODY_BYTES = 4 << 20
_LONGEST_WAIT_S = 60.0
_RETRY_AFTER_S = 1
_WRONG_KEY_S = 1.0
_MOST_WRONG_KEYS = 32
"""Requests with a wrong key that wait for their answer at once, each for _WRONG_KEY_S: as many guesses in a second."""
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

    async def end_within(self, lease_s: float) -> PlayedEnd:
        """Wait for its end. Raises ProgramError if its program is silent for this long; a call that runs is a sign of
        life."""
        self.hear()
        while not self.ended.done():
            heard_at = max(self._heard_at, self.session.called_at)
            left_s = lease_s if self.session.running else lease_s - (self._now() - heard_at)
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
    def counts(self) -> dict[str, int]:
        """Episodes that wait for a program and that run; and programs that wait for an episode."""
        return {"waiting": len(self._offers), "running": len(self._running), "asking": len(self._takers)}

    @contextmanager
    def following(self, data: Example) -> Generator[PlayedEpisode]:
        """An episode within the block; at the block's end its program is told the outcome."""
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
    is_cancelled = isinstance(error, asyncio.CancelledError)
    if is_cancelled or episode.state == "running":
        why = "the run does not need it any more: its group is complete without it or was dropped, or the run ends"
        if not is_cancelled:
            why = str(error)
        elif episode.left_s == 0:
            why = "it took longer than rollout.episode_timeout_s"
        return Outcome(state="gone", error=f"the episode {episode.id} is over: {why}")
    known = {ProgramError: HTTPStatus.OK, TrajectoryError: HTTPStatus.CONFLICT}  # the first: its program said so
    status = next((code for kind, code in known.items() if isinstance(error, kind)), HTTPStatus.INTERNAL_SERVER_ERROR)
    return Outcome(state="failed", error=f"{type(error).__name__}: {error}", status=status)


class OpenBody(RequestBody):
    """What a program asks for when it opens an episode."""

    wait_s: float = Field(default=20.0, ge=0, le=_LONGEST_WAIT_S)


class ServedWorkflow(Shared, RolloutWorkflow):
    """Offers its episodes to programs elsewhere, and trains on the calls that they make. docs/serving.md has the HTTP.

        workflow = ServedWorkflow(tokenizer, sampling=SamplingParams(max_new_tokens=1024))

    reward: scores the text that a program posts as its `answer`; see as_reward. Without one, programs post a reward.
    proxy: instead of tokenizer and sampling, for further settings. on_open: called with the URL of /episodes.

    Programs need the key in $ARL_ENDPOINT_KEY. An episode waits for a program without a time limit;
    rollout.episode_timeout_s begins when a program takes it. One whose program says that it failed, or is silent for
    endpoint.lease_s, fails, and runs again as others do. It runs in one process (rollout.num_workers=0). Metrics:
    context_full, the proxy's metrics, and program_wait_s: how long the episode waited for a program.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None = None,
        reward: RewardLike | None = None,
        *,
        sampling: SamplingParams | None = None,
        proxy: OpenAIProxy | None = None,
        on_open: Callable[[str], object] = lambda url: None,
    ) -> None:
        super().__init__()
        self._proxy = proxy_of(tokenizer, sampling, proxy)
        self._score = None if reward is None else as_reward(reward)
        self._on_open = on_open
        self._episodes: PlayedEpisodes
        self._num_wrong_keys = 0

    def __reduce__(self) -> NoReturn:
        raise ConfigError("its programs need one endpoint, and each process would have its own")

    async def _open(self, opened: AsyncExitStack) -> None:
        if self._score is not None:
            await opened.enter_async_context(self._score)
        await opened.enter_async_context(self._proxy)
        self._key = f"Bearer {self._proxy.address.operator_key}"
        self._lease_s = self._proxy.address.lease_s
        self._episodes = PlayedEpisodes()
        answer = answering(self._answer, lambda error: {"error": error.message})
        opened.enter_context(self._proxy.answering(_PATH, answer))
        opened.push_async_callback(self._episodes.close)
        self._on_open(f"{self._proxy.url}/{_PATH}")

    async def arehearse(self, examples: Sequence[Example]) -> None:
        await try_rewards([self._score] if self._score else [], examples, gets_text=False, is_open=self.is_open)

    async def arun_episode(self, engine: Sampler, data: Example) -> Sequence[Trajectory] | None:
        if not self.is_open:
            raise ArlError("this ServedWorkflow is not open; use it within `async with`")
        with self._episodes.following(data) as episode:
            began = time.monotonic()
            async with self._proxy.episode(engine) as episode.session:
                await self._episodes.offer(episode)
                waited_s = time.monotonic() - began
                end = await episode.end_within(self._lease_s)
            if end.error is not None:
                raise ProgramError(f"the program of the episode said that it failed: {end.error}")
            if end.rejected:
                return None
            session = episode.session
            metrics = {**end.metrics, "program_wait_s": waited_s, "context_full": float(session.is_truncated)}
            episode.reward, parts = end.reward, end.rewards
            if end.answer is not None and self._score is not None:
                score = await self._score(end.answer, episode.data)
                episode.reward, parts, metrics = score.value, score.parts, {**score.metrics, **metrics}
            assert episode.reward is not None
            episode.returned = session.trajectories(episode.reward, metrics, rewards=parts)
            return episode.returned

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        await self._check_key(request)
        known = self._episodes
        match request.method, request.path.split("/")[2:]:
            case "POST", []:
                return await self._open_episode(request)
            case "GET", []:
                return json_response({**known.counts, "over": known.is_over})
            case "POST", [name, "end"]:
                raw = await _body(request)
                outcome = await known.end(name, self._end_in(raw), raw)
                return json_response({"id": name, **_shown(outcome)}, outcome.status)
            case "GET", [name]:
                if (episode := known.running(name)) is None:
                    return json_response({"id": name, **_shown(known.past(name)[0])})
                state = {"state": episode.state, "deadline_s": episode.left_s, "metrics": episode.session.metrics}
                return json_response({"id": name, **state})
        raise RequestError(
            f"{request.method} {request.path[:200]} is not served here; there are POST /episodes, GET /episodes, "
            "GET /episodes/ID and POST /episodes/ID/end",
            HTTPStatus.NOT_FOUND,
        )

    async def _check_key(self, request: web.Request) -> None:
        """Wrong keys wait for their answer, so that few can be tried in a second; right ones never do."""
        if is_same(request.headers.get("Authorization", ""), self._key):
            return
        if self._num_wrong_keys >= _MOST_WRONG_KEYS:
            raise RequestError("too many requests with a wrong key", HTTPStatus.TOO_MANY_REQUESTS)
        self._num_wrong_keys += 1
        try:
            await asyncio.sleep(_WRONG_KEY_S)
        finally:
            self._num_wrong_keys -= 1
        raise RequestError(
            "Unauthorized: send the operator's key, as in `Authorization: Bearer KEY`; an episode's own key calls the "
            "model, and nothing else",
            HTTPStatus.UNAUTHORIZED,
        )

    async def _open_episode(self, request: web.Request) -> web.StreamResponse:
        asked = parse(OpenBody, await _body(request))
        episode = await self._episodes.take(asked.wait_s)
        if episode is None and self._episodes.is_over:
            raise RequestError("the run is over: there are no more episodes", HTTPStatus.GONE)
        if episode is None:
            why = "no episode is free now: all run, or wait for the trainer (rollout.max_staleness); ask again"
            headers = {"Retry-After": str(_RETRY_AFTER_S)}
            return json_response({"error": why}, HTTPStatus.SERVICE_UNAVAILABLE, headers)
        try:
            url = episode.session.url
            if self._proxy.address.public_url is None:  # by this address the program reaches it
                url = f"{request.scheme}://{request.host}{urlsplit(url).path}"
            told = {
                "example": _json_value(dict(episode.data)),  # first: tools that look for text find the last "id"
                "id": episode.id,
                "base_url": f"{url}/v1",
                "url": url,
                "api_key": episode.session.api_key,
                "evaluation": episode.is_evaluation,
                "deadline_s": episode.left_s,
                "lease_s": self._lease_s,
            }
            response = json_response(told, HTTPStatus.CREATED)
            await response.prepare(request)
            await response.write_eof()
            if request.transport is None or request.transport.is_closing():
                raise ConnectionResetError("the program went away before it got its episode")
        except BaseException:
            self._episodes.give_back(episode)
            raise
        self._episodes.sent(episode)
        return response

    def _end_in(self, raw: bytes) -> PlayedEnd:
        """Raises RequestError for an end that contradicts itself, or cannot be scored."""
        end = parse(PlayedEnd, raw)
        given = [name for name in ("reward", "answer", "error") if getattr(end, name) is not None]
        given += ["rejected"] * end.rejected
        if len(given) != 1:
            has = " and ".join(given) or "none of them"
            raise RequestError(f"an episode ends with one of reward, answer, error and rejected; this has {has}")
        (how,) = given
        if how == "answer" and self._score is None:
            raise RequestError("answer cannot be scored: this run's workflow has no reward; post the reward")
        if end.rewards and how != "reward":
            raise RequestError(f"rewards are parts of a reward, and this end has {how}; leave them out")
        if end.metrics and how not in ("reward", "answer"):
            raise RequestError(f"metrics belong to an episode that finished, and this end has {how}; leave them out")
        return end


async def _body(request: web.Request) -> bytes:
    return await body_of(cast("web.Request", request.clone(client_max_size=_MAX_BODY_BYTES)))


def _shown(outcome: Outcome) -> dict[str, Any]:
    """The known facts of an episode: its state, and its reward or error."""
    if outcome.state == "finished":
        return {"state": outcome.state, "reward": outcome.reward, "num_turns": outcome.num_turns}
    return {"state": outcome.state, **({"error": outcome.error} if outcome.error else {})}


def _json_value(value: Any) -> Any:
    """A dataset's value as JSON has it: arrays as lists, numbers that are not finite as null, all else as its text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _json_value(inner) for name, inner in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_json_value(inner) for inner in cast("list[Any]", value)]
    return _json_value(value.tolist()) if hasattr(value, "tolist") else str(value)
