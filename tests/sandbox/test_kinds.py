"""What every kind of sandbox does, and which kind is found."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sandbox.conftest import calls, go_without, once_running, sleeper

from arl.api.errors import SandboxError
from arl.sandbox import BubblewrapSandbox, Limits, ProgramOutcome, Sandbox, UnsafeSandbox, find_sandbox

LIMITS = Limits(wall_s=60, output_bytes=10_000)
HOLDS = "print('a', flush=True)\n"
FLOODS = "import os\nfor _ in range(99): os.write(1, b'x' * 1000)"
LEAVES = "import os, time\nif os.fork() == 0: time.sleep(600)"
FORGES = 'import os\nos.write(2, b\'0\' * 32 + b\' {"ended_by": "exit", "code": 0, "wall_s": 1}\')\nos._exit(5)'
OUTCOMES: list[tuple[str, dict[str, Any], tuple[str, int | None, str]]] = [
    ("import os; os.kill(os.getpid(), 11)", {}, ("signal", -11, "")),
    (HOLDS + "import time\ntime.sleep(600)", {"wall_s": 2.0}, ("timeout", None, "a\n")),
    (FLOODS, {}, ("output", None, "x" * 10_000)),
    (LEAVES, {}, ("exit", 0, "")),
    (FORGES, {}, ("exit", 5, "")),
]
OF_KIND = {
    "bubblewrap": [(HOLDS + "while True: pass", {"cpu_s": 0.1}, ("cpu", None, "a\n"))],
    "docker": [  # the kernel of a real container counts the time and sends SIGXCPU
        (HOLDS + "import os; os.kill(os.getpid(), 24)", {}, ("cpu", None, "a\n")),
        ("import sys; sys.exit(139)", {}, ("exit", 139, "")),
    ],
    "unsafe": [(HOLDS + "while True: pass", {"cpu_s": 0.5}, ("cpu", None, "a\n"))],
}


@pytest.fixture(params=OF_KIND)
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
async def sandbox(kind: Any, docker: Path) -> AsyncIterator[Sandbox]:
    try:
        async with find_sandbox(kind, limits=LIMITS) as sandbox:
            yield sandbox
    except SandboxError as reason:
        go_without(reason)


async def test_a_program_gets_its_input_and_files_and_none_of_the_hosts_variables(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARL_TEST_SECRET", "secret")
    program = "import os, sys\nprint(input(), open('d/a.bin', 'rb').read(), 'ARL_TEST_SECRET' in os.environ)\n"
    program += "print('ü', file=sys.stderr)\nsys.exit(3)"
    outcome = await sandbox.run(program, stdin="hello\n", files={"d/a.bin": b"\0\xff"})
    assert outcome == ProgramOutcome(
        exit_code=3, stdout="hello b'\\x00\\xff' False\n", stderr="ü\n", wall_s=outcome.wall_s, ended_by="exit"
    )
    assert 0 < outcome.wall_s < 60
    assert not outcome.succeeded


async def test_the_outcome_says_how_a_program_ended_and_has_what_it_wrote_before(sandbox: Sandbox, kind: str) -> None:
    """One tries to forge it; one leaves a process behind."""
    for program, limits, expected in OUTCOMES + OF_KIND[kind]:
        outcome = await sandbox.run(program, limits=Limits(**{"wall_s": 60, "output_bytes": 10_000, **limits}))
        assert (outcome.ended_by, outcome.exit_code, outcome.stdout) == expected


@pytest.mark.parametrize("kind", ["docker", "unsafe"])
async def test_cancelling_a_call_ends_its_program_and_leaves_nothing(
    kind: str, sandbox: Sandbox, docker: Path, pipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (docker / "made").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(docker / "made"))
    call = asyncio.create_task(sandbox.run(sleeper(pipe)))
    async with once_running(pipe) as reader:
        call.cancel()
        assert await asyncio.to_thread(reader.read) == ""
    with pytest.raises(asyncio.CancelledError):
        await call
    assert os.listdir(docker / "made") == []
    if kind == "docker":
        *_, run, remove = calls(docker)
        assert remove == ["rm", "--force", run[2]]


@pytest.mark.asyncio(loop_scope="session")
async def test_bubblewrap_is_found_first(bubblewrap: BubblewrapSandbox) -> None:
    async with find_sandbox() as sandbox:
        assert (await sandbox.run("import os; print(os.getcwd())")).stdout == "/sandbox\n"


async def test_docker_is_found_where_there_is_no_bubblewrap(docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(docker))
    async with find_sandbox() as sandbox:
        assert (await sandbox.run("print(1)")).stdout == "1\n"
    assert calls(docker)


async def test_an_error_says_what_to_install_if_there_is_no_sandbox(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError) as refusal:
        await find_sandbox().__aenter__()
    for part in ("bwrap is not installed", "docker is not installed", "apt-get install", "kind='unsafe'"):
        assert part in str(refusal.value)
    with pytest.raises(SandboxError, match="not open"):
        await find_sandbox().run("")
    with pytest.raises(SandboxError, match="no sandbox of kind 'chroot'; it is auto, bubblewrap, docker or unsafe"):
        find_sandbox("chroot")  # pyright: ignore[reportArgumentType]


async def test_unsafe_limits_memory_and_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(UnsafeSandbox, "_warned", False)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            async with UnsafeSandbox() as sandbox:
                assert "MemoryError" in (await sandbox.run("bytearray(1 << 30)")).stderr
    (record,) = caplog.records
    assert "without any isolation (kind='unsafe')" in record.getMessage()
