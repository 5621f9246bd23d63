"""What may happen to a training: each fault is a function of the run that it hits."""

import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from one_run import STALL_S, Run, kill
from promises import processes, promised

LEARNER = "arl.runtime.processes.actor"
"""A part of the command line of the process in which the trainer computes."""


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    act: Callable[[Run], None]

    def hit(self, run: Run) -> None:
        """Counts it, unless what it would hit has just ended, or has not begun."""
        run.say(self.name)
        with suppress(ProcessLookupError, IndexError):
            self.act(run)
            run.times[self.name] += 1


def end_trainer(run: Run, number: signal.Signals) -> None:
    if number != signal.SIGKILL:
        run.until_it_trains()  # before that a signal ends it as it ends any script
    if run.trainer is not None:
        run.end(number)


def go_on(pid: int) -> None:
    with suppress(ProcessLookupError):  # it has ended, and somebody has noted it
        os.kill(pid, signal.SIGCONT)


def hold(run: Run, pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    run.later(run.rng.uniform(0.1, 3), lambda: go_on(pid))


def hold_trainer(run: Run) -> None:
    assert run.trainer is not None
    hold(run, run.trainer.pid)


def start_another(run: Run) -> None:
    """A second trainer in the run's directory ends at once, whatever it finds there."""
    run.until_it_trains()
    if run.trainer is None:
        return
    run.second = run.fork_trainer(10**6, run.directory / "second.log")
    deadline = time.monotonic() + STALL_S
    while run.second.is_running and run.trainer is not None and time.monotonic() < deadline:
        run.wait(0.05)
    if run.trainer is not None:
        kill(run.second)
        code = run.second.code.result()
        promised(code == 1, f"a second trainer in the directory ended with {code}")


def end_server(run: Run, number: signal.Signals) -> None:
    """It is started again a while later."""
    index = run.rng.randrange(len(run.servers))
    server = run.servers[index]
    os.kill(server.pid, number)
    go_on(server.pid)

    def start() -> None:
        go_on(server.pid)  # it may be held again
        if server.code.result(60) is not None and run.servers[index] is server:
            run.start_server(index)

    run.later(run.rng.uniform(0, 2), start)


def hold_server(run: Run) -> None:
    hold(run, run.rng.choice(run.servers).pid)


def started(run: Run, *commands: str) -> list[int]:
    """The processes that the trainer has started, by a part of their command lines."""
    known = run.forked_pids()
    return sorted(p for p, line in processes(run.mark) if p not in known and any(part in line for part in commands))


def kill_one(run: Run, *commands: str) -> None:
    os.kill(run.rng.choice(started(run, *commands)), signal.SIGKILL)


def fill_disk(run: Run) -> None:
    """Let no file of the trainer grow beyond some bytes for a while: writes beyond that fail, as on a full disk."""
    assert run.trainer is not None
    size, until_s = run.rng.choice([0, 100, 5_000, 50_000]), run.rng.uniform(0.1, 2)
    for pid in (run.trainer.pid, *started(run, LEARNER)):
        hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))
        run.later(until_s, partial(resource.prlimit, pid, resource.RLIMIT_FSIZE, (hard, hard)))


def signals(victim: str, act: Callable[[Run, signal.Signals], None], *numbers: signal.Signals) -> list[Fault]:
    return [Fault(f"{victim}: {number.name}", partial(act, number=number)) for number in numbers]


ON_TRAINER = (
    *signals("trainer", end_trainer, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1),
    Fault("trainer: SIGSTOP", hold_trainer),
    Fault("trainer: a second one", start_another),
    Fault("disk: full", fill_disk),
    Fault("learner: SIGKILL", lambda run: kill_one(run, LEARNER)),
    Fault("learner: SIGSTOP", lambda run: hold(run, started(run, LEARNER)[0])),
)
ON_SERVERS = (*signals("server", end_server, signal.SIGKILL, signal.SIGTERM), Fault("server: SIGSTOP", hold_server))
OWN_SERVER = Fault("server of arl's: SIGKILL", lambda run: kill_one(run, "arl.engine.local"))
RANK = Fault("rank: SIGKILL", lambda run: kill_one(run, "ray::RankActor"))
WORKER = Fault("worker: SIGKILL", lambda run: kill_one(run, "spawn_main", "keeper"))
EPISODE_WORKER = Fault("episode worker: SIGKILL", lambda run: kill_one(run, "arl.rollout.workers.worker"))
FAULTS = (*ON_TRAINER, *ON_SERVERS, OWN_SERVER, RANK, WORKER, EPISODE_WORKER)


def faults_of(run: Run) -> Sequence[Fault]:
    """Those that can happen to it; some of them several times, so that they are as frequent as others."""
    at_place = {"apart": ON_SERVERS, "own": [OWN_SERVER] * 3, "ranks": [RANK] * 4}[run.place]
    on_workers = [WORKER] * 2 * run.has_workers + [EPISODE_WORKER] * run.num_episode_workers
    return [*ON_TRAINER, *at_place, *on_workers]
