"""Servers that arl starts itself: started together, watched, started again, gone at the end.

local_program, stock_program    what to run: an embedded server, SGLang's or vLLM's
started_here                    runs them on this machine (ray_servers.py: on the nodes of a Ray cluster)
running                         watches them, wherever they are
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import aiohttp

from arl.api.errors import ArlError, ConfigError, ServerError, first_error
from arl.api.events import NOWHERE, Events, PlacedPart, ProcessRestarted
from arl.api.settings.engines import (
    SERVER_KEY,
    AdapterWeightsConfig,
    LocalEngineConfig,
    ServerProcessesConfig,
    StartedServersConfig,
)
from arl.api.settings.run import Config
from arl.engine.client.servers_file import NamedServer
from arl.engine.client.sglang_client import KEEPS_IMAGES
from arl.runtime.http.server import allow_many_connections
from arl.runtime.processes.logs import ChildLog, how_it_ended
from arl.runtime.threads import offload

_HOST = "127.0.0.1"
_POLL_S = 0.1
_STOP_TIMEOUT_S = 5.0
_FIRST_BACKOFF_S = 1.0
_MAX_BACKOFF_S = 30.0
_STEADY_S = 600.0
"""A server that has served for this long may again die _MAX_RESTARTS times."""
_MAX_RESTARTS = 3
"""How often in a row a server that died or hangs is started again."""
_VLLM = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One server to run, made on the machine that runs it, by the process with which it ends.

    It answers GET /health with 200 at its host and port once it is ready.
    """

    argv: Sequence[str]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ServerProcess:
    address: str
    pid: int
    ending: asyncio.Future[int]
    """Its exit code; an error if it was lost with its machine."""
    signal: Callable[[int], object]
    """SIGKILL also reaches all that it started, which may outlive it."""
    part: PlacedPart | None = None
    """Where it runs, if that is not this machine."""

    @property
    def has_ended(self) -> bool:
        return self.ending.done()

    def how_it_ended(self) -> str:
        if not self.has_ended:
            return "still ran"
        if error := self.ending.exception():
            return f"was lost: {error}"
        return how_it_ended(self.ending.result()) + (f", on {self.part.host}" if self.part else "")


Start = Callable[[ChildLog], Awaitable[ServerProcess]]
"""Starts a server, which writes to this log. Raises ArlError, or OSError if the machine has no memory, or no process,
left."""


@contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Free ports, reserved within the block: no other program gets them, but this process's children may listen."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for held in sockets:
            # Bound but never listening: a server that sets this option too, as all do, may bind and listen beside it.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind((_HOST, 0))
        yield [held.getsockname()[1] for held in sockets]
    finally:
        for held in sockets:
            held.close()


@asynccontextmanager
async def running(starts: Mapping[Path, Start], config: StartedServersConfig) -> AsyncIterator[ServerProcesses]:
    """Start a server for each log, and yield them once all are ready.

    A server that dies is started again, at most _MAX_RESTARTS times in a row, with a warning that shows the end of its
    log; meanwhile the engine fences it. When the last server has died for good, the block is cancelled and ServerError
    raised in its place. Leaving the block, in whatever way, ends the servers with all their children: SIGTERM, and
    SIGKILL a few seconds later.

    Raises ServerError with the end of the log if a server dies or is not ready within startup_timeout_s at the start.
    """
    allow_many_connections()
    body_error: Exception | None = None
    async with aiohttp.ClientSession() as session:
        servers = [_Server(start, log, session, config.startup_timeout_s) for log, start in starts.items()]
        try:
            async with asyncio.TaskGroup() as group:
                for server in servers:
                    group.create_task(server.start())
            async with asyncio.TaskGroup() as group:
                watcher = group.create_task(_watch(servers))
                try:
                    yield ServerProcesses(servers)
                except Exception as error:  # noqa: BLE001 - raised again below, outside the group that would wrap it
                    body_error = error
                watcher.cancel()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from body_error
        finally:
            await _stop(servers)
    if body_error is not None:
        raise body_error


@asynccontextmanager
async def started_here(
    model: str, config: LocalEngineConfig | ServerProcessesConfig, logs: Path, api_key: str = ""
) -> AsyncIterator[ServerProcesses]:
    """Run config.num_servers servers of the model directory `model` on this machine, each on a port of 127.0.0.1.

    logs: the directory of their logs. api_key: what embedded servers ask for; empty for none. Servers and the processes
    that they start die with this process. Raises ConfigError if the Python interpreter or the GPUs are not there. See
    `running` for a server that dies.
    """
    with reserved_ports(config.num_servers) as ports:
        starts = dict[Path, Start]()
        for number, (log, port) in enumerate(zip(log_paths(config, logs), ports, strict=True)):
            program = (
                partial(local_program, model, config, api_key)
                if isinstance(config, LocalEngineConfig)
                else partial(stock_program, model, config, "")
            )
            starts[log] = partial(_start_here, partial(program, number, _HOST, port), port)
        async with running(starts, config) as servers:
            yield servers


async def _start_here(program: Callable[[], Program], port: int, log: ChildLog) -> ServerProcess:
    own = program()
    with log.opened() as stream:
        process = await asyncio.create_subprocess_exec(
            *own.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env=own.environment,
            start_new_session=True,  # Ctrl-C reaches us alone; and one signal reaches all that it starts
        )

    def send(number: int) -> None:
        with suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)

    ending = asyncio.ensure_future(process.wait())
    return ServerProcess(address=f"http://{_HOST}:{port}", pid=process.pid, ending=ending, signal=send)


async def _watch(servers: Sequence[_Server]) -> None:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(server.keep_alive()) for server in servers]
    raise ServerError(f"every server that arl started died; {tasks[0].result()}")


class ServerProcesses:
    """Servers that this process has started. A roster may look at it: it names them, also one that has moved."""

    problem, settled_ns = "", 0

    def __init__(self, servers: Sequence[_Server]) -> None:
        self._servers = servers
        self._seen = self._left = frozenset(self.addresses)

    @property
    def addresses(self) -> Sequence[str]:
        return [server.address for server in self._servers]

    @property
    def process_ids(self) -> Mapping[str, int]:
        return {one.address: one.process.pid for one in self._servers if one.process is not None}

    @property
    def parts(self) -> Mapping[str, PlacedPart]:
        """Where servers on other machines are, by base URL."""
        placed = {one.address: one.process.part for one in self._servers if one.process is not None}
        return {address: part for address, part in placed.items() if part is not None}

    @property
    def num_restarts(self) -> int:
        return sum(server.num_restarts for server in self._servers)

    @property
    def named(self) -> Mapping[str, NamedServer]:
        """Where they are, and, as servers that are to leave, where they were."""
        there = self.addresses
        left = {address: NamedServer(address=address, drain_s=0.0) for address in self._left}
        return left | {address: NamedServer(address=address) for address in there}

    def look(self) -> bool:
        """Whether a server has another address than at the last look."""
        before, self._seen = self._seen, frozenset(self.addresses)
        self._left |= self._seen
        return self._seen != before

    def report_to(self, events: Events) -> None:
        for server in self._servers:
            server.events = events

    def restart(self, address: str, reason: str, absent_s: float) -> bool:
        """Kill a server that hangs; it is then started again as if it had died. False while it is not ready anyway.

        absent_s: how long it has not served; it may have been started again meanwhile.
        """
        server = next((server for server in self._servers if server.address == address), None)
        return server is not None and server.end_hung(reason, absent_s)


class _Server:
    """One server's process, and the processes that replace it after it died."""

    def __init__(self, start: Start, log: Path, session: aiohttp.ClientSession, startup_timeout_s: float) -> None:
        self.process: ServerProcess | None = None
        self.address = ""
        """Its base URL: the newest process's; empty before the first."""
        self.num_restarts = 0
        self.events: Events = NOWHERE
        self._start = start
        self._up_since: float | None = None
        self._session = session
        self._startup_timeout_s = startup_timeout_s
        self._is_killed = False
        self._fault = ""
        """The reason for its end, if it did not end by itself."""
        self._log = ChildLog(log)

    async def start(self) -> None:
        """Returns when it is ready. Raises ServerError, with the end of its log, and leaves nothing running."""
        try:
            process = await self._start(self._log)
        except OSError as error:  # the machine has no memory, or no process, left
            self._fault = f"could not be started ({error})"
            raise ServerError(f"a server did not start: {self.last_words()}") from error
        except ArlError as error:
            self._fault = f"could not be started ({error})"
            raise
        self.process, self._is_killed, self._fault = process, False, ""
        try:
            async with asyncio.timeout(self._startup_timeout_s):
                while not process.has_ended and not await self._is_ready(process.address):
                    await asyncio.wait([process.ending], timeout=_POLL_S)
        except TimeoutError:
            self._fault = "was killed for it"
            self.kill()
            await asyncio.wait([process.ending])
            raise ServerError(
                f"a server was not ready within {self._startup_timeout_s:g} s (engine.startup_timeout_s): "
                f"{self.last_words()}"
            ) from None
        if process.has_ended:
            raise ServerError(f"a server did not start: {self.last_words()}")
        self.address, self._up_since = process.address, time.monotonic()

    async def keep_alive(self) -> str:
        """Start it again whenever it dies; returns its last words when it has died too often in a row."""
        restarts = 0
        while True:
            if self.process is not None:
                await asyncio.wait([self.process.ending])
            if self._up_since is not None and time.monotonic() - self._up_since > _STEADY_S:
                restarts = 0
            self._up_since = None
            self.kill()
            words = await offload(self.last_words)
            if restarts >= _MAX_RESTARTS:
                logger.warning("%s died and is not started again: %s", self.address, words)
                return words
            backoff_s = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2**restarts)
            restarts += 1
            self.num_restarts += 1
            self.events.emit(ProcessRestarted(name=self.address, how=words))
            logger.warning(
                "%s died; restart %d of %d follows in %g s: %s",
                self.address, restarts, _MAX_RESTARTS, backoff_s, words,
            )  # fmt: skip
            await asyncio.sleep(backoff_s)
            with suppress(ArlError):  # its last words are told in the next turn
                await self.start()

    def last_words(self) -> str:
        """How it ended, with the end of its log since it was last started."""
        how = self._fault or ("still ran" if self.process is None else self.process.how_it_ended())
        return f"it {how}; {self._log.end()}"

    def end_hung(self, reason: str, absent_s: float) -> bool:
        if self._up_since is None or self._is_killed:
            return False
        self._up_since += absent_s  # time without service earns no further restarts
        self._fault = f"hung, and was killed ({reason})"
        self.kill()
        return True

    def kill(self) -> None:
        """End it and its children. Only once: later its id may belong to another process."""
        if self.process is not None and not self._is_killed:
            self._is_killed = True
            self.process.signal(signal.SIGKILL)

    async def _is_ready(self, address: str) -> bool:
        try:
            async with self._session.get(f"{address}/health") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False


async def _stop(servers: Sequence[_Server]) -> None:
    """End what still runs: SIGTERM first, then SIGKILL; SIGKILL at once if this is cancelled."""
    endings = [server.process.ending for server in servers if server.process is not None]
    for server in servers:
        if server.process is not None and not server.process.has_ended:
            server.process.signal(signal.SIGTERM)
    try:
        if endings and (await asyncio.wait(endings, timeout=_STOP_TIMEOUT_S))[1]:
            logger.warning("a server did not stop within %g s; killing it", _STOP_TIMEOUT_S)
    finally:
        for server in servers:
            server.kill()
    if endings:
        await asyncio.wait(endings)


_ENDS_WITH_PARENT = """
import ctypes, os, signal, subprocess, sys, time
parent, *command = sys.argv[1:]
server = None

def end_if_alone():
    if os.getppid() != int(parent):
        os.killpg(0, signal.SIGKILL)  # also what the server started: vLLM's engine outlives its HTTP server

def end(*_):
    for _ in range(50):  # the signal comes with the end of one thread of the parent's, which may be its first to end
        end_if_alone()
        time.sleep(0.01)
    if server is not None:
        server.terminate()

signal.signal(signal.SIGTERM, end)
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: when the process that started this one is gone
if os.getppid() == int(parent):
    server = subprocess.Popen(command)
    code = server.wait()
    end_if_alone()
    if code < 0:  # end as it did
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    sys.exit(code)
"""
"""Runs a command until it ends, and ends its whole process group when the process that started this one is gone."""


def local_program(model: str, config: LocalEngineConfig, api_key: str, number: int, host: str, port: int) -> Program:
    """An embedded server of the model directory `model`. api_key: what it asks for; empty for none."""
    # Torch reads its thread counts when it is imported, so they have to be set from outside.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(config.num_threads))
    return Program(
        argv=_local_command(model, config, host, port),
        environment={**os.environ, **threads, "PYTHONUNBUFFERED": "1", SERVER_KEY: api_key},
    )


def stock_program(
    model: str, config: ServerProcessesConfig, api_key_file: str, number: int, host: str, port: int
) -> Program:
    """An SGLang or vLLM server of the model directory `model`, which ends with this process.

    api_key_file: of SGLang's settings, with its key; empty for a server without. Raises ConfigError if the Python
    interpreter or the GPUs are not there.
    """
    if (python := shutil.which(str(config.python))) is None:
        raise ConfigError(f"engine.python is {str(config.python)!r}, which is not an executable program")
    if config.protocol == "vllm":
        server, environment = _vllm_command(model, config, host, port), _VLLM
        if not config.gpus_per_server:
            environment = {**_VLLM, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    else:
        server, environment = _sglang_command(model, config, host, port), {KEEPS_IMAGES: "0"}
    if api_key_file:
        server += ["--config", api_key_file]
    gpus = {} if config.on_ray else {"CUDA_VISIBLE_DEVICES": _gpus(config, number)}  # an actor has its own from Ray
    return Program(
        argv=[python, "-c", _ENDS_WITH_PARENT, str(os.getpid()), python, *server],
        environment={**environment, **os.environ, **gpus, "PYTHONUNBUFFERED": "1"},
    )


def log_paths(config: LocalEngineConfig | ServerProcessesConfig, directory: Path) -> list[Path]:
    """The log of each server, to which its output is appended: server-0.log, sglang-0.log or vllm-0.log, and so on."""
    name = "server" if isinstance(config, LocalEngineConfig) else config.protocol
    return [directory / f"{name}-{number}.log" for number in range(config.num_servers)]


def _local_command(model: str, config: LocalEngineConfig, host: str, port: int) -> list[str]:
    command = [sys.executable, "-m", "arl.engine.local", "--model", model, "--host", host, "--port", str(port)]
    command += ["--device", config.device, "--dtype", config.dtype, "--num-threads", str(config.num_threads)]
    command += ["--max-running-requests", str(config.max_running_requests)]
    if config.context_length is not None:
        command += ["--context-length", str(config.context_length)]
    return [*command, "--parent-pid", str(os.getpid())]


def _sglang_command(model: str, config: ServerProcessesConfig, host: str, port: int) -> list[str]:
    command = ["-m", "sglang.launch_server", "--model-path", model, "--host", host, "--port", str(port)]
    command += ["--tp-size", str(config.gpus_per_server)] if config.gpus_per_server else ["--device", "cpu"]
    return [*command, *config.arguments]


def _vllm_command(model: str, config: ServerProcessesConfig, host: str, port: int) -> list[str]:
    command = ["-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", host, "--port", str(port)]
    command += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--enable-prompt-tokens-details"]
    if config.gpus_per_server:
        command += ["--tensor-parallel-size", str(config.gpus_per_server)]
    return [*command, *config.arguments]


_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def adapter_options(config: Config) -> list[str]:
    """The options that SGLang and vLLM servers need for this run's adapters; none for a run without adapters.

    A server computes several adapters at once: of each policy max_staleness + 1 versions in flight and one more, so
    that a new version does not wait for a place; and the bare model for its health checks.
    """
    if not isinstance(config.weights, AdapterWeightsConfig) or (lora := config.train.lora) is None:
        return []
    num_adapters = str((config.rollout.max_staleness + 2) * max(len(config.policies), 1) + 1)
    if config.engine.protocol == "vllm":
        rank = next((rank for rank in _VLLM_RANKS if rank >= lora.rank), None)
        if rank is None:
            raise ConfigError(f"train.lora.rank is {lora.rank}; vLLM takes at most {_VLLM_RANKS[-1]}")
        return ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", num_adapters]
    is_every = lora.target_modules == "all-linear"
    targets = ["all"] if is_every else sorted({name.rpartition(".")[2] for name in lora.target_modules})
    options = ["--enable-lora", "--max-lora-rank", str(lora.rank), "--lora-target-modules", *targets]
    options += ["--max-loras-per-batch", num_adapters]
    is_on_cpu = isinstance(config.engine, ServerProcessesConfig) and config.engine.gpus_per_server == 0
    return [*options, "--lora-backend", "torch_native"] if is_on_cpu else options


def _gpus(config: ServerProcessesConfig, index: int) -> str:
    """CUDA_VISIBLE_DEVICES for server `index`: its share of the GPUs that this process may use, in order."""
    first = config.first_gpu + index * config.gpus_per_server
    last = first + config.gpus_per_server
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return ",".join(map(str, range(first, last)))
    devices = [device.strip() for device in visible.split(",") if device.strip()]
    if last > len(devices) and config.gpus_per_server:
        raise ConfigError(
            f"{config.num_servers} servers (engine.num_servers) with engine.gpus_per_server="
            f"{config.gpus_per_server} from engine.first_gpu={config.first_gpu} on need more than the {len(devices)} "
            "GPUs of CUDA_VISIBLE_DEVICES"
        )
    return ",".join(devices[first:last])
