"""Servers on the nodes of a Ray cluster. Each has an actor, which reserves its GPUs and CPUs, and runs its process.

    this process, which watches each server (server_processes.py)
        | calls
    RayServers, in a process that is in the cluster, and ends with the cluster's head
        | Ray
    ServerActor, on each server's node, which starts the server

A server that dies is started again by its actor, at its address. If the actor is lost, with its node or Ray's head, the
server gets another place, and a new address, at which the engine's roster finds it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from arl.api.errors import ArlError, ConfigError, ProcessLostError, ServerError
from arl.api.events import PlacedPart, gpus_text
from arl.api.settings.engines import LocalEngineConfig, ServerProcessesConfig, StartedServersConfig
from arl.engine.client.server_processes import (
    Program,
    ServerProcess,
    ServerProcesses,
    local_program,
    log_paths,
    running,
    stock_program,
)
from arl.runtime.processes.actor import ObjectProcess
from arl.runtime.processes.logs import ChildLog
from arl.runtime.threads import offload

_CLOSING_S = 5.0
_TRY_EVERY_S = 2.0
KeyedProgram = Callable[[str, int, str, int], Program]
"""The program of a server: its key, or the file that holds it; its number, host and port."""


@asynccontextmanager
async def started_on_ray(
    model: str, config: LocalEngineConfig | ServerProcessesConfig, ray_address: str, logs: Path, api_key: str
) -> AsyncIterator[ServerProcesses]:
    """Run config.num_servers servers of the model directory `model` on the nodes of a Ray cluster; see `running`.

    logs: a directory that all nodes see. api_key: what the servers ask for. Raises ConfigError if there is no cluster,
    ServerError if it has no room within config.startup_timeout_s.
    """
    program = local_program if isinstance(config, LocalEngineConfig) else stock_program
    build = partial(RayServers, ray_address, config, partial(program, model, config), api_key)
    cluster = _Cluster(build, logs / "ray-servers.log", config.startup_timeout_s)
    starts = {log: partial(cluster.start, i) for i, log in enumerate(log_paths(config, logs))}
    try:
        async with running(starts, config) as servers:
            yield servers
    finally:
        await asyncio.shield(offload(cluster.close))


class _Cluster:
    """The process that is in the cluster, and another one after it was lost."""

    def __init__(self, build: Callable[[], RayServers], log: Path, startup_timeout_s: float) -> None:
        self._build, self._log, self._startup_timeout_s = build, log, startup_timeout_s
        self._patience_s = 0.0
        """How long to wait for a cluster: at the start it has to be there."""
        self._process: ObjectProcess | None = None
        self._starting = threading.Lock()
        self._is_closed = False

    async def start(self, number: int, log: ChildLog) -> ServerProcess:
        with log.opened():
            pass
        for is_last in (False, True):  # the first may be one that was lost unnoticed
            process = await offload(self._in_cluster)
            try:
                pid, part = await offload(process.beside, "start", number, log.path.absolute())
                ending = offload(process.beside, "wait", number, pid)
                ending.add_done_callback(lambda done: done.cancelled() or done.exception())  # else asyncio logs it
                tell = partial(process.tell, "signal", number, pid)
                return ServerProcess(address=part.address, pid=pid, ending=ending, signal=tell, part=part)
            except ProcessLostError as error:
                if self._process is process:
                    self._process = None
                if is_last:
                    raise ServerError(str(error)) from error
        raise AssertionError("unreachable")

    def _in_cluster(self) -> ObjectProcess:
        with self._starting:
            if self._is_closed:
                raise ServerError("the run is ending")
            until = time.monotonic() + self._patience_s
            while self._process is None:
                try:
                    self._process = ObjectProcess("the process that starts servers on Ray", self._build, self._log, {})
                except ProcessLostError as error:
                    raise ServerError(str(error)) from error
                except ConfigError:  # there is no cluster; the head that was lost may come back
                    if self._is_closed or time.monotonic() >= until:
                        raise
                    time.sleep(_TRY_EVERY_S)
            self._patience_s = self._startup_timeout_s
            return self._process

    def close(self) -> None:
        self._is_closed = True
        with self._starting:
            if self._process is not None:
                self._process.close(timeout_s=_CLOSING_S)


# In the process that is in the cluster


class RayServers:
    """The actors of all servers, in places that Ray reserves together: on as few nodes as can hold them, and not on
    this one, where rank 0 of the trainer belongs, if others have room.
    """

    def __init__(self, ray_address: str, config: StartedServersConfig, program: KeyedProgram, api_key: str) -> None:
        from arl.engine.fsdp.ray_cluster import RayLease

        self._lease = RayLease(ray_address, num_cpus=0, num_gpus=0)
        self._program, self._api_key = program, api_key
        self._is_key_in_file = isinstance(config, ServerProcessesConfig)
        self._bundle, self._timeout_s = config.bundle, config.startup_timeout_s
        self._num_servers = config.num_servers
        self._reserving = threading.Lock()
        self._group: Any = None
        self._actors: dict[int, Any] = {}

    def start(self, number: int, log: Path) -> tuple[int, PlacedPart]:
        """Start a server; returns its process id and place. Raises ServerError, and what its program raises."""
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

        with self._reserving:
            self._group = self._group or self._reserved(self._num_servers)
        for is_last in (number not in self._actors, True):
            actor = self._actors[number] = self._actors.get(number) or self._new_actor(number)
            ask = actor.start.remote(self._program, self._api_key, self._is_key_in_file, number, log)
            try:
                return self._ray.get(ask, timeout=self._timeout_s)
            except RayTaskError as error:
                cause = error.cause
                raise cause if isinstance(cause, ArlError) else ServerError(str(cause)) from error
            except (RayActorError, GetTimeoutError) as error:  # its node is lost, or has no room
                self._forget(number)
                if is_last:
                    why = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
                    raise ServerError(
                        f"server {number} got no place on the Ray cluster within {self._timeout_s:g} s "
                        f"(engine.startup_timeout_s): {why}"
                    ) from error
        raise AssertionError("unreachable")

    def wait(self, number: int, pid: int) -> int:
        """Returns the exit code, once the process has ended. Raises ServerError if it is lost."""
        from ray.exceptions import RayError

        try:
            return self._ray.get(self._actors[number].wait.remote(pid))
        except (RayError, KeyError) as error:
            raise ServerError(f"its node or Ray's process there ended ({type(error).__name__})") from error

    def signal(self, number: int, pid: int, which: int) -> None:
        if actor := self._actors.get(number):
            actor.signal.remote(pid, which)

    def close(self) -> None:
        for number in [*self._actors]:
            self._forget(number)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
        self._lease.release()

    def _reserved(self, num_servers: int) -> Any:
        """A placement group. Raises ServerError if there is no room in time."""
        here = self._ray.get_runtime_context().get_node_id()
        others = [node["Resources"] for node in self._ray.nodes() if node["Alive"] and node["NodeID"] != here]
        room = sum(int(min(node.get(name, 0.0) // amount for name, amount in self._bundle.items())) for node in others)
        elsewhere = [{"ray.io/node-id": f"!{here}"}] * num_servers if room >= num_servers else None
        group = self._ray.util.placement_group(
            [dict(self._bundle)] * num_servers, strategy="PACK", bundle_label_selector=elsewhere
        )
        if group.wait(self._timeout_s):
            return group
        self._ray.util.remove_placement_group(group)
        total, free = self._ray.cluster_resources(), self._ray.available_resources()
        needed = " and ".join(f"{amount:g} {name}(s)" for name, amount in self._bundle.items())
        there = " and ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}s" for name in self._bundle)
        raise ServerError(
            f"{num_servers} servers need {needed} each on one node, and the Ray cluster has {there} free; no room "
            "became free within engine.startup_timeout_s. Add nodes, or set engine.num_servers lower"
        )

    def _new_actor(self, number: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
        options = {
            "num_cpus": self._bundle["CPU"],
            "num_gpus": self._bundle.get("GPU", 0),
            "max_concurrency": 8,
            "scheduling_strategy": strategy,
        }
        return self._ray.remote(ServerActor).options(**options).remote()

    def _forget(self, number: int) -> None:
        if actor := self._actors.pop(number, None):
            self._ray.kill(actor)

    @property
    def _ray(self) -> Any:
        import ray

        return ray


# On a server's node


class ServerActor:
    """Runs a server's process, and another one after it, at the same address. The process ends with the actor."""

    def __init__(self) -> None:
        import ray

        self._gpus = [int(gpu) for gpu in ray.get_gpu_ids()]
        self._host: str = ray.util.get_node_ip_address()
        # Bound but never listening: a server that sets this option too, as all do, may bind and listen beside it.
        self._port = socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET)
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind((self._host, 0))
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(
        self, program: KeyedProgram, api_key: str, is_key_in_file: bool, number: int, log: Path
    ) -> tuple[int, PlacedPart]:
        """Returns the process id, and where it runs. Raises what the program raises, OSError."""
        port: int = self._port.getsockname()[1]
        key_file = _written_key(api_key) if is_key_in_file else None
        running = Future[subprocess.Popen[bytes]]()
        try:
            own = program(str(key_file) if key_file else api_key, number, self._host, port)
        except BaseException:
            _remove(key_file)
            raise

        def run() -> None:  # on a thread that lives as long as the server, which ends with the thread that started it
            try:
                with log.open("ab") as stream:
                    process = subprocess.Popen(
                        own.argv,
                        stdin=subprocess.DEVNULL,
                        stdout=stream,
                        stderr=stream,
                        env=dict(own.environment),
                        start_new_session=True,
                    )
            except OSError as error:
                running.set_exception(error)
            else:
                running.set_result(process)
                process.wait()
            _remove(key_file)

        threading.Thread(target=run, name="server", daemon=True).start()
        process = running.result()
        self._processes[process.pid] = process
        host = f"[{self._host}]" if ":" in self._host else self._host
        address, device = f"http://{host}:{port}", gpus_text(self._gpus) or "cpu"
        return process.pid, PlacedPart(part="server", host=socket.gethostname(), address=address, device=device)

    def wait(self, pid: int) -> int:
        return self._processes[pid].wait()

    def signal(self, pid: int, which: int) -> None:
        """SIGKILL also reaches all that the process has started, which may outlive it."""
        with suppress(ProcessLookupError):
            (os.killpg if which == signal.SIGKILL else os.kill)(pid, which)


def _written_key(api_key: str) -> Path:
    """SGLang's settings with its key, which no command line may show, in a file for this user's eyes alone."""
    descriptor, name = tempfile.mkstemp(prefix="arl-sglang-", suffix=".yaml")
    with os.fdopen(descriptor, "w") as file:
        file.write(f'api-key: "{api_key}"\n')
    return Path(name)


def _remove(file: Path | None) -> None:
    if file is not None:
        file.unlink(missing_ok=True)
