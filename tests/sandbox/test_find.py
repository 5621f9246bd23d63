"""The sandbox that is found, the error if there is none; and the one that isolates nothing."""

import asyncio
import logging
import os
from pathlib import Path

import pytest
from sandbox.conftest import once_running, sleeper

from arl.api.errors import SandboxError
from arl.sandbox import BubblewrapSandbox, Limits, UnsafeSandbox, find_sandbox


@pytest.mark.asyncio(loop_scope="session")
async def test_bubblewrap_is_found_first(bubblewrap: BubblewrapSandbox) -> None:
    async with find_sandbox() as sandbox:
        assert (await sandbox.run("import os; print(os.getcwd())")).stdout == "/sandbox\n"


async def test_docker_is_found_where_there_is_no_bubblewrap(docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(docker))
    async with find_sandbox() as sandbox:
        assert (await sandbox.run("print(1)")).stdout == "1\n"
    assert (docker / "calls.jsonl").exists()


async def test_an_error_says_what_to_install_if_there_is_no_sandbox(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError) as refusal:
        await find_sandbox().__aenter__()
    for part in (
        "bwrap is not installed",
        "docker is not installed",
        "apt-get install",
        "dnf install",
        "kind='unsafe'",
    ):
        assert part in str(refusal.value)
    with pytest.raises(SandboxError, match="not open"):
        await find_sandbox().run("")


async def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(SandboxError, match="no sandbox of kind 'chroot'; it is auto, bubblewrap, docker or unsafe"):
        find_sandbox("chroot")  # pyright: ignore[reportArgumentType]


async def test_unsafe_runs_programs_and_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(UnsafeSandbox, "_warned", False)
    monkeypatch.setenv("ARL_TEST_SECRET", "secret")
    program = "import os, sys\nprint(input(), open('a/b').read(), 'ARL_TEST_SECRET' in os.environ)\nsys.exit(2)"
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            async with find_sandbox("unsafe") as sandbox:
                outcome = await sandbox.run(program, stdin="x", files={"a/b": b"y"})
    assert (outcome.stdout, outcome.exit_code, outcome.ended_by) == ("x y False\n", 2, "exit")
    assert [record.getMessage() for record in caplog.records] == [
        "programs run without any isolation (kind='unsafe'): they can read and delete what you can"
    ]


@pytest.mark.parametrize(
    ("program", "limits", "ended_by", "code"),
    [
        ("import time; time.sleep(600)", Limits(wall_s=0.3), "timeout", None),
        ("while True: print('x' * 1000)", Limits(output_bytes=5000), "output", None),
        ("while True: pass", Limits(cpu_s=0.5), "cpu", None),
        ("import os; os.abort()", Limits(), "signal", -6),
        ("bytearray(1 << 30)", Limits(), "exit", 1),
        ("import os, time\nif os.fork() == 0: time.sleep(600)", Limits(), "exit", 0),
    ],
)
async def test_unsafe_limits_time_output_and_memory(
    program: str, limits: Limits, ended_by: str, code: int | None
) -> None:
    async with UnsafeSandbox() as sandbox:
        outcome = await sandbox.run(program, limits=limits)
    assert (outcome.ended_by, outcome.exit_code) == (ended_by, code)


async def test_unsafe_ends_a_cancelled_program_and_leaves_no_files(
    tmp_path: Path, pipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "made").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "made"))
    async with UnsafeSandbox() as sandbox:
        call = asyncio.create_task(sandbox.run(sleeper(pipe)))
        async with once_running(pipe) as reader:
            call.cancel()
            assert await asyncio.to_thread(reader.read) == ""
        with pytest.raises(asyncio.CancelledError):
            await call
    assert os.listdir(tmp_path / "made") == []
