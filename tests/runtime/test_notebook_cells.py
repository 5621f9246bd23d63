"""Runs in the cells of a real kernel, over the official fakes: interrupts, errors, and what is shown."""

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from arl.api.errors import FailureBudgetError
from arl.runtime import stopping
from arl.runtime.stopping import run_in_cell

ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 150
FIRST_CELL = """
import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from scripted_launch import small, use_fakes

import arl
from arl.api.fakes import ScriptedEngine, ScriptedTrainEngine
from arl.engine.tiny import tiny_tokenizer

gate, interrupted = Path("gate"), Path("interrupted")
loops = []


def wait_at_the_gate(batch):
    print("a batch is trained")
    while not gate.exists() and not (interrupted.exists() and is_cancelled()):
        time.sleep(0.01)


def is_cancelled():
    return any(task.cancelling() for task in asyncio.all_tasks(loops[-1]))


def answer(request):
    loops.append(asyncio.get_running_loop())
    return tiny_tokenizer().encode("12345678")


def load(*_, **__):
    return ScriptedTrainEngine(wait_at_the_gate)


use_fakes(pytest.MonkeyPatch(), lambda: ScriptedEngine(answer), load=load)


async def digits(answer, data):
    return 1.0


agent = arl.SingleTurnWorkflow(tiny_tokenizer(), digits)
rows = [{"prompt": "Say a number"}] * 20
few = dict(model="none", workflow=agent, dataset=rows, batch_size=2, group_size=2, steps=3)


class Settings(arl.ExperimentConfig):
    steps: int = 3


experiment = arl.Experiment(
    config=Settings, prepare=lambda config: arl.Setup(model="none", workflow=agent, dataset=rows, eval_dataset=rows[:2])
)
"""


@dataclass(slots=True)
class Shown:
    """What a cell showed."""

    text: str = ""
    errors: list[str] = field(default_factory=list[str])
    """Each as the lines that the notebook shows."""
    outputs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Of displays and results: the newest data of each."""
    num_updates: int = 0
    by_id: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    def add(self, message: dict[str, Any]) -> None:
        content = message["content"]
        match message["msg_type"]:
            case "stream":
                self.text += content["text"]
            case "error":
                self.errors.append("\n".join(content["traceback"]))
            case "execute_result":
                self.outputs.append(content["data"])
            case "display_data":
                data = content["data"]
                self.by_id[content["transient"]["display_id"]] = data
                self.outputs.append(data)
            case "update_display_data":
                self.by_id[content["transient"]["display_id"]].update(content["data"])
                self.num_updates += 1
            case _:
                pass


@dataclass(slots=True, frozen=True)
class Kernel:
    manager: KernelManager
    client: BlockingKernelClient
    directory: Path

    def run(self, code: str, meanwhile: Callable[[Shown], None] | None = None) -> Shown:
        """meanwhile: called after each message of the cell."""
        shown = Shown()

        def hear(message: dict[str, Any]) -> None:
            shown.add(message)
            if meanwhile is not None:
                meanwhile(shown)

        self.client.execute_interactive(code, output_hook=hear, timeout=_TIMEOUT_S)
        return shown

    def interrupt(self) -> None:
        self.manager.interrupt_kernel()

    def end_of(self, run_dir: str) -> dict[str, Any]:
        return json.loads((self.directory / run_dir / "END.json").read_text())


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    directory = tmp_path_factory.mktemp("kernel")
    manager = KernelManager(transport="ipc", connection_file=str(directory / "kernel.json"))
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    manager.start_kernel(cwd=str(directory), env={**os.environ, "PYTHONPATH": path})
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=_TIMEOUT_S)
        kernel = Kernel(manager, client, directory)
        first = kernel.run(FIRST_CELL)
        assert not first.errors, first.errors
        yield kernel
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.context.destroy()


@pytest.mark.parametrize(
    "cell",
    [
        "arl.train(**few, run_dir=run_dir)",
        "await arl.atrain(**few, run_dir=run_dir)",
        "experiment.main(['--run_dir', run_dir, '--rollout.batch_size', '2', '--rollout.group_size', '2'])",
        """
async with arl.launch(small(run_dir, steps=3), workflow=agent, dataset=rows) as trainer:
    async for step in trainer: pass""",
    ],
    ids=["train", "atrain", "main", "launch"],
)
def test_interrupts_end_a_cell_briefly_with_a_checkpoint_and_the_same_cell_goes_on(
    kernel: Kernel, cell: str, request: pytest.FixtureRequest
) -> None:
    """The second interrupt comes while the run ends: it waits for the batch that is trained."""
    name = request.node.callspec.id
    gate, interrupted = (kernel.directory / file for file in ("gate", "interrupted"))
    for file in (gate, interrupted):
        file.unlink(missing_ok=True)

    def interrupt_twice(shown: Shown) -> None:
        if not interrupted.exists() and "a batch is trained" in shown.text:
            kernel.interrupt()
            kernel.interrupt()
            interrupted.touch()

    kernel.run(f"run_dir = {name!r}")
    shown = kernel.run(cell, interrupt_twice)
    (error,) = shown.errors
    end = kernel.end_of(name)
    assert end["how"] == "interrupted"
    assert end["version"] == 1
    assert f"continues from {name}/checkpoints/version-00000001" in shown.text + error
    assert len(error.splitlines()) <= 2
    gate.touch()
    shown = kernel.run(cell)
    assert not shown.errors
    assert kernel.end_of(name)["how"] == "finished"
    assert kernel.end_of(name)["version"] == 3


def test_a_run_shows_one_output_that_changes_and_main_leaves_the_flags_of_the_kernel_alone(kernel: Kernel) -> None:
    (kernel.directory / "gate").touch()
    shown = kernel.run("experiment.main()")
    assert not shown.errors
    steps, result = (output["text/html"] for output in shown.outputs)
    assert "3 of 3" in steps
    assert "held-out reward 1.000 ± 0.000 at version 3" in steps
    assert "<svg" in steps
    assert "<progress" not in steps
    assert len(steps) < 5000
    assert shown.num_updates
    assert "step 1 of" not in shown.text
    assert "TrainingResult" in result


def test_an_error_of_arl_is_its_message_after_the_lines_of_the_user(kernel: Kernel) -> None:
    (error,) = kernel.run("experiment.main(['--stpes', '2'])").errors
    place, line, message = error.splitlines()
    assert place.endswith("line 1, in <module>")
    assert line.strip() == "experiment.main(['--stpes', '2'])"
    assert message == "arl.api.errors.ConfigError: --stpes is not a setting; did you mean --steps"


def test_the_first_failure_of_many_stands_before_their_message() -> None:
    try:
        raise ZeroDivisionError("in the user's code")
    except ZeroDivisionError as cause:
        error = FailureBudgetError("too many")
        error.__cause__ = cause
    shown = error._render_traceback_()
    assert "ZeroDivisionError: in the user's code\n" in shown[0]
    assert shown[1:] == ["arl.api.errors.FailureBudgetError: too many"]


def test_an_interrupt_that_the_system_gives_to_another_thread_ends_the_cell() -> None:
    async def main() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        run_in_cell(main(), again="the cell")


async def test_a_call_in_a_thread_that_hangs_does_not_hold_the_cell(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stopping, "_PATIENCE_S", 0.0)
    released = threading.Event()

    async def main() -> int:
        asyncio.get_running_loop().run_in_executor(None, released.wait)
        return 3

    assert run_in_cell(main(), again="the cell") == 3
    assert "calls in threads (asyncio.to_thread) did not return" in caplog.text
    released.set()
    for thread in threading.enumerate():
        if thread.name == "arl-cell":
            thread.join()
