"""The servers of a run in two files: one names them, the other says how they are.

    arl servers add, an autoscaler --> servers file --> Roster --> run_dir/servers.json --> arl servers list

A servers file has one server on each line: its base URL, the URL of its mirror if it has one (weights.transport=delta),
and drain=SECONDS if it is to leave, for the longest time that its requests may take. # begins a comment.
"""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from yarl import URL

from arl.api.errors import ConfigError, RunFileError

SERVERS, STATE = "servers.txt", "servers.json"
_LOCK = "servers.lock"
_NOTE = "# Edited "
_MAX_BYTES = 1 << 20
DRAIN_S = 60.0
"""How long the requests of a server that leaves may take, unless its line tells another time."""

_LOOKS, _MORE_LOOKS = 2, 5
"""A changed file counts when so many looks in a row have found the same text. It takes more looks if servers are
missing that it named before, or its last line does not end: then it may be half written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedServer:
    address: str
    mirror: str | None = None
    drain_s: float | None = None
    """It is to leave, and its requests may take this long. None: it is to serve."""

    @property
    def line(self) -> str:
        drain = [] if self.drain_s is None else [f"drain={self.drain_s:g}"]
        return " ".join([self.address, *([self.mirror] if self.mirror else []), *drain])


Named = Mapping[str, NamedServer]


def base_url(address: str, where: str = "engine.addresses") -> str:
    """Without a slash at its end. Raises ConfigError, which says `where` the address was found."""
    try:
        url = URL(address)
    except (ValueError, IndexError):  # yarl raises the latter for some nonsense
        url = URL()
    if url.scheme not in ("http", "https") or not url.host or not address.isprintable():
        raise ConfigError(f"{where} holds {address!r}; it must hold base URLs, such as http://127.0.0.1:30000")
    if "@" in url.raw_authority:
        without = url.with_user(None)
        raise ConfigError(f"{where} names a user for {without}, which logs would show; set ARL_SERVER_API_KEY")
    return address.rstrip("/")


def parse(text: str) -> dict[str, NamedServer]:
    """If an address has several lines, the last one counts. Raises ConfigError for a malformed line."""
    lines = enumerate(text.splitlines(), start=1)
    named = [_named(words, f"line {number}") for number, line in lines if (words := line.partition("#")[0].split())]
    return {one.address: one for one in named}


def _named(words: Sequence[str], where: str) -> NamedServer:
    drains = [word.removeprefix("drain=") for word in words if word.startswith("drain=")]
    address, *mirrors = [base_url(word, where) for word in words if not word.startswith("drain=")] or [""]
    if not address or len(mirrors) > 1 or len(drains) > 1:
        raise ConfigError(f"{where} is {' '.join(words)!r}; it must be ADDRESS [MIRROR] [drain=SECONDS]")
    drain_s = None
    if drains:
        with suppress(ValueError):
            drain_s = float(drains[0])
        if drain_s is None or not 0 <= drain_s < math.inf:
            raise ConfigError(f"{where} has drain={drains[0]}; it must be a number of seconds, 0 or more")
    return NamedServer(address=address, mirror=mirrors[0] if mirrors else None, drain_s=drain_s)


def _read(path: Path) -> tuple[int, str]:
    """When it was written (ns), and its text. Raises OSError, also if it is too long; ValueError if it is no text."""
    with path.open("rb") as file:
        written_ns, content = os.fstat(file.fileno()).st_mtime_ns, file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise OSError(f"it has more than {_MAX_BYTES} bytes")
    return written_ns, content.decode()


def read_servers(path: Path) -> dict[str, NamedServer]:
    """The servers in the file, without those that are to leave; empty if there is no file. Raises ConfigError."""
    try:
        named = parse(_read(path)[1])
    except FileNotFoundError:
        return {}
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return {address: one for address, one in named.items() if one.drain_s is None}


class WatchedServers:
    """What a servers file says, once it has been still for a while. A file that is missing, empty or makes no sense
    says nothing: what it said before holds.

    For one thread at a time. is_needed: a missing file is a problem from the beginning.
    """

    def __init__(self, path: Path, *, is_needed: bool) -> None:
        self.named: Named | None = None
        self.settled_ns = 0
        """When the text that counts was written."""
        self.problem = ""
        """Why the file, as it is now, does not count."""
        self._path = path
        self._is_needed = is_needed
        self._text: str | None = None
        self._num_looks = 0
        self._settled_text: str | None = None
        self._parsed: tuple[str, Named] = "", {}

    def look(self) -> bool:
        """Whether another text counts from now on."""
        try:
            written_ns, text = _read(self._path)
            if text != self._parsed[0]:
                self._parsed = text, parse(text)  # a look at a thousand servers' URLs each second is felt
        except FileNotFoundError:
            return self._is_unusable("there is no such file" if self._is_needed or self.named is not None else "")
        except (OSError, ValueError) as error:
            return self._is_unusable(str(error))
        named = self._parsed[1]
        if not named:
            return self._is_unusable("it names no server")
        self.problem = ""
        self._num_looks = self._num_looks + 1 if text == self._text else 1
        self._text = text
        # Servers are missing that the file named before, and not as servers that leave.
        lacks = any(one.drain_s is None and address not in named for address, one in (self.named or {}).items())
        if self._num_looks < (_MORE_LOOKS if lacks or not text.endswith("\n") else _LOOKS):
            return False
        self.named, self.settled_ns = named, written_ns
        is_new, self._settled_text = text != self._settled_text, text
        return is_new

    def _is_unusable(self, problem: str) -> bool:
        self.problem, self._text = problem, None
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRow:
    address: str
    state: str
    """A ServerState; or `absent`, for one that could not join yet."""
    version: int | None = None
    """The version of its weights; None while it is absent."""
    requests: int = 0
    since: float = 0.0
    why: str = ""
    stays: str = ""
    """Why it may not leave yet, if it is to leave."""
    mirror: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServersState:
    """The content of run_dir/servers.json: what is true of the servers of a run."""

    at: float
    file: str | None
    """The servers file that the run watches; None if engine.num_servers says which servers there are."""
    is_users: bool
    """engine.servers_file names the file, so somebody else writes it."""
    min_servers: int
    settled_ns: int = 0
    """When the text of the file was written that the run follows now."""
    problem: str = ""
    """Why the file, as it is now, is not followed."""
    servers: tuple[ServerRow, ...] = ()

    def row(self, address: str) -> ServerRow | None:
        return next((row for row in self.servers if row.address == address), None)

    def write(self, run_dir: Path) -> None:
        _replace(run_dir / STATE, msgspec.json.encode(self).decode() + "\n")


def read_state(run_dir: Path) -> ServersState | None:
    """None if no run in this directory has said so far. Fields of other versions of arl are left out."""
    try:
        return msgspec.json.decode((run_dir / STATE).read_bytes(), type=ServersState)
    except (OSError, msgspec.MsgspecError):
        return None


@dataclass(slots=True)
class EditedServers:
    """The text of run_dir/servers.txt while it is edited: its comments stay."""

    lines: list[str]
    written_ns: int = 0
    """When the new text was written, by the file system's clock; 0 until then."""
    named: dict[str, NamedServer] = field(default_factory=dict[str, NamedServer])

    def put(self, one: NamedServer) -> None:
        """Name a server, and replace its earlier lines if it has any."""
        before = [i for i, line in enumerate(self.lines) if one.address == _address_in(line)] or [len(self.lines)]
        self.lines[before[0] : before[0] + 1] = [one.line]
        for again in reversed(before[1:]):
            del self.lines[again]
        self.named[one.address] = one

    def forget(self, address: str) -> None:
        self.named.pop(address, None)
        self.lines = [line for line in self.lines if address != _address_in(line)]


def _address_in(line: str) -> str:
    """The address of the server that a well-formed line names; empty if it names none."""
    words = line.partition("#")[0].split()
    return next((word.rstrip("/") for word in words if not word.startswith("drain=")), "")


@contextmanager
def edited(run_dir: Path, note: str) -> Iterator[EditedServers]:
    """Edit run_dir/servers.txt under a lock; other edits wait. The file is replaced if the block ends without an error.

    note: of this edit, for the first line. If the file is missing or names no server, the run has kept its servers, and
    the text begins with those of run_dir/servers.json.
    Raises RunFileError, and ConfigError if the file makes no sense.
    """
    path = run_dir / SERVERS
    with _usable(path), (run_dir / _LOCK).open("a+b") as lock:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        with _usable(path):
            edit = _begin_edit(path, read_state(run_dir))
        yield edit
        with _usable(path):
            _replace(path, "\n".join([f"{_NOTE}{note}", *edit.lines, ""]))
            edit.written_ns = path.stat().st_mtime_ns


def _begin_edit(path: Path, state: ServersState | None) -> EditedServers:
    text = _read(path)[1] if path.exists() else ""
    try:
        if not (named := parse(text)):
            rows = [row for row in (state.servers if state else ()) if row.state != "draining"]
            lines = [NamedServer(address=row.address, mirror=row.mirror).line for row in rows]
            text = "\n".join([*text.splitlines(), *lines])
            named = parse(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    edit = EditedServers([line for line in text.splitlines() if not line.startswith(_NOTE)], named=named)
    there = {row.address for row in (state.servers if state else ())}
    for one in [one for one in edit.named.values() if one.drain_s is not None and one.address not in there]:
        edit.forget(one.address)  # it has left
    return edit


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise RunFileError(f"{path} cannot be edited: {error}") from error


def _replace(path: Path, text: str) -> None:
    """In one step: a reader finds the whole old or new text."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    aside.write_text(text)
    aside.replace(path)
