"""Where programs reach the endpoint: its settings, and how they get to the endpoints that a workflow opens."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import Field, PositiveFloat, field_validator

from arl.api.errors import ConfigError
from arl.api.settings.sections import Section
from arl.api.workflow import RolloutWorkflow

ENDPOINT_KEY = "ARL_ENDPOINT_KEY"
"""The environment variable with the key that opens episodes of `arl serve`."""
LEAST_KEY = 16
"""Characters of that key."""
_CALLED_AT = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses that stand for all of this machine's -> one that a program on it can call."""


class EndpointConfig(Section):
    """The endpoint for programs that call the model over HTTP (OpenAIProxy, SDKWorkflow, `arl serve`)."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """The address to listen on: this machine's, 0.0.0.0 for all of them, :: for those of IPv6 too."""
    port: int = Field(default=0, ge=0, le=65535)
    """The port to listen on. 0: any free one."""
    certificate: Path | None = None
    """A PEM file with the certificate of this host, those that it depends on, and its private key, without a password.
    Unset: plain HTTP."""
    public_url: str | None = None
    """The address that programs are given if they reach the endpoint by another one: behind a proxy, or from a
    container. Paths are added to it. Unset: the address itself; `arl serve` gives the address at which it was asked."""
    lease_s: PositiveFloat = 300.0
    """`arl serve`: a program that neither calls the model nor asks for its episode's state for this long has lost the
    episode, which runs again as one that failed."""

    @property
    def operator_key(self) -> str:
        """The key that opens episodes of `arl serve`, from $ARL_ENDPOINT_KEY. The endpoint itself needs none, as each
        episode has a key of its own. Raises ConfigError if there is none, or a short one."""
        key = os.environ.get(ENDPOINT_KEY, "")
        if len(key) >= LEAST_KEY and key.isascii() and key.isprintable() and " " not in key:
            return key
        wrong = f"has {len(key)} characters, or some that are not letters or digits" if key else "is not set"
        raise ConfigError(
            f"{ENDPOINT_KEY} {wrong}: programs open episodes with this key; set it to a secret of at least {LEAST_KEY} "
            "letters and digits, such as what `openssl rand -hex 32` prints"
        )

    @property
    def is_loopback(self) -> bool:
        """Whether this machine alone can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def is_fixed(self) -> bool:
        """Whether one process alone can have this address."""
        return self.port != 0 or self.public_url is not None

    @property
    def changed(self) -> list[str]:
        """The settings of its address that have other values than their defaults."""
        return self._changed("host", "port", "certificate", "public_url")

    def url(self, port: int) -> str:
        """The URL that programs are given if it listens on this port."""
        if self.public_url is not None:
            return self.public_url
        host = _CALLED_AT.get(self.host, self.host)
        scheme = "https" if self.certificate else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    @field_validator("public_url")
    @classmethod
    def _is_a_url(cls, given: str | None) -> str | None:
        if given is None:
            return given
        try:
            parts = urlsplit(given)
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            is_url = False
        if not is_url or any(character in given for character in "?#@ ") or not given.isprintable():
            raise ValueError(
                f"public_url is {given!r}; write http(s)://HOST[:PORT][/PATH], such as https://arl.example"
            )
        return given.rstrip("/")


@dataclass(slots=True)
class _RunsEndpoint:
    endpoint: EndpointConfig
    num_opened: int = 0


_RUNS_ENDPOINT: ContextVar[_RunsEndpoint | None] = ContextVar("_RUNS_ENDPOINT", default=None)


def endpoint_to_open(own: EndpointConfig | None = None) -> EndpointConfig:
    """The address for an endpoint that is being opened: its own, or the run's while `entered` enters its workflow."""
    given = _RUNS_ENDPOINT.get()
    if given is not None and own in (None, given.endpoint):
        given.num_opened += 1
        return given.endpoint
    return own or EndpointConfig()


@asynccontextmanager
async def entered(workflow: RolloutWorkflow, endpoint: EndpointConfig) -> AsyncGenerator[RolloutWorkflow]:
    """Enter a workflow, whose endpoints take this address; leave it at the block's end.

    Raises ConfigError if an address was set, and the workflow opened no endpoint that takes it.
    """
    given = _RunsEndpoint(endpoint)
    async with AsyncExitStack() as stack:
        token = _RUNS_ENDPOINT.set(given)
        try:
            await stack.enter_async_context(workflow)
        finally:
            _RUNS_ENDPOINT.reset(token)
        if endpoint.changed and not given.num_opened:
            raise ConfigError(
                f"endpoint.{endpoint.changed[0]} is set, but {type(workflow).__name__} opens no endpoint that takes "
                "it; leave it out, or give the workflow an OpenAIProxy that has no address of its own"
            )
        yield workflow
