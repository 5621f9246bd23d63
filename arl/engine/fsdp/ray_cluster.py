"""Ray for an engine: a cluster that exists or one for this run alone, and a place in it for each rank."""

from __future__ import annotations

import atexit
import ctypes
import importlib
import importlib.util
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from arl.api.errors import ConfigError, TrainingError
from arl.api.version import install_command
from arl.engine.weights.disk import OwnDirectory

_RAM = "/dev/shm"
_STORE_SHARE = 0.3
"""The share of this machine's memory that Ray's object store may take, as by Ray's default. It takes only what it
uses."""
_MIN_STORE_BYTES = 80 << 20
"""Ray refuses less."""
_BINDING_TIMEOUT_S = 5.0
_REACHING_TIMEOUT_S = 10.0
_TOKEN = secrets.token_hex(32)
"""One for this process's life, in case Ray reads it only once."""
_LONGEST_BASE = 24
"""Ray appends 80 characters for its sockets, whose paths may have 107."""

logger = logging.getLogger(__name__)


class Lease:
    """Holds what a process has once, as Ray or a process group, for an engine. One that existed stays as it was; one
    started here ends with its last holder."""

    _holders: ClassVar[int] = 0

    def __init__(self, is_there: bool, start: Callable[[], None]) -> None:
        cls = type(self)
        self._is_held = cls._holders > 0 or not is_there
        if self._is_held:
            if cls._holders == 0:
                start()
            cls._holders += 1

    def release(self) -> None:
        """Idempotent."""
        if self._is_held:
            self._is_held = False
            cls = type(self)
            cls._holders -= 1
            if cls._holders == 0:
                self._end()

    def _end(self) -> None:
        raise NotImplementedError


class RayLease(Lease):
    """Ray: the one that this process uses already, or one that ends with the last lease.

    address None: Ray on this machine alone, which declares num_cpus and num_gpus whatever the machine has. It listens
    at loopback, asks for a token, reports to nobody, and ends with the process, too. Else: a cluster's address.
    """

    _directory: ClassVar[OwnDirectory | None] = None
    _store_bytes: ClassVar[int] = 0

    def __init__(self, address: str | None, *, num_cpus: int, num_gpus: int) -> None:
        """Raises ConfigError without Ray, or without a cluster at the address."""
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(f"several ranks need Ray: {install_command('ray')}; or set train.num_ranks to 1")
        with _as_ray_starts(private=address is None):
            self._ray: Any = importlib.import_module("ray")
            start = partial(self._start, num_cpus, num_gpus) if address is None else partial(self._connect, address)
            super().__init__(self._ray.is_initialized(), start)

    def _start(self, num_cpus: int, num_gpus: int) -> None:
        base = tempfile.gettempdir()
        try:
            directory = OwnDirectory(Path(base if len(base) <= _LONGEST_BASE else "/tmp"), "arl-ray-")
        except OSError as error:
            raise TrainingError(f"Ray has no place for its files in {base}: {error}; set TMPDIR") from error
        type(self)._directory, type(self)._store_bytes = directory, _store_bytes()
        try:
            # Ray's setting for machines with a firewall, for a Ray that was imported before arl could set its variable.
            constants: Any = importlib.import_module("ray._private.ray_constants")
            before, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
            try:
                self._ray.init(
                    address="local",
                    num_cpus=num_cpus,
                    num_gpus=num_gpus,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    object_store_memory=self._store_bytes,
                    _temp_dir=str(directory.path),
                )
            finally:
                constants.ENABLE_RAY_CLUSTER = before
        except BaseException as error:  # also if interrupted: daemons that have started must not stay
            self._end()
            if isinstance(error, Exception):
                raise TrainingError(f"Ray could not be started on this machine: {error}") from error
            raise
        atexit.register(self._end)  # for a script that ends without closing its engine

    def room(self) -> int | None:
        """How many bytes ranks can be sent at once, in memory and then on the disk. None if it is someone else's Ray.

        Ray itself waits for ever if there is no room on the disk.
        """
        if self._directory is None:
            return None
        disk = shutil.disk_usage(self._directory.path)
        return min(self._store_bytes, _free(_RAM)) + max(disk.free - disk.total // 20, 0)  # Ray leaves the last 5 %

    def _end(self) -> None:
        cls = type(self)
        with _sigterm_kept():
            self._ray.shutdown()
        if cls._directory:
            # Ray's core keeps the token of this process's first Ray, and would refuse calls from another cluster's
            # nodes. Ray has no public way, and older versions have no tokens.
            raylet: Any = importlib.import_module("ray._raylet")
            with suppress(AttributeError):
                raylet.Config.initialize("")
                raylet.AuthenticationTokenLoader.instance().reset_cache()
            cls._directory.remove()
            cls._directory = None
        atexit.unregister(self._end)

    def _connect(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        # One try: where `auto` finds traces of a cluster that has ended, Ray itself would try for minutes.
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "1")
        try:
            if port.isdigit():  # Ray itself would try for minutes
                socket.create_connection((host.strip("[]"), int(port)), timeout=_REACHING_TIMEOUT_S).close()
            self._ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # Ray raises many kinds, its own and Python's
            self._ray.shutdown()
            what = f"there is no Ray cluster at train.ray_address={address}: {error}; start one by `ray start --head`"
            raise ConfigError(f"{what}, or leave ray_address unset to use this machine alone") from error


def _free(directory: str) -> int:
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return 0


def _store_bytes() -> int:
    """The size of Ray's object store. What does not fit goes to the disk."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # the limit of a container, if there is one
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    room = int(0.9 * _free(_RAM))
    if room < _MIN_STORE_BYTES:
        what = "%s has room for %d MiB, so ranks get their data through %s; give a container more by --shm-size"
        logger.warning(what, _RAM, room >> 20, tempfile.gettempdir())
    return max(int(min(_STORE_SHARE * memory, room)), _MIN_STORE_BYTES)


@contextmanager
def _as_ray_starts(*, private: bool) -> Iterator[None]:
    """Set the variables that Ray reads at import and start; afterwards undo what Ray changed in this process."""
    environment = dict(os.environ)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if private:
        # Ranks have an environment of their own, so workers started before them would idle.
        os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112 (this is its name)
        # Ray's setting for machines with a firewall: everything listens at loopback. It is read at import.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        if not os.environ.keys() & {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}:
            os.environ["RAY_AUTH_TOKEN"] = _TOKEN  # else Ray makes one and leaves it in the home directory
    level = logging.getLogger("ray").level
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        with _sigterm_kept():
            yield
    finally:
        for name in os.environ.keys() - environment.keys():  # only these: threads may be reading the others
            del os.environ[name]
        os.environ.update(environment)
        logging.getLogger("ray").setLevel(level)


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Keep the handler of SIGTERM. Ray's core replaces it below Python, on any thread, and aborts the process 3 s after
    the signal. When Ray ends, it would leave the signal without any handler.
    """
    sigaction, action = ctypes.CDLL(None).sigaction, ctypes.create_string_buffer(256)  # no system's struct is larger
    is_main, handler = threading.current_thread() is threading.main_thread(), signal.getsignal(signal.SIGTERM)
    sigaction(signal.SIGTERM, None, action)
    try:
        yield
    finally:
        if is_main and handler is not None:  # Ray sets Python's handler, too; None: Python did not set it
            signal.signal(signal.SIGTERM, handler)
        sigaction(signal.SIGTERM, action, None)


class Placement:
    """A place for each rank on as few nodes as possible: rank 0's here if there is room, ranks of a node in a row."""

    def __init__(self, num_ranks: int, *, num_cpus: int, num_gpus: int, deadline: float) -> None:
        """deadline: on the monotonic clock. Raises TrainingError if the cluster has no room by then."""
        import ray

        self._ray = ray
        self._bundle = bundle_of(num_cpus, num_gpus)
        here = ray.get_runtime_context().get_node_id()
        self._group = self._reserve(num_ranks, here, deadline)
        node_of: dict[int, str] = ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        self._bundles = sorted(node_of, key=lambda bundle: (node_of[bundle] != here, node_of[bundle], bundle))
        nodes = {node["NodeID"]: node for node in ray.nodes()}
        self.address: str = nodes[node_of[self._bundles[0]]]["NodeManagerAddress"]
        """The address of rank 0's node."""

    def strategy(self, rank: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._bundles[rank])

    def release(self) -> None:
        self._ray.util.remove_placement_group(self._group)

    def _reserve(self, num_ranks: int, here: str, deadline: float) -> Any:
        """A placement group; one bundle is bound to this node if it can hold it, and has room soon."""
        bundles = [dict(self._bundle) for _ in range(num_ranks)]
        node = next(node for node in self._ray.nodes() if node["NodeID"] == here)
        fits_here = all(node["Resources"].get(name, 0.0) >= amount for name, amount in self._bundle.items())
        on_this_node = {f"node:{node['NodeManagerAddress']}": 0.001} if fits_here else {}
        soon = min(deadline, time.monotonic() + _BINDING_TIMEOUT_S)
        if group := _reserved([self._bundle | on_this_node, *bundles[1:]], soon):
            return group
        total, free = self._ray.cluster_resources(), self._ray.available_resources()
        there = " and ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}s" for name in self._bundle)
        needed = " and ".join(f"{amount:g} {name}(s)" for name, amount in self._bundle.items())
        shortage = f"{num_ranks} ranks need {needed} each, and the Ray cluster has {there} free"
        logger.warning("%s: waiting for room", shortage)
        if group := _reserved(bundles, deadline):
            return group
        late = f"{shortage}; no room became free in time"
        raise TrainingError(f"{late}. Make room, or set train.num_ranks or train.num_threads lower")


def bundle_of(num_cpus: int, num_gpus: int) -> dict[str, float]:
    """The resources that a rank needs on its node."""
    return {"CPU": float(num_cpus)} | ({"GPU": float(num_gpus)} if num_gpus else {})


def has_room(bundles: list[dict[str, float]], timeout_s: float) -> bool:
    """Whether the cluster that this process uses has room for these bundles, or will have in time."""
    import ray

    if (group := _reserved(bundles, time.monotonic() + timeout_s)) is None:
        return False
    ray.util.remove_placement_group(group)
    return True


def _reserved(bundles: list[dict[str, float]], deadline: float) -> Any | None:
    """A placement group; None if there is no room by then."""
    import ray

    group = ray.util.placement_group(bundles, strategy="PACK")
    try:
        if group.wait(max(deadline - time.monotonic(), 0)):
            return group
    except BaseException:  # also if interrupted: the group would hold its resources
        ray.util.remove_placement_group(group)
        raise
    ray.util.remove_placement_group(group)
    return None
