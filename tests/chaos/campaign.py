"""Random faults against real trainings of a tiny model, and what has to hold after each.

    python tests/chaos/campaign.py --seconds 180 --seed 7
    python tests/chaos/campaign.py --seed 7 --run 12      # the same faults as in run 12 of that campaign

Each run is a training that is hit by a few faults and started again until it is done. The moments of faults come from
the seed; what the machine does in between does not. A broken promise prints the faults so far and the end of the logs,
and keeps the run's directory.
"""

import argparse
import itertools
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))

from faults import FAULTS, faults_of
from nursery import Nursery
from one_run import Run
from promises import MARK

from arl.engine.tiny import TinyShape, write_tiny_model

HERE = Path(__file__).parent
PLACES = ["apart", "apart", "own", "apart", "apart", "ranks", *["apart"] * 6]
"""Where servers and ranks of one run after another are."""
COLUMNS = ("fault", "times", "broken runs with it")


class Campaign:
    """Plays runs one after another in one directory, and counts."""

    def __init__(self, directory: Path, seed: int, places: Sequence[str], num_faults: int, only: str) -> None:
        """only: what the names of faults must contain."""
        self._directory = directory
        self._seed = seed
        self._places = places
        self._num_faults = num_faults
        self._only = only
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
        run.directory.mkdir()
        try:
            with run.served():
                for _ in range(self._num_faults):
                    hit(run, self._only)
                run.finish()
        except AssertionError as error:
            self.num_broken += 1
            self._broken.update(run.times.keys())
            self._explain(run, number, error)
        else:
            sys.stdout.write(f"run {number} ({run.place}): {len(run.trainer_pids)} trainers, {run.version} versions\n")
            sys.stdout.flush()
            shutil.rmtree(run.directory)
        finally:
            for left in run.temporary.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        if run.weather is not None:
            run.times[f"weather: {run.weather}"] += 1
        self._times += run.times
        self._errors += run.errors
        self._totals.update(runs=1, lives=len(run.trainer_pids), versions=run.version, dropped=run.outcomes["d"])

    def _explain(self, run: Run, number: int, error: AssertionError) -> None:
        logs = [log for log in sorted(run.directory.glob("*.log")) if log.stat().st_size]
        ends = [f"--- the end of {log}:\n{tail(log)}" for log in logs]
        again = f"again: python {shlex.join(sys.argv)} --seed {self._seed} --run {number}"
        lines = [f"\nBROKEN in run {number}: {str(error) or repr(error)}", again, *run.history, *ends]
        sys.stdout.write("\n".join(lines) + f"\n--- its files are in {run.directory}\n\n")
        sys.stdout.flush()

    def table(self) -> str:
        rows = [(name, times, self._broken[name]) for name, times in sorted(self._times.items())]
        return "\n".join(f"{fault:<32}{times:>6}{broken:>21}" for fault, times, broken in (COLUMNS, *rows))

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


def hit(run: Run, only: str) -> None:
    """One fault, most often once the trainer trains, and else at its start."""
    faults = [fault for fault in faults_of(run) if only in fault.name]
    if not faults:  # a run without workers, say
        return
    fault = run.rng.choice(faults)
    if run.trainer is None:
        run.begin()
    if run.rng.random() < 0.8 or run.place == "ranks":
        run.until_it_trains()
    run.wait(run.rng.uniform(0, 0.8 if run.place == "apart" else 3))
    if run.trainer is not None:
        fault.hit(run)


def tail(log: Path, num_lines: int = 40) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180.0, help="no run begins later than this")
    parser.add_argument("--seed", type=int, help="unset: another campaign each time")
    parser.add_argument("--run", type=int, help="this run of the campaign alone")
    parser.add_argument("--faults", type=int, default=6, help="of each run")
    parser.add_argument("--places", nargs="+", default=PLACES, choices=sorted(set(PLACES)), help="in turns")
    parser.add_argument("--only", default="", help="a part of the names of the faults, such as 'rank: SIGKILL'")
    args = parser.parse_args()
    if not any(args.only in fault.name for fault in FAULTS):
        parser.error(f"--only is {args.only!r}, and the faults are {', '.join(fault.name for fault in FAULTS)}")
    seed = args.seed if args.seed is not None else random.randrange(10**6)
    directory = Path(tempfile.mkdtemp(prefix="arl-chaos-"))
    campaign = Campaign(directory, seed, args.places, args.faults, args.only)
    numbers = itertools.count() if args.run is None else [args.run]
    try:
        campaign.play(numbers, args.seconds)
    finally:
        sys.stdout.write(f"{campaign.table()}\n{campaign.summary()}\n")
    if campaign.num_broken:
        sys.exit(1)
    shutil.rmtree(directory)


if __name__ == "__main__":
    main()
