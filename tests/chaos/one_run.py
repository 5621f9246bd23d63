"""One training that faults hit, and that is started again until it is done."""

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faulty_proxy import KINDS
from nursery import Forked, Nursery
from promises import (
    check_end,
    check_error,
    check_files,
    check_output,
    check_processes,
    check_run_dir,
    promised,
    rows_of,
)
from recovery.invariants import newest_checkpoint

from arl.api.settings.sections import laid_over
from arl.engine.client.server_processes import reserved_ports

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
    "train": {"optimizer": {"lr": 1e-6}, "max_recoveries": 20},
    "checkpoint": {"every": 2},
    "log": {"console": False},
}
TIMEOUTS = {"request_timeout_s": 8, "update_timeout_s": 4}
STALL_S = 90.0
"""A run that trains nothing for so long stands still."""
ENDS = {
    signal.SIGKILL: (-9, 1),
    signal.SIGTERM: (143, -15, 1),
    signal.SIGINT: (130, -2, 1),
    signal.SIGUSR1: (138, -10, 1),
}
"""The exit codes of a trainer that got a signal; 1 if something else was about to end it."""


@dataclass(kw_only=True, eq=False)
class Run:
    """place: apart (servers that somebody else runs), own (servers that arl starts) or ranks (over Ray).

    What it does raises AssertionError for a promise that is broken.
    """

    nursery: Nursery
    mark: str
    """In the environment of all processes of the campaign."""
    directory: Path
    temporary: Path
    model: Path
    seed: str
    place: str
    history: list[str] = field(default_factory=list)
    times: Counter[str] = field(default_factory=Counter)
    """How often each fault happened."""
    errors: list[str] = field(default_factory=list)
    """What ended trainers beside the campaign's signals."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """How examples ended."""
    version: int = 0
    """Of the newest checkpoint."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.weather = self.rng.choice([None, None, "jumping_clock", "slow_files"])
        self.has_workers = self.place != "ranks" and self.rng.random() < 0.4
        self.has_proxies = self.place == "apart" and self.rng.random() < 0.5
        self._transport = (
            self.rng.choice(["disk", "disk", "distributed", "adapter"]) if self.place == "apart" else "disk"
        )
        self._pause_mode = self.rng.choice(["in_place", "retract", "abort"])
        self._update_order = self.rng.choice(["all", "rolling"]) if self.place == "apart" else "all"
        self.num_episode_workers = 2 if self.place != "ranks" and self.rng.random() < 0.4 else 0
        self.trainer: Forked | None = None
        self.servers: list[Forked] = []
        self.proxies: list[Forked] = []
        self.second: Forked | None = None
        """Another trainer in the same directory."""
        self.trainer_pids: set[int] = set()
        self._run_dir = self.directory / "run"
        self._log = self.directory / "trainer.log"
        self._log_start = 0
        self._addresses: list[str] = []
        self._ports: list[int] = []
        self._later: list[tuple[float, Callable[[], object]]] = []
        self._began = time.monotonic()

    @contextmanager
    def served(self) -> Iterator[None]:
        """Servers and proxies run inside the block, where the place has some."""
        how = f"weights by {self._transport}, {self._pause_mode}, {self._update_order}"
        workers = f"with workers: {self.has_workers}, of episodes: {self.num_episode_workers}"
        self.say(f"{self.place}, {how}, weather {self.weather}, {workers}")
        num_servers = self.rng.choice([1, 2, 3]) if self.place == "apart" else 0
        with reserved_ports(2 * num_servers) as ports:
            try:
                self._ports, proxies = ports[:num_servers], ports[num_servers:]
                for index in range(num_servers):
                    self.start_server(index)
                if self.has_proxies:
                    self._start_proxies(proxies)
                chosen = proxies if self.has_proxies else self._ports
                self._addresses = [f"http://127.0.0.1:{port}" for port in chosen]
                self._until_servers_listen()
                yield
            finally:
                self._stop_all()

    def finish(self) -> None:
        """Let it train its last steps, with nothing but the weather and bad answers against it."""
        if self.trainer is not None:
            self.end(signal.SIGKILL)
        steps = self.version + self.rng.randint(2, 5)
        for _ in range(10):
            self.begin(steps)
            if self._until_the_end() == 0:
                break
        promised(newest_checkpoint(self._run_dir)[0] == steps, f"the run did not get to its {steps} steps")
        check_files(self._run_dir, self.temporary, self.trainer_pids)
        lost = self.outcomes["d"]
        promised(self.has_proxies or not lost, f"{lost} examples were dropped, and every request was answered")

    def say(self, what: str) -> None:
        self.history.append(f"{time.monotonic() - self._began:7.2f} s  {what}")

    def forked_pids(self) -> set[int]:
        """The running processes of the campaign itself."""
        return {self.nursery.pid, *(process.pid for process in self._running())}

    def _running(self) -> list[Forked]:
        forked = (*self.servers, *self.proxies, self.trainer, self.second)
        return [process for process in forked if process is not None and process.is_running]

    # A trainer's life

    def begin(self, steps: int = 10**6) -> None:
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        self.trainer = self.fork_trainer(steps, self._log)
        self.say(f"a trainer begins at version {self.version}, process {self.trainer.pid}")

    def fork_trainer(self, steps: int, log: Path) -> Forked:
        given = {"model": str(self.model), "run_dir": str(self._run_dir), "steps": steps}
        config = self.directory / "config.yaml"
        config.write_text(json.dumps({**given, **laid_over(SETTINGS, self._settings())}))
        how = {"config": config, "has_workers": self.has_workers, "weather": self.weather, "seed": self.rng.random()}
        trainer = self.nursery.fork("life:train", how, log)
        self.trainer_pids.add(trainer.pid)
        return trainer

    def _settings(self) -> dict[str, Any]:
        """What differs between runs."""
        has_adapters = self._transport == "adapter"
        engine: dict[str, Any] = {"kind": "local"}
        if self.place == "apart":
            engine = {"kind": "sglang", "addresses": self._addresses, "update_order": self._update_order}
        engine |= {"pause_mode": "in_place" if has_adapters else self._pause_mode, **TIMEOUTS}
        train = {"num_ranks": 2 if self.place == "ranks" else 1, "lora": {"rank": 4} if has_adapters else None}
        rollout = {"num_workers": self.num_episode_workers}
        return {"engine": engine, "rollout": rollout, "train": train, "weights": {"transport": self._transport}}

    def wait(self, seconds: float) -> None:
        """Do meanwhile what is due. Returns earlier when the trainer has ended by itself, which it may by an error."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._do_what_is_due()
            if self.trainer is not None and not self.trainer.is_running:
                self._ended((0, 1))
                return
            time.sleep(0.01)

    def until_it_trains(self) -> None:
        """Or ends."""
        self._wait_for(lambda: "trained" in self._output())

    def _until_the_end(self) -> int:
        assert self.trainer is not None
        ending = self.trainer
        self._wait_for(lambda: False)
        return ending.code.result()

    def _wait_for(self, is_done: Callable[[], bool]) -> None:
        """Until it is, or the trainer has ended. A run that stands still meanwhile is broken."""
        trained, deadline = 0, time.monotonic() + STALL_S
        while self.trainer is not None and not is_done():
            if (now := self._output().count("trained")) != trained:
                trained, deadline = now, time.monotonic() + STALL_S
            if time.monotonic() > deadline:
                os.kill(self.trainer.pid, signal.SIGABRT)  # Python then writes where each thread is
                self.trainer.code.result(60)
                raise AssertionError(f"the run stood still for {STALL_S:g} s")
            self.wait(0.02)

    def _output(self) -> str:
        """Of this trainer."""
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def later(self, seconds: float, act: Callable[[], object]) -> None:
        self._later.append((time.monotonic() + seconds, act))

    def _do_what_is_due(self) -> None:
        due = [act for at, act in self._later if at <= time.monotonic()]
        self._later = [(at, act) for at, act in self._later if at > time.monotonic()]
        for act in due:
            with suppress(ProcessLookupError):
                act()

    def end(self, number: signal.Signals) -> None:
        """End the trainer by a signal."""
        assert self.trainer is not None
        os.kill(self.trainer.pid, number)
        deadline = time.monotonic() + STALL_S
        while self.trainer.is_running:
            promised(time.monotonic() < deadline, f"the run did not end within {STALL_S:g} s of {number.name}")
            self._do_what_is_due()
            time.sleep(0.01)
        self._ended(ENDS[number])

    def _ended(self, allowed: Sequence[int]) -> None:
        """Look at what it left."""
        assert self.trainer is not None
        code, self.trainer = self.trainer.code.result(), None
        self.say(f"it ended with {code}")
        if code == 1:
            lines = self._output().splitlines()[::-1]
            self.errors.append(
                next((line for line in lines if line.startswith("error: ")), "error: (its log could not grow)")
            )
            self.say(self.errors[-1])
            check_error(self.errors[-1], self._output())
        promised(code in allowed, f"the exit code is {code}, and not among {allowed}")
        check_output(self._output())
        if self.second is not None:
            kill(self.second)  # it may have begun after the end of the first
        # A process that is held meanwhile goes on, notices that its parent is gone, and ends.
        check_processes(self.mark, self.forked_pids, meanwhile=self._do_what_is_due)
        check_end(self._run_dir, code)
        before = self.version
        self.version, self.outcomes = check_run_dir(self._run_dir, batch_size=BATCH_SIZE, max_staleness=MAX_STALENESS)
        promised(self.version >= before, f"it was at version {before}, and is at {self.version}")

    # Servers and proxies

    def start_server(self, index: int) -> None:
        flags = ["--model", str(self.model), "--port", str(self._ports[index]), "--parent-pid", str(os.getpid())]
        server = self.nursery.fork("life:serve", {"flags": flags}, self._server_log(index))
        self.servers[index : index + 1] = [server]

    def _start_proxies(self, ports: Sequence[int]) -> None:
        rate, kinds = self.rng.choice([0.01, 0.05]), self.rng.sample(KINDS, self.rng.randint(1, len(KINDS)))
        self.say(f"{100 * rate:g} % of requests go wrong: {', '.join(kinds)}")
        faults = {"rate": rate, "kinds": kinds, "log": self.directory / "requests.jsonl"}
        for index, (port, behind) in enumerate(zip(ports, self._ports, strict=True)):
            place = {"port": port, "target": f"http://127.0.0.1:{behind}", "seed": f"{self.seed}-{index}"}
            log = self.directory / f"proxy-{index}.log"
            self.proxies.append(self.nursery.fork("life:relay", {**place, **faults}, log))

    def _until_servers_listen(self) -> None:
        deadline = time.monotonic() + STALL_S
        while not all('"ready"' in self._server_log(index).read_text() for index in range(len(self._ports))):
            promised(time.monotonic() < deadline, "a server did not start")
            time.sleep(0.02)

    def _server_log(self, index: int) -> Path:
        return self.directory / f"server-{index}.log"

    def _stop_all(self) -> None:
        for process in self._running():
            kill(process)
        for row in rows_of(self.directory / "requests.jsonl"):
            self.times[f"a request: {row['fault']}"] += 1


def kill(process: Forked) -> None:
    """And wait for its end."""
    if process.is_running:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    process.code.result(60)
