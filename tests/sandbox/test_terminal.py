"""Terminals: files stay from one command to the next, and nothing else does."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from sandbox.conftest import PATIENT, calls, go_without

from arl.api.errors import SandboxError
from arl.sandbox import BubblewrapSandbox, BubblewrapTerminal, DockerImages, Limits

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[BubblewrapSandbox]:
    try:
        async with BubblewrapSandbox(directories=["/app", "/logs", "/tests"], concurrency=4) as sandbox:
            yield sandbox
    except SandboxError as reason:
        go_without(reason)


@pytest.fixture
def terminal(sandbox: BubblewrapSandbox) -> BubblewrapTerminal:
    return BubblewrapTerminal(sandbox, workdir="/app", files={"/app/notes/first": "one\ntwo\n"}, limits=PATIENT)


async def output_of(terminal: BubblewrapTerminal, command: str, timeout_s: float = 30.0) -> str:
    return (await terminal.run(command, timeout_s=timeout_s)).output


async def test_files_stay_and_directories_variables_and_processes_do_not(terminal: BubblewrapTerminal) -> None:
    assert await output_of(terminal, "cd notes; X=1; (sleep 30; echo late > /app/late) & wc -l < first > n; pwd") == (
        "/app/notes\n"
    )
    assert await output_of(terminal, "pwd; cat notes/n; echo $X; ls; ls /proc | grep -c '^[0-9]'") == (
        "/app\n2\n\nnotes\n5\n"  # bubblewrap's own process, the program, bash, ls, grep
    )


async def test_links_modes_and_files_that_the_command_closed_stay(terminal: BubblewrapTerminal) -> None:
    await terminal.run("ln -s notes/first link; echo 'echo ran' > go; chmod 711 go; chmod 0 notes", timeout_s=30)
    assert await output_of(terminal, "cat link; ./go; stat -c %a go; echo x > /tmp/y; cat /tmp/y") == (
        "one\ntwo\nran\n711\nx\n"
    )


async def test_a_command_that_takes_too_long_is_ended_and_what_it_wrote_stays(terminal: BubblewrapTerminal) -> None:
    outcome = await terminal.run("echo a > a; echo said; sleep 60", timeout_s=1)
    assert (outcome.ended_by, outcome.exit_code, outcome.output) == ("timeout", None, "said\n")
    assert await output_of(terminal, "cat a") == "a\n"


async def test_a_limit_of_the_sandbox_leaves_the_files_as_they_were(sandbox: BubblewrapSandbox) -> None:
    terminal = BubblewrapTerminal(sandbox, workdir="/app", limits=Limits(disk_bytes=2 << 20, memory_bytes=64 << 20))
    outcome = await terminal.run("touch b; x=$(head -c 90000000 /dev/urandom | base64)", timeout_s=60)
    assert (outcome.ended_by, outcome.exit_code) == ("memory", None)
    assert await output_of(terminal, "ls") == ""


async def test_output_is_kept_up_to_the_limit_and_what_is_missing_is_counted(sandbox: BubblewrapSandbox) -> None:
    terminal = BubblewrapTerminal(sandbox, workdir="/app", limits=PATIENT, most_bytes=10)
    outcome = await terminal.run("echo 0123456789abc; exit 3", timeout_s=30)
    assert (outcome.output, outcome.num_dropped, outcome.exit_code) == ("0123456789", 4, 3)


async def test_files_come_and_go_with_a_command(terminal: BubblewrapTerminal, tmp_path: Path) -> None:
    (tmp_path / "test.sh").write_text("#!/bin/bash\nls /tests; echo $GRADE > /logs/grade\n")
    await terminal.run("mkdir -p /tests; echo cheat > /tests/test.py; ln -s /app /logs/grade", timeout_s=30)
    outcome = await terminal.run(
        "/tests/test.sh",
        timeout_s=30,
        env={"GRADE": "1"},
        fresh=["/tests", "/logs/grade"],
        files={"/tests/test.sh": tmp_path / "test.sh"},
        read=["/logs/grade", "/logs/none"],
    )
    assert (outcome.output, outcome.files) == ("test.sh\n", {"/logs/grade": b"1\n"})


async def test_a_command_cannot_answer_for_the_terminal(terminal: BubblewrapTerminal) -> None:
    assert "Permission denied" in await output_of(terminal, "echo '{}' > /proc/$PPID/fd/1; rm /sandbox/main.py")
    outcome = await terminal.run("rm -r /app/notes; kill -9 $PPID", timeout_s=30)
    assert (outcome.ended_by, outcome.exit_code) == ("signal", None)
    assert await output_of(terminal, "cat notes/first") == "one\ntwo\n"


@pytest.mark.parametrize("path", ["app/x", "/app/../x", "/app/"])
async def test_a_path_that_is_not_absolute_and_plain_is_refused(terminal: BubblewrapTerminal, path: str) -> None:
    with pytest.raises(SandboxError, match="no path of a terminal"):
        await terminal.run("ls", timeout_s=1, files={path: ""})


async def test_terminals_share_a_sandbox_and_not_their_files(sandbox: BubblewrapSandbox) -> None:
    terminals = [BubblewrapTerminal(sandbox, workdir="/app", limits=PATIENT) for _ in range(4)]
    await asyncio.gather(*(t.run(f"touch {i}", timeout_s=30) for i, t in enumerate(terminals)))
    seen = await asyncio.gather(*(output_of(t, "ls") for t in terminals))
    assert seen == ["0\n", "1\n", "2\n", "3\n"]


async def test_a_docker_terminal_is_a_container_without_network_removed_at_the_end(docker: Path) -> None:
    async with DockerImages() as images:
        async with images.terminal(
            "an/image:1", limits=Limits(memory_bytes=1 << 28, processes=20), env={"A": "b"}, allows_network=True
        ) as terminal:
            await terminal.run("echo x > /app/x", timeout_s=30)
            outcome = await terminal.run(
                "cat /app/x; /tests/test.sh; exit 4",
                timeout_s=30,
                env={"GRADE": "7"},
                fresh=["/tests"],
                files={"/tests/test.sh": "#!/bin/sh\nexport\n"},
                read=["/app/x", "/app/none"],
            )
            slow = await terminal.run("sleep 30", timeout_s=0.3)
        async with images.terminal("an/image:1", limits=Limits()):
            pass
    assert outcome.output.startswith("x\n")
    assert "GRADE='7'" in outcome.output
    assert (outcome.exit_code, outcome.files) == (4, {"/app/x": b"x\n"})
    assert (slow.ended_by, slow.exit_code) == ("timeout", None)
    asked = calls(docker)
    (first, _) = (call for call in asked if call[:2] == ["run", "--detach"])
    assert " ".join(("--network none", "--memory 268435456")) in " ".join(first)
    assert "--env A=b" in " ".join(first)
    assert [call[:2] for call in asked].count(["image", "inspect"]) == 1
    assert asked[-1][:2] == ["rm", "--force"]
    assert not any(name.endswith(".root") for name in os.listdir(docker))


async def test_an_image_that_cannot_be_built_is_an_error_with_dockers_words(docker: Path, tmp_path: Path) -> None:
    (docker / "no_build").touch()
    async with DockerImages() as images:
        with pytest.raises(SandboxError, match="docker build failed with exit code 1: ERROR: failed to solve"):
            async with images.terminal(tmp_path, limits=Limits()):
                pass
