"""One run of `arl finetune`: read the rows, train, evaluate, save, export.

    rows --read--> Examples  --shuffled--> minibatch --> train_batch --> metrics.jsonl
                        |                                     |--> checkpoints/ (weights, optimizer, position)
                    held-out rows ----------> evaluate ------ +--> evaluations.jsonl

The engine's version is the position in the data: the order of the examples is a function of the seed. DPO's reference
is computed from the start model at each start, before a checkpoint is loaded.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from arl.algorithm.losses.preferences import PreferenceLoss, RewardModelLoss, SFTLoss
from arl.api.errors import ConfigError, DatasetError
from arl.api.settings.finetuning import FinetuneConfig
from arl.api.train_engine import TrainEngine
from arl.api.types import Example
from arl.data.loading import load_dataset, without_last
from arl.engine.model_files import load_part, load_tokenizer, model_digest, model_limits
from arl.run.finetuning.examples import Examples, Loss, shuffled_batches, to_demonstrations, to_preferences, write_model
from arl.run.learner import load_train_engine
from arl.runtime.stopping import SCRIPT_END
from arl.runtime.threads import TrainThread, finished, offload
from arl.training.checkpoints import Checkpoints, RunState
from arl.training.display import Display, display_of, hide_progress_bars
from arl.training.metrics_log import cut_rows, read_jsonl
from arl.training.run_dir import (
    LOCK,
    THIS_ONE,
    RunLock,
    holder_of,
    newest_checkpoint,
    record_start,
    usable,
    write_atomically,
)
from arl.training.run_result import END, RunEnd

log = logging.getLogger(__name__)

TRAINED = "trained"
"""Where in run_dir the trained model is written, as a Hugging Face directory."""


async def fine_tune(config: FinetuneConfig) -> dict[str, Any]:
    """Train to the end in config.run_dir, or on from its newest checkpoint. Returns what summary.json says.

    A cancellation saves a checkpoint. Raises ConfigError, DatasetError, ModelError, RunFileError, CheckpointError,
    TrainingError.
    """
    lock, display = RunLock(config.run_dir), display_of(config.log)
    await offload(lock.take)
    end = {"began": _now(), "process": holder_of(config.run_dir / LOCK).removesuffix(THIS_ONE)}
    thread, run = TrainThread(), TuningRun(config, display)
    error: BaseException | None = None
    try:
        (config.run_dir / END).unlink(missing_ok=True)
        await offload(hide_progress_bars)
        await thread(run.open)
        return await run.run(thread)
    except BaseException as failure:
        error = failure
        raise
    finally:
        await thread(run.close)
        await finished(offload(thread.close))
        said = run.end(error, **end)
        with suppress(OSError):  # the lock's file tells what END.json does not
            write_atomically(config.run_dir / END, json.dumps(asdict(said), indent=2) + "\n")
        display.tell("end", "\n".join(filter(None, said.lines(config.run_dir)[:2])), **asdict(said))
        display.close()
        lock.release()


class TuningRun:
    """The parts of one run. Its blocking methods run on the train thread, one after another."""

    def __init__(self, config: FinetuneConfig, display: Display) -> None:
        self._config, self._display = config, display
        self._loss: Loss = SFTLoss()
        if config.kind == "dpo":
            own = config.dpo.model_dump()
            self._loss = PreferenceLoss(kind=own.pop("loss"), **own)
        elif config.kind == "rm":
            self._loss = RewardModelLoss(center=config.rm.center)
        self._rows = {name: config.run_dir / f"{name}.jsonl" for name in ("metrics", "evaluations")}
        self._engine: TrainEngine | None = None
        self._held_out: Examples | None = None
        self._spent_s, self._began, self._saved_at = 0.0, time.monotonic(), time.monotonic()
        self.num_steps: int | None = None

    def open(self) -> None:
        """Read the rows, load the model, and continue from the newest checkpoint, if any."""
        config, head = self._config, "value" if self._config.kind == "rm" else "policy"
        with self._display.waiting(f"reading {config.dataset}"):
            kept: dict[str, Any] = {"subset": config.subset, "columns": config.columns}
            rows = load_dataset(config.dataset, split=config.split, **kept)
            held_out_rows: Sequence[Example] = ()
            if config.eval_dataset is not None:
                held_out_rows = load_dataset(config.eval_dataset, split=config.eval_split, **kept)
            elif config.num_held_out:
                rows, held_out_rows = without_last(config.dataset, rows, config.num_held_out)
            training = self._examples(config.dataset, rows)
            held_out = self._examples("the held-out rows", held_out_rows)
        self.num_steps = config.epochs * -(-len(training) // config.batch_size)
        record_start(config, self.num_steps)
        optimizer = config.train.optimizer
        if optimizer.schedule != "constant" and optimizer.total_steps is None:
            optimizer = optimizer.model_copy(update={"total_steps": self.num_steps})
        settings = config.train.model_copy(update={"optimizer": optimizer})
        with self._display.waiting(f"loading {config.model}"):
            self._engine = engine = load_train_engine(config.model, settings, seed=config.seed, head=head)
        self._training = Examples(config.kind, training, engine.limits)
        self._held_out = Examples(config.kind, held_out, engine.limits) if held_out else None
        if config.kind == "dpo":
            with self._display.waiting(f"computing the reference's logprobs with {config.model}"):
                for examples in filter(None, (self._training, self._held_out)):
                    examples.refer_to(engine)
        digest = hashlib.sha256()
        for example in training:
            digest.update(repr(example).encode())
        identity = {  # what must not change for a run to continue
            "kind": config.kind,
            "model": config.model,
            "model_digest": model_digest(config.model),
            "seed": config.seed,
            "batch_size": config.batch_size,
            "examples": f"{len(training)} with digest {digest.hexdigest()[:16]}",
        }
        self._checkpoints = Checkpoints(config.run_dir / "checkpoints", config.checkpoint.keep, identity)
        state = self._checkpoints.load_newest(engine.load)
        self._spent_s = state.values["time_s"] if state else 0.0
        for path in filter(Path.exists, self._rows.values()):  # rows of steps that are trained again, and torn ones
            if num_undone := cut_rows(path, self.version):
                aside = f"moved to {path.stem}.undone.jsonl, as training goes on from there"
                self._display.say(f"{path.name}: {num_undone} rows after step {self.version} {aside}")
        self._began = self._saved_at = time.monotonic()
        if engine.version:
            self._display.say(f"continuing {config.run_dir} from step {engine.version} of {self.num_steps}")

    @property
    def version(self) -> int:
        """The steps trained."""
        return self._opened.version

    @property
    def _opened(self) -> TrainEngine:
        assert self._engine is not None
        return self._engine

    async def run(self, thread: TrainThread) -> dict[str, Any]:
        """Train the steps that are left, and write the trained model."""
        assert self.num_steps is not None
        config = self._config
        batches = shuffled_batches(len(self._training), config.epochs, config.batch_size, config.seed)
        try:
            await thread(self._evaluate_if_due)
            with self._display.work(config.kind, self.num_steps - self.version) as advance:
                for batch in islice(batches, self.version, None):
                    metrics = await thread(self._step, batch)
                    advance(loss=metrics["loss"])
                    await thread(self._evaluate_if_due)
                    every, every_s = config.checkpoint.every, config.checkpoint.every_s
                    is_late = every_s is not None and time.monotonic() - self._saved_at >= every_s
                    if is_late or (every and self.version % every == 0):
                        await thread(self._save)
        except asyncio.CancelledError:
            await thread(self._save)
            raise
        await thread(self._save)
        await thread(write_model, self._opened, config.run_dir / TRAINED)
        rows = read_jsonl(self._rows["evaluations"])
        summary: dict[str, Any] = {"steps": self.version, "wall_s": self._time_s(), "num_examples": len(self._training)}
        for when, row in (("before", rows[0]), ("after", rows[-1])) if rows else ():
            summary |= {f"eval_{name}_{when}": row[name] for name in ("loss", "accuracy", "margin") if name in row}
        await thread(write_atomically, config.run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
        return summary

    def _step(self, batch: Sequence[int]) -> dict[str, float]:
        """One optimizer step, and its row: both, or neither."""
        began = time.monotonic()
        metrics = self._opened.train_batch([self._training.minibatch(batch)], self._loss)
        seconds = time.monotonic() - began
        known = {
            "version": self.version,
            "epoch": self.version * self._config.batch_size / max(len(self._training), 1),
            "time_s": self._time_s(),
            "tokens_per_s": metrics.get("tokens", 0.0) / max(seconds, 1e-9),
        }
        self._append("metrics", {**known, **metrics})
        return metrics

    def _evaluate_if_due(self) -> None:
        """Evaluate the present weights if this version is one to evaluate, and it was not done."""
        every = self._config.evaluation.every
        is_due = self.version in (0, self.num_steps) or bool(every and self.version % every == 0)
        if self._held_out is None or not is_due:
            return
        if any(row["version"] == self.version for row in read_jsonl(self._rows["evaluations"])):
            return
        began = time.monotonic()
        with self._display.waiting("evaluating"):
            means = self._held_out.evaluate(self._opened, self._loss)
        row = {"version": self.version, **means, "num_examples": len(self._held_out)}
        row["wall_s"] = time.monotonic() - began
        self._append("evaluations", row)
        said = ", ".join(f"{name} {value:.4f}" for name, value in means.items())
        where = f"step {self.version} of {self.num_steps} ({len(self._held_out)} examples)"
        self._display.tell("evaluation", f"held-out {said} at {where}", **row)

    def _save(self) -> None:
        """Write a checkpoint, unless there is one of this version."""
        if self.version in (0, self._checkpoints.newest_version()):
            return
        state = RunState(values={"version": self.version, "time_s": self._time_s()})
        self._checkpoints.begin(self.version, self._opened.save, state)()
        self._saved_at = time.monotonic()

    def end(self, error: BaseException | None, *, began: str, process: str) -> RunEnd:
        """How it ended, for END.json."""
        script, checkpoint = SCRIPT_END.get(), newest_checkpoint(self._config.run_dir)
        name = signal.Signals(script.signal).name if script and script.signal is not None else None
        is_cancelled = isinstance(error, asyncio.CancelledError | KeyboardInterrupt)
        if error is None:
            why, what_next = "all steps are trained", f"the trained model is {self._config.run_dir / TRAINED}"
        else:
            why = f"{name} asked it to end" if is_cancelled and name else str(error) or type(error).__name__
            what_next = f"the same command {f'continues from {checkpoint}' if checkpoint else 'starts over'}"
        return RunEnd(
            how="finished" if error is None else "interrupted" if is_cancelled else "failed",
            why=why,
            what_next=what_next,
            signal=name,
            error=type(error).__name__ if isinstance(error, Exception) else None,
            began=began,
            ended=_now(),
            process=process,
            version=None if self._engine is None else self.version,
            steps=self.num_steps,
            checkpoint=None if checkpoint is None else str(checkpoint),
        )

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def _examples(self, name: str, rows: Sequence[Example]) -> list[Any]:
        if not len(rows):
            return []
        from transformers import AutoConfig

        config = self._config
        limit = model_limits(load_part(AutoConfig, config.model, "its config")).context_length
        if config.max_tokens and limit and config.max_tokens > limit:
            raise ConfigError(f"max_tokens is {config.max_tokens}, but the context of {config.model} is {limit} tokens")
        tokenizer = load_tokenizer(config.model)
        try:
            read = to_demonstrations if config.kind == "sft" else to_preferences
            return [*read(rows, tokenizer, max_tokens=config.max_tokens or limit, too_long=config.too_long)]
        except DatasetError as error:
            raise DatasetError(f"{name}: {error}") from error

    def _append(self, name: str, row: dict[str, Any]) -> None:
        with usable(self._rows[name]), self._rows[name].open("a") as file:
            file.write(json.dumps(row) + "\n")

    def _time_s(self) -> float:
        return self._spent_s + time.monotonic() - self._began


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
