"""Programs in separate Linux namespaces, by bubblewrap (`bwrap`), which needs neither root nor a daemon.

keeper.py starts, watches and kills them; docs/sandbox.md says what enforces each limit.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from arl.api.errors import SandboxError
from arl.runtime.threads import offload
from arl.sandbox.cgroup import Cgroups
from arl.sandbox.contract import MAIN, Limits, LocalSandbox, ProgramOutcome, laid_out, not_open
from arl.sandbox.keeper import STAGE
from arl.sandbox.seccomp import seccomp_filter
from arl.sandbox.streams import Header, connected, message, received

log = logging.getLogger(__name__)

_ASK = """
import json, site, sys
print(json.dumps([sys.prefix, sys.base_prefix, sys.exec_prefix, *site.getsitepackages()]))
"""


RawOutcome = tuple[str, int, float, bytes, bytes]
"""The arguments of ProgramOutcome.of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """The Python that runs programs."""

    path: str
    prefixes: tuple[str, ...]
    """Directories outside of /usr that hold it, its library and its packages."""
    packages: tuple[str, ...]
    """Directories of installed packages that programs may not see, as the caller did not choose this interpreter."""


def _interpreter_at(path: str | None) -> Interpreter:
    """The interpreter at `path` with its packages, or this process's interpreter without any. Raises SandboxError."""
    # Programs see directories by their real paths. The interpreter stays a link, as a virtual environment's is one.
    directory, name = os.path.split(path or Path(sys.base_exec_prefix, "bin", "python{}.{}".format(*sys.version_info)))
    chosen = os.path.join(os.path.realpath(directory), name)
    try:
        asking = subprocess.run([chosen, "-I", "-c", _ASK], capture_output=True, env={}, timeout=60, check=True)
        places: list[str] = json.loads(asking.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise SandboxError(f"the sandbox's Python, {chosen}, does not run: {error}") from error
    prefixes = sorted({os.path.realpath(prefix) for prefix in places[:3]})
    home = Path(os.path.expanduser("~"))  # the default interpreter
    for prefix in prefixes:
        if home.is_relative_to(prefix):
            raise SandboxError(
                f"the sandbox's Python, {chosen}, is installed into {prefix}, which holds your home directory, and "
                f"programs would see all of it; pass python= one that has a directory of its own, or /usr/bin/python3"
            )
    return Interpreter(
        path=chosen,
        prefixes=tuple(prefix for prefix in prefixes if not Path(prefix).is_relative_to("/usr")),
        packages=() if path else tuple(filter(os.path.isdir, places[3:])),
    )


WORK = "/sandbox"
INSTALL = (
    "install bubblewrap 0.8 or newer: `apt-get install bubblewrap` (Debian 12, Ubuntu 24.04), "
    "`dnf install bubblewrap` (Fedora, RHEL 10)"
)
_PROBE = "open('probe', 'w').write('written')"
_ADVICE = {
    "kernel/apparmor_restrict_unprivileged_userns": (
        "1",
        (
            "AppArmor forbids user namespaces: as root, allow them by a profile for bwrap (apparmor.d(5)), or to all "
            "programs by `sysctl kernel.apparmor_restrict_unprivileged_userns=0`"
        ),
    ),
    "kernel/unprivileged_userns_clone": ("0", "as root, run `sysctl kernel.unprivileged_userns_clone=1`"),
    "user/max_user_namespaces": ("0", "as root, run `sysctl user.max_user_namespaces=10000`"),
}
"""Setting below /proc/sys -> the value that forbids user namespaces, and the remedy."""
_IN_CONTAINER = (
    "in a container, namespaces have to be allowed when it is started, for instance by `docker run "
    "--security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined`"
)
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": WORK,
    "TMPDIR": WORK,
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",  # threads count against Limits.processes
    "OPENBLAS_NUM_THREADS": "1",
}
_USER = "1000"
"""A program's user in its namespace. The host sees the user who runs arl, or nobody if that is root."""
_DEVICES = ("null", "full", "random", "urandom")
"""Without zero: a shared mapping of /dev/zero holds memory even when no process maps it any more."""
_SPARE = 256 << 20
"""Bytes that a process may map beyond memory_bytes: unused mappings take no memory."""
_TIMERS = 256
"""Most timers and queued signals of all processes together; the kernel counts them by user."""
_ARENA = 64 << 20
"""Bytes of address space that the C library sets aside for each thread."""


class BubblewrapSandbox(LocalSandbox):
    """Runs programs by bubblewrap, as an unprivileged user.

    python: the interpreter that runs programs, with its installed packages. The default is this process's interpreter
        with only the standard library.
    read_only: further directories of the host that programs may read, at the same paths.
    directories: absolute paths that lead to directories of a program's working directory: "/app" to its `app`.
    limits: for runs that name none. concurrency: programs at once; one per processor by default.

    Entering runs a program. If that fails, SandboxError says what to install or allow.
    """

    def __init__(
        self, *, python: str | None = None, read_only: Sequence[str] = (), directories: Sequence[str] = (),
        limits: Limits | None = None, concurrency: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(limits=limits, concurrency=concurrency)
        self.directories = tuple(directories)
        self._python = python
        self._read_only = read_only
        self._filter = seccomp_filter()

    async def _open(self, opened: AsyncExitStack) -> None:
        bwrap, prlimit = shutil.which("bwrap"), shutil.which("prlimit", path="/usr/bin:/bin")
        if bwrap is None:
            raise SandboxError(f"bwrap is not installed; {INSTALL}")
        if prlimit is None:
            raise SandboxError("prlimit is not installed; install util-linux")
        interpreter = await offload(_interpreter_at, self._python)
        shown = [*interpreter.prefixes, *map(os.path.abspath, self._read_only)]
        staged = [path for path in shown if os.geteuid() == 0 and not _is_open_to_all(path)]
        sources = {path: f"{STAGE}/{staged.index(path)}" if path in staged else path for path in shown}
        unshared = [f"--unshare-{kind}" for kind in ("user", "ipc", "pid", "net", "uts", "cgroup-try")]
        identity = ["--uid", _USER, "--gid", _USER, "--hostname", "sandbox"]
        alone = ["--disable-userns", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        self._bwrap = [bwrap, *unshared, *identity, *alone]
        self._tree = _tree(sources, interpreter.packages, self.directories)
        self._interpreter = interpreter.path
        self._keeping = Keeping(places=self._concurrency, staged=staged, cgroups=await offload(Cgroups))
        opened.push_async_callback(self._keeping.aclose)
        await self._keeping.start()
        try:  # only a program shows whether namespaces work here
            outcome = await self._run(laid_out(_PROBE), b"", Limits(wall_s=60))
        except SandboxError as failure:
            raise SandboxError(f"bubblewrap cannot be used: {failure}; {_advice(str(failure))}") from None
        if not outcome.succeeded:
            raise SandboxError(f"Python does not run in bubblewrap: {outcome}")

    async def _run(self, contents: Mapping[str, bytes], stdin: bytes, limits: Limits) -> ProgramOutcome:
        return ProgramOutcome.of(*await self.run_raw(contents, stdin, limits))

    async def run_raw(self, contents: Mapping[str, bytes], stdin: bytes, limits: Limits) -> RawOutcome:
        """As `run`, with the output as bytes. contents: of `laid_out`."""
        return await self._keeping.run(
            [*self._bwrap, "--size", str(limits.disk_bytes), "--perms", "0700", "--tmpfs", WORK, *self._tree],
            ["--", *_rlimits(limits), self._interpreter, "-I", "-u", f"{WORK}/{MAIN}"],
            self._filter,
            stdin,
            {f"{WORK}/{path}": content for path, content in contents.items()},
            limits,
        )


START = """
import sys, types
*packages, directory = sys.argv.pop(1).split("|")
for depth in range(len(packages)):
    package = types.ModuleType(".".join(packages[: depth + 1]))
    package.__path__ = ["/".join([directory, *packages[: depth + 1]])]
    sys.modules[package.__name__] = package
from arl.sandbox.keeper import main
main()
"""
"""Imports the keeper from packages without running their `__init__`, whose imports take a second."""


class Keeping:
    """arl's side of the keeper: starts it, and has it run programs."""

    def __init__(self, *, places: int, staged: Sequence[str], cgroups: Cgroups) -> None:
        """places: programs that run at once. staged: directories that a keeper started by root cannot reach as nobody;
        they appear at keeper.STAGE/0 and so on."""
        self._places = asyncio.Semaphore(places)
        self._staged = staged
        self._process: asyncio.subprocess.Process | None = None
        self._socket: socket.socket | None = None
        self._starting = asyncio.Lock()
        self._cgroups = cgroups
        self._told: str | None = None

    async def start(self) -> None:
        ours, keepers = socket.socketpair()
        names = __name__.split(".")[:-1]
        packages = "|".join([*names, str(Path(__file__).parents[len(names)])])
        with keepers:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", START, packages),
                *(str(keepers.fileno()), str(os.getpid()), *self._staged),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=[keepers.fileno()],
                start_new_session=True,  # Ctrl-C is for arl, which then ends the keeper
                env={"PATH": os.environ.get("PATH", os.defpath)},
            )
        self._socket = ours

    async def aclose(self) -> None:
        """End every program. When this returns, they and the keeper are gone."""
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._socket = None
            await self._process.wait()

    async def run(
        self, command: Sequence[str], program: Sequence[str], confined: bytes, stdin: bytes,
        files: Mapping[str, bytes], limits: Limits,
    ) -> RawOutcome:  # fmt: skip
        """Run `command`, then the keeper's options, then `program`, as one command line. Raises SandboxError."""
        request: Header = {"command": [*command], "program": [*program], "files": [*files], "limits": asdict(limits)}
        async with self._places, self._cgroups.made(request["limits"]) as cgroup:
            request["cgroup"] = cgroup and cgroup.path
            reader, writer = await self._connect([cgroup.entrance] if cgroup else [])
            try:
                writer.write(message(request, [stdin, confined, *files.values()]))
                header, blobs = await received(reader)
                await reader.read()  # until the keeper has closed its end
                if cgroup and "code" in header:
                    self._cgroups.check(cgroup)
            except (asyncio.IncompleteReadError, ConnectionError) as gone:
                raise SandboxError("the sandbox was closed, or its keeper died, during a call") from gone
            except asyncio.CancelledError:
                writer.write_eof()
                with suppress(ConnectionError):
                    await reader.read()  # its end: the place is free once all its processes are gone
                raise
            finally:
                writer.close()
        if self._told != self._cgroups.names:
            level = logging.INFO if self._told is None else logging.WARNING  # a change may be a loss
            self._told = self._cgroups.names
            log.log(level, "programs run in cgroups of their own: %s", self._told)
        if header.get("ended_by") == "stopped":
            raise SandboxError("the sandbox was closed during a call")
        if "error" in header:
            raise SandboxError(f"a program could not be run: {header['error']}")
        ended_by, code = header["ended_by"], header["code"]
        if ended_by == "exit" and code > 128:  # as in shells, a signal
            code, ended_by = 128 - code, "signal"
        if ended_by == "signal" and code == -24:  # SIGXCPU, of RLIMIT_CPU
            ended_by = "cpu"
        stdout, stderr = blobs
        return ended_by, code, header["wall_s"], stdout, stderr

    async def _connect(self, entrance: Sequence[int]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the keeper; to another one if it died."""
        async with self._starting:
            if self._socket is None:
                raise not_open()
            ours, theirs = socket.socketpair()
            with ExitStack() as failed, theirs:
                failed.callback(ours.close)
                try:
                    socket.send_fds(self._socket, [b"x"], [theirs.fileno(), *entrance])
                except ConnectionError:
                    log.warning("the keeper of the sandbox died, perhaps because memory ran out; another is started")
                    self._socket.close()
                    await self.start()
                    socket.send_fds(self._socket, [b"x"], [theirs.fileno(), *entrance])
                opened = await connected(ours)
                failed.pop_all()
                return opened


def _tree(sources: dict[str, str], hidden: Sequence[str], directories: Sequence[str]) -> list[str]:
    """Options that build the tree around the working directory. sources: path in it -> path on the host."""
    options = ["--clearenv"]
    for name, value in _ENVIRONMENT.items():
        options += ["--setenv", name, value]
    options += ["--ro-bind", "/usr", "/usr"]
    for path in ("/etc/ld.so.cache", "/etc/alternatives"):  # the latter leads from awk to the awk that is installed
        options += ["--ro-bind-try", path, path]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        if (top := Path("/", name)).is_symlink():
            options += ["--symlink", os.readlink(top), str(top)]
        elif top.is_dir():
            options += ["--ro-bind", str(top), str(top)]
    for path, source in sources.items():
        options += ["--ro-bind", source, path]
    for path in hidden:
        options += ["--tmpfs", path, "--remount-ro", path]
    # pid 1 is bubblewrap's: a program that wrote to its memory would become it, outlive its run, and read other output.
    options += ["--proc", "/proc", "--perms", "0555", "--tmpfs", "/proc/1", "--remount-ro", "/proc/1"]
    options += ["--tmpfs", "/dev"]
    for name in _DEVICES:
        options += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        options += ["--symlink", f"/proc/self/{target}", f"/dev/{name}"]
    if not any(Path(path).is_relative_to("/tmp") for path in sources):
        options += ["--symlink", WORK, "/tmp"]
    for path in directories:
        options += ["--symlink", f"{WORK}{path}", path]
    return [*options, "--symlink", WORK, "/dev/shm", "--chdir", WORK, "--remount-ro", "/dev", "--remount-ro", "/"]


def _rlimits(limits: Limits) -> list[str]:
    """The kernel's limits for each process. They are set within the user namespace, where NPROC counts anew."""
    cpu_s = int(limits.cpu_s) + 1
    own = {
        "data": limits.memory_bytes + _SPARE,
        "as": limits.memory_bytes + _SPARE + _ARENA * limits.processes,
        "cpu": f"{cpu_s}:{cpu_s + 1}",
        "fsize": limits.disk_bytes,
        "nproc": limits.processes + 2,  # pid 1, which is bwrap's, and one to spare for its helper
        "nofile": limits.open_files,
        "core": 0,
        "memlock": 0,
        "msgqueue": 0,
        "sigpending": _TIMERS,
        "stack": 8 << 20,
    }
    return ["/usr/bin/prlimit", *(f"--{name}={value}" for name, value in own.items())]


def _is_open_to_all(path: str) -> bool:
    real = Path(os.path.realpath(path))
    return all(place.stat().st_mode & 0o001 for place in (real, *real.parents))


def _advice(failure: str) -> str:
    if "Unknown option" in failure:
        return INSTALL
    for setting, (forbidding, advice) in _ADVICE.items():
        file = Path("/proc/sys", setting)
        if file.exists() and file.read_text().strip() == forbidding:
            return advice
    return _IN_CONTAINER
