"""Random faults against real trainings of a tiny model, and what has to hold after each.

    python tests/chaos/campaign.py --seconds 180 --seed 7
    python tests/chaos/campaign.py --seed 7 --run 12      # the same faults as in run 12 of that campaign

Each run is a training that is hit by a few faults and started again until it is done. The moments of faults come from
the seed; what the machine does in between does not. A broken promise prints the faults so far and the end of the logs,
and keeps the run's directory.
"""

import argparse
import itertools
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).parents[1]))

from faulty_proxy import KINDS
from nursery import Forked, Nursery
from promises import MARK, check_files, check_output, check_processes, check_run_dir, processes, rows_of
from recovery.invariants import newest_checkpoint
from rich.console import Console
from rich.table import Table

from arl.api.settings import laid_over
from arl.engine.client.processes import reserved_ports
from arl.engine.tiny import TinyShape, write_tiny_model

HERE = Path(__file__).parent
BATCH_SIZE, MAX_STALENESS = 2, 2
SETTINGS = {
    "rollout": {
        "batch_size": BATCH_SIZE,
        "group_size": 2,
        "max_staleness": MAX_STALENESS,
        "max_concurrent_episodes": 6,
        "episode_retries": 5,
        "max_failure_rate": 1.0,
        "episode_timeout_s": 30,
    },
    "train": {"optimizer": {"lr": 1e-6}},
    "checkpoint": {"every": 2},
    "log": {"trajectories": 100, "console": False},
    "engine": {"request_timeout_s": 8, "update_timeout_s": 4},
}
PLACES = [*["apart"] * 5, "own", *["apart"] * 5, "ranks"]
STALL_S = 90.0
"""A run that trains nothing for so long stands still."""
ENDS = {
    signal.SIGKILL: (-9,),
    signal.SIGTERM: (143, -15, 1),
    signal.SIGINT: (130, -2, 1),
    signal.SIGUSR1: (138, -10, 1),
}
"""How a trainer may end that got a signal."""


class BrokenPromiseError(Exception):
    """A promise that did not hold."""


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    act: Callable[["Run"], None]


@dataclass(kw_only=True, eq=False)
class Run:
    """One training. place: apart (servers that somebody else runs), own (servers that arl starts) or ranks."""

    nursery: Nursery
    mark: str
    directory: Path
    model: Path
    temporary: Path
    seed: str
    place: str
    history: list[str] = field(default_factory=list)
    times: Counter[str] = field(default_factory=Counter)
    """How often each fault happened."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """How examples ended."""
    errors: list[str] = field(default_factory=list)
    """What ended the trainer beside the campaign's signals."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.run_dir = self.directory / "run"
        self.log = self.directory / "trainer.log"
        self.began = time.monotonic()
        self.trainer: Forked | None = None
        self.pids: set[int] = set()
        self.weather = self.rng.choice([None, None, "jumping_clock", "slow_files"])
        self.has_workers = self.place != "ranks" and self.rng.random() < 0.4
        self.has_proxies = self.place == "apart" and self.rng.random() < 0.5
        self.num_servers = self.rng.choice([1, 2, 3])
        self.servers: list[Forked] = []
        self.proxies: list[Forked] = []
        self._ports: list[int] = []
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._log_start = 0
        self.version = 0

    # The campaign's view

    def play(self, num_faults: int) -> None:
        """Raises BrokenPromiseError."""
        self.directory.mkdir()
        self.say(f"{self.place}, weather {self.weather}, workers {self.has_workers}, proxies {self.has_proxies}")
        with self._around():
            for _ in range(num_faults):
                self._suffer(self.rng.choice(self._faults()))
            self._finish()
        if self.weather:
            self.times[f"weather: {self.weather}"] += 1

    def say(self, what: str) -> None:
        self.history.append(f"{time.monotonic() - self.began:7.2f} s  {what}")

    def _faults(self) -> list[Fault]:
        faults = [*ON_TRAINER, ON_DISK]
        if self.place == "apart":
            faults += ON_SERVERS
        if self.place == "own":
            faults += [OWN_SERVER] * 3
        if self.place == "ranks":
            faults += [RANK] * 4
        if self.has_workers:
            faults += [WORKER] * 2
        return faults

    def _suffer(self, fault: Fault) -> None:
        if self.trainer is None:
            self.begin(steps=10**6)
        if self.rng.random() < 0.8 or self.place == "ranks":
            self.until_it_trains()
        self.wait(self.rng.uniform(0, 0.8 if self.place == "apart" else 3))
        if self.trainer is None:
            return
        self.say(fault.name)
        with suppress(ProcessLookupError, IndexError):  # it has just ended, or has not begun
            fault.act(self)
            self.times[fault.name] += 1

    def _finish(self) -> None:
        """Let it end its steps, with nothing but requests that fail and the weather against it."""
        if self.trainer is not None:
            self._signal(signal.SIGKILL)
        steps = self.version + self.rng.randint(2, 5)
        for _ in range(10):
            self.begin(steps)
            if self.until_the_end() == 0:
                break
        self._promised(newest_checkpoint(self.run_dir)[0] == steps, f"the run did not get to its {steps} steps")
        self.keep(lambda: check_files(self.run_dir, self.temporary, self.pids))
        lost = self.outcomes["d"]
        self._promised(self.has_proxies or not lost, f"{lost} examples were dropped, and every request was answered")

    # A life

    def begin(self, steps: int) -> None:
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        given = {"model": str(self.model), "run_dir": str(self.run_dir), "steps": steps}
        config = self.directory / "config.yaml"
        config.write_text(json.dumps({**given, **laid_over(SETTINGS, self._place_settings())}))
        how = {"config": str(config), "has_workers": self.has_workers, "weather": self.weather}
        how["seed"] = self.rng.random()
        self.trainer = self.nursery.fork("life:train", how, self.log)
        self.pids.add(self.trainer.pid)
        self.say(f"a trainer begins at version {self.version}, process {self.trainer.pid}")

    def _place_settings(self) -> dict[str, Any]:
        if self.place == "apart":
            ports = self._ports[self.num_servers :] if self.has_proxies else self._ports
            addresses = [f"http://127.0.0.1:{port}" for port in ports[: self.num_servers]]
            return {"engine": {"kind": "sglang", "addresses": addresses}}
        ranks = {"train": {"num_ranks": 2}} if self.place == "ranks" else {}
        return {"engine": {"kind": "local", "max_restarts": 10}, **ranks}

    def wait(self, seconds: float) -> None:
        """Returns earlier when the trainer has ended by itself, which it may, and which is looked at."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._do_what_is_due()
            if self.trainer is not None and not self.trainer.is_running:
                self._ended((0, 1))
                return
            time.sleep(0.01)

    def until_it_trains(self) -> None:
        self._wait_for(lambda: "trained" in self.output())

    def until_the_end(self) -> int:
        assert self.trainer is not None
        ending = self.trainer
        self._wait_for(lambda: False)
        return ending.code.result()

    def _wait_for(self, is_done: Callable[[], bool]) -> None:
        """Until it is, or the trainer has ended. A run that stands still meanwhile is broken."""
        output, deadline = "", time.monotonic() + STALL_S
        while self.trainer is not None and not is_done():
            if (now := self.output()) != output:
                output, deadline = now, time.monotonic() + STALL_S
            if time.monotonic() > deadline:
                os.kill(self.trainer.pid, signal.SIGABRT)  # Python then writes where each thread is
                self.trainer.code.result(60)
                raise BrokenPromiseError(f"the run stood still for {STALL_S:g} s")
            self.wait(0.02)

    def output(self) -> str:
        """Of this life."""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, act))

    def _do_what_is_due(self) -> None:
        due = [act for at, act in self._later if at <= time.monotonic()]
        self._later = [(at, act) for at, act in self._later if at > time.monotonic()]
        for act in due:
            with suppress(ProcessLookupError):
                act()

    # Its end

    def _signal(self, number: signal.Signals) -> None:
        """A signal that ends the trainer."""
        assert self.trainer is not None
        os.kill(self.trainer.pid, number)
        deadline = time.monotonic() + STALL_S
        while self.trainer.is_running:
            self._promised(time.monotonic() < deadline, f"the run did not end within {STALL_S:g} s of {number.name}")
            self._do_what_is_due()
            time.sleep(0.01)
        self._ended(ENDS[number])

    def _ended(self, allowed: Sequence[int]) -> None:
        assert self.trainer is not None
        code, self.trainer = self.trainer.code.result(), None
        self.say(f"it ended with {code}")
        if code == 1:
            lines = self.output().splitlines()[::-1]
            self.errors.append(next((line for line in lines if line.startswith("error: ")), "error: without a word"))
            self.say(self.errors[-1])
        self._promised(code in allowed, f"the exit code is {code}, and not among {allowed}")
        self.keep(lambda: check_output(self.output()))
        known = {process.pid for process in (*self.servers, *self.proxies) if process.is_running}
        self.keep(lambda: check_processes(self.mark, {self.nursery.pid, *known}))
        before = self.version
        self.keep(self._look)
        self._promised(self.version >= before, f"it was at version {before}, and is at {self.version}")

    def _look(self) -> None:
        self.version, self.outcomes = check_run_dir(self.run_dir, batch_size=BATCH_SIZE, max_staleness=MAX_STALENESS)

    def _promised(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise BrokenPromiseError(otherwise)

    def keep(self, check: Callable[[], None]) -> None:
        try:
            check()
        except AssertionError as error:
            raise BrokenPromiseError(str(error) or repr(error)) from error

    # Servers and proxies

    @contextmanager
    def _around(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.callback(self._stop_all)
            if self.place == "apart":
                self._ports = stack.enter_context(reserved_ports(2 * self.num_servers))
                self.servers = [self._server(index) for index in range(self.num_servers)]
                if self.has_proxies:
                    self._start_proxies()
                self._until_they_listen()
            yield

    def _server(self, index: int) -> Forked:
        flags = ["--model", str(self.model), "--port", str(self._ports[index]), "--parent-pid", str(os.getpid())]
        return self.nursery.fork("life:serve", {"flags": flags}, self.directory / f"server-{index}.log")

    def _start_proxies(self) -> None:
        kinds, rate = self.rng.sample(KINDS, self.rng.randint(1, len(KINDS))), self.rng.choice([0.01, 0.05])
        self.say(f"{100 * rate:g} % of requests go wrong: {', '.join(kinds)}")
        for index in range(self.num_servers):
            target, port = (f"http://127.0.0.1:{self._ports[index]}", self._ports[self.num_servers + index])
            log = self.directory / "requests.jsonl"
            settings = {
                "target": target,
                "port": port,
                "rate": rate,
                "kinds": kinds,
                "seed": f"{self.seed}-{index}",
                "log": log,
            }
            output = self.directory / f"proxy-{index}.log"
            self.proxies.append(self.nursery.fork("life:relay", settings, output))

    def _until_they_listen(self) -> None:
        deadline = time.monotonic() + STALL_S
        while not all('"ready"' in log.read_text() for log in self._server_logs()):
            self._promised(time.monotonic() < deadline, "a server did not start")
            time.sleep(0.02)

    def _server_logs(self) -> list[Path]:
        return [self.directory / f"server-{index}.log" for index in range(self.num_servers)]

    def _stop_all(self) -> None:
        running = [process for process in (self.trainer, *self.proxies, *self.servers) if process is not None]
        for process in running:
            if process.is_running:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                process.code.result(60)
        for row in rows_of(self.directory / "requests.jsonl"):
            self.times[f"a request: {row['fault']}"] += 1

    # What happens to it

    def end_trainer(self, number: signal.Signals) -> None:
        if number != signal.SIGKILL:
            self.until_it_trains()  # before that a signal ends it as it ends any script
        if self.trainer is not None:
            self._signal(number)

    def hold(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        self.later(self.rng.uniform(0.1, 3), lambda: os.kill(pid, signal.SIGCONT))

    def hold_trainer(self) -> None:
        assert self.trainer is not None
        self.hold(self.trainer.pid)

    def end_server(self, number: signal.Signals) -> None:
        index = self.rng.randrange(self.num_servers)
        server = self.servers[index]
        os.kill(server.pid, number)
        os.kill(server.pid, signal.SIGCONT)

        def start() -> None:
            if server.code.result(60) is not None and self.servers[index] is server:
                self.servers[index] = self._server(index)

        self.later(self.rng.uniform(0, 2), start)

    def hold_server(self) -> None:
        self.hold(self.rng.choice(self.servers).pid)

    def kill_one(self, commands: Sequence[str]) -> None:
        known = [process.pid for process in (self.trainer, *self.servers, *self.proxies) if process is not None]
        found = [p for p, line in processes(self.mark) if p not in known and any(part in line for part in commands)]
        os.kill(self.rng.choice(sorted(found)), signal.SIGKILL)

    def fill_disk(self) -> None:
        """Let no file of the trainer grow beyond some bytes for a while: each write beyond fails."""
        assert self.trainer is not None
        pid, hard = self.trainer.pid, resource.prlimit(self.trainer.pid, resource.RLIMIT_FSIZE)[1]
        set_file_limit(pid, self.rng.choice([0, 100, 5_000, 50_000]), hard)
        self.later(self.rng.uniform(0.1, 2), lambda: set_file_limit(pid, hard, hard))


def set_file_limit(pid: int, soft: int, hard: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))


ON_TRAINER = (
    Fault("trainer: SIGKILL", lambda run: run.end_trainer(signal.SIGKILL)),
    Fault("trainer: SIGTERM", lambda run: run.end_trainer(signal.SIGTERM)),
    Fault("trainer: SIGINT", lambda run: run.end_trainer(signal.SIGINT)),
    Fault("trainer: SIGUSR1", lambda run: run.end_trainer(signal.SIGUSR1)),
    Fault("trainer: SIGSTOP", Run.hold_trainer),
)
ON_SERVERS = (
    Fault("server: SIGKILL", lambda run: run.end_server(signal.SIGKILL)),
    Fault("server: SIGTERM", lambda run: run.end_server(signal.SIGTERM)),
    Fault("server: SIGSTOP", Run.hold_server),
)
OWN_SERVER = Fault("server of arl's: SIGKILL", lambda run: run.kill_one(["arl.engine.local"]))
RANK = Fault("rank: SIGKILL", lambda run: run.kill_one(["ray::RankActor"]))
WORKER = Fault("worker: SIGKILL", lambda run: run.kill_one(["forkserver", "keeper"]))
ON_DISK = Fault("disk: full", Run.fill_disk)


class Campaign:
    """Plays runs one after another in one directory, and counts."""

    def __init__(self, directory: Path, seed: int, places: Sequence[str], num_faults: int) -> None:
        self._directory = directory
        self._seed = seed
        self._places = places
        self._num_faults = num_faults
        self._times: Counter[str] = Counter()
        self._broken: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._errors: list[str] = []
        self.num_broken = 0

    def play(self, numbers: Iterable[int], seconds: float) -> None:
        temporary, mark = self._directory / "tmp", self._directory.name
        temporary.mkdir()
        shape = TinyShape(hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16)
        self._model = write_tiny_model(self._directory / "model", shape=shape)
        deadline = time.monotonic() + seconds
        environment = {MARK: mark, "TMPDIR": str(temporary), "HF_HUB_OFFLINE": "1", "PYTHONFAULTHANDLER": "1"}
        with Nursery(["life", "faulty_proxy"], [HERE], **environment) as nursery:
            for number in numbers:
                if time.monotonic() > deadline:
                    break
                self._one(nursery, number)

    def _one(self, nursery: Nursery, number: int) -> None:
        run = Run(
            nursery=nursery,
            mark=self._directory.name,
            directory=self._directory / f"run-{number}",
            model=self._model,
            temporary=self._directory / "tmp",
            seed=f"{self._seed}-{number}",
            place=self._places[number % len(self._places)],
        )
        try:
            run.play(self._num_faults)
        except BrokenPromiseError as error:
            self.num_broken += 1
            self._broken.update(run.times.keys())
            self._explain(run, number, error)
        else:
            shutil.rmtree(run.directory)
        finally:
            for left in run.temporary.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        self._times += run.times
        self._errors += run.errors
        self._totals.update(runs=1, lives=len(run.pids), versions=run.version, dropped=run.outcomes["d"])

    def _explain(self, run: Run, number: int, error: BrokenPromiseError) -> None:
        logs = [log for log in sorted(run.directory.glob("*.log")) if log.stat().st_size]
        ends = [f"--- the end of {log}:\n{tail(log)}" for log in logs]
        again = f"python tests/chaos/campaign.py --seed {self._seed} --run {number}"
        lines = [f"\nBROKEN in run {number}: {error}", f"again: {again}", *run.history, *ends]
        sys.stdout.write("\n".join(lines) + f"\n--- its files are in {run.directory}\n\n")
        sys.stdout.flush()

    def table(self) -> Table:
        table = Table(box=None, header_style="bold")
        for column in ("fault", "times", "broken runs with it"):
            table.add_column(column, justify="left" if column == "fault" else "right")
        for name, times in sorted(self._times.items()):
            table.add_row(name, str(times), str(self._broken[name]))
        return table

    def summary(self) -> str:
        """An error of each kind that ended a trainer, and totals."""
        totals = self._totals
        by_kind = {" ".join(error.split()[1:5]): error for error in self._errors}
        ends = [f"ended a trainer: {error[:200]}" for error in by_kind.values()]
        return "\n".join(ends) + (
            f"\n{len(self._errors)} trainers ended with an error. "
            f"{totals['runs']} runs with {totals['lives']} trainers, {totals['versions']} versions trained, "
            f"{totals['dropped']} examples dropped; {self.num_broken} runs broke a promise (seed {self._seed})"
        )


def tail(log: Path, num_lines: int = 40) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if not line.startswith("Loading weights:")]
    return "\n".join(lines[-num_lines:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180.0, help="no run begins later than this")
    parser.add_argument("--seed", type=int, help="unset: another campaign each time")
    parser.add_argument("--run", type=int, help="this run of the campaign alone")
    parser.add_argument("--faults", type=int, default=6, help="of each run")
    parser.add_argument("--places", nargs="+", default=PLACES, choices=sorted(set(PLACES)), help="in turns")
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else random.randrange(10**6)
    directory = Path(tempfile.mkdtemp(prefix="arl-chaos-"))
    campaign = Campaign(directory, seed, args.places, args.faults)
    numbers = itertools.count() if args.run is None else [args.run]
    try:
        campaign.play(numbers, args.seconds)
    finally:
        console = Console()
        console.print(campaign.table())
        console.print(campaign.summary())
    if campaign.num_broken:
        sys.exit(1)
    shutil.rmtree(directory)


if __name__ == "__main__":
    main()
