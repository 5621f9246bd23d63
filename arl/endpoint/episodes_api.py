"""/episodes: where programs open episodes, and say how they ended. docs/serving.md shows it with curl.

    POST /episodes           201: id, URLs, key, example, time limits; 503 with Retry-After: none is free now
    POST /episodes/ID/end    200: what became of it
    GET  /episodes/ID        200: its state; a sign of life of its program
    GET  /episodes           200: how many wait for a program and run, and how many programs ask for one

A request needs the operator's key. The keys of episodes do not open these paths, so a program that was given only those
cannot set its own reward. 410 means that an episode, or the run, is over.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import asdict
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import urlsplit

from aiohttp import web
from pydantic import Field

from arl.endpoint.played_episodes import Outcome, PlayedEnd, PlayedEpisode, PlayedEpisodes
from arl.runtime.http.bodies import RequestBody, RequestError, parse
from arl.runtime.http.server import answering, body_of, is_same, json_response

PATH = "episodes"
_MAX_BODY_BYTES = 4 << 20
_LONGEST_WAIT_S = 60.0
_RETRY_AFTER_S = 1
_WRONG_KEY_S = 1.0
_MOST_WRONG_KEYS = 32
"""Requests with a wrong key that wait for their answer at once, each for _WRONG_KEY_S: as many guesses in a second."""


class OpenBody(RequestBody):
    """What a program asks for when it opens an episode."""

    wait_s: float = Field(default=20.0, ge=0, le=_LONGEST_WAIT_S)


class EpisodesAPI:
    """Answers requests for /episodes.

    public_url: what episodes' URLs begin with; None: what the program called. has_reward: whether `answer` can be
    scored.
    """

    def __init__(
        self, episodes: PlayedEpisodes, key: str, lease_s: float, *, public_url: str | None, has_reward: bool
    ) -> None:
        self._episodes = episodes
        self._key = f"Bearer {key}"
        self._lease_s = lease_s
        self._public_url = public_url
        self._has_reward = has_reward
        self._num_wrong_keys = 0
        self.answer = answering(self._answer, lambda error: {"error": error.message})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        await self._check_key(request)
        known = self._episodes
        match request.method, request.path.split("/")[2:]:
            case "POST", []:
                return await self._open(request)
            case "GET", []:
                counts = {"waiting": known.num_offered, "running": known.num_running, "asking": known.num_asking}
                return json_response({**counts, "over": known.is_over})
            case "POST", [name, "end"]:
                raw = await _body(request)
                outcome = await known.end(name, self._read(raw), raw)
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

    async def _open(self, request: web.Request) -> web.StreamResponse:
        asked = parse(OpenBody, await _body(request))
        episode = await self._episodes.take(asked.wait_s)
        if episode is None and self._episodes.is_over:
            raise RequestError("the run is over: there are no more episodes", HTTPStatus.GONE)
        if episode is None:
            why = "no episode is free now: all run, or wait for the trainer (rollout.max_staleness); ask again"
            headers = {"Retry-After": str(_RETRY_AFTER_S)}
            return json_response({"error": why}, HTTPStatus.SERVICE_UNAVAILABLE, headers)
        try:
            response = json_response(self._told(episode, request), HTTPStatus.CREATED)
            await response.prepare(request)
            await response.write_eof()
            if request.transport is None or request.transport.is_closing():
                raise ConnectionResetError("the program went away before it got its episode")
        except BaseException:
            self._episodes.give_back(episode)
            raise
        self._episodes.sent(episode)
        return response

    def _told(self, episode: PlayedEpisode, request: web.Request) -> dict[str, Any]:
        url = episode.session.url
        if self._public_url is None:  # by this address the program reaches it
            url = f"{request.scheme}://{request.host}{urlsplit(url).path}"
        return {
            "example": _json_value(dict(episode.data)),  # first: tools that look for text find the last "id"
            "id": episode.id,
            "base_url": f"{url}/v1",
            "url": url,
            "api_key": episode.session.api_key,
            "evaluation": episode.is_evaluation,
            "deadline_s": episode.left_s,
            "lease_s": self._lease_s,
        }

    def _read(self, raw: bytes) -> PlayedEnd:
        end = parse(PlayedEnd, raw)
        given = [name for name in ("reward", "answer", "error") if getattr(end, name) is not None]
        given += ["rejected"] * end.rejected
        if len(given) != 1:
            has = " and ".join(given) or "none of them"
            raise RequestError(f"an episode ends with one of reward, answer, error and rejected; this has {has}")
        (how,) = given
        if how == "answer" and not self._has_reward:
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
    shown = {name: value for name, value in asdict(outcome).items() if value not in (None, "") and name != "status"}
    return shown if outcome.state == "finished" else {name: shown[name] for name in ("state", "error") if name in shown}


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
