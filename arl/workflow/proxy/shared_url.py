"""One URL for many episodes: for programs that keep one client, and say in a header whose each call is."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from arl.workflow.proxy.session import EpisodeSession

HEADER = "X-Session-ID"
"""In which verifiers' clients send the id of the rollout that a call belongs to."""


class SharedURL:
    """Valid as long as the block of `OpenAIProxy.shared_url`; a call needs its key, and the id of an admitted run.

    base_url: what an OpenAI client takes. What is asked for by GET is the same for all, and needs no id.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.api_key = f"arl-{secrets.token_urlsafe(32)}"
        self._places: dict[str, tuple[EpisodeSession, str]] = {}

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    @contextmanager
    def admitting(self, run_id: str, session: EpisodeSession) -> Iterator[None]:
        """Within the block, calls that carry the id, which is nobody's to guess, are the session's, in a role of this
        name."""
        self._places[run_id] = (session, run_id)
        try:
            yield
        finally:
            del self._places[run_id]

    def place_of(self, request: web.Request) -> tuple[EpisodeSession, str] | None:
        """The session and the role that a call belongs to; None: to none that is admitted."""
        if request.method == "GET":
            return next(iter(self._places.values()), None)
        return self._places.get(request.headers.get(HEADER, ""))
