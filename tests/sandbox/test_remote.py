"""A remote sandbox over loopback: real HTTP, a real server, in this process and as the command that serves."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from arl.api.errors import SandboxError
from arl.sandbox import BubblewrapSandbox, Files, Limits, ProgramOutcome, RemoteSandbox
from arl.sandbox.contract import NO_FILES
from arl.sandbox.remote import RunRequest, application
from arl.web.bodies import parse
from arl.web.server import bind, serving

KEY = "key-of-this-test"
MOST = Limits(wall_s=30, processes=8)
ORDINARY = Limits(processes=8)
"""What Limits() is under MOST."""


class Recorder:
    """A sandbox that runs nothing: it says what it was asked, or waits where the program is `wait`."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Files, Limits | None]] = []
        self.waiting = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def run(
        self, program: str, *, stdin: str = "", files: Files = NO_FILES, limits: Limits | None = None
    ) -> ProgramOutcome:
        self.asked.append((program, stdin, files, limits))
        if program == "fail":
            raise SandboxError("no room")
        if program == "wait":
            self.waiting.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        return ProgramOutcome(exit_code=None, stdout="\0ü", stderr="e", wall_s=0.5, ended_by="memory")

    async def __aenter__(self) -> "Recorder":
        return self

    async def __aexit__(self, *exc: object) -> None: ...


@asynccontextmanager
async def served(sandbox: Recorder) -> AsyncIterator[str]:
    async with serving(application(sandbox, api_key=KEY, limits=MOST), bind("127.0.0.1", 0)) as port:
        yield f"http://127.0.0.1:{port}"


async def test_a_request_arrives_and_its_outcome_comes_back() -> None:
    recorder = Recorder()
    async with served(recorder) as url, RemoteSandbox(url, api_key=KEY) as sandbox:
        files = {"a": "text ü", "b/c": b"\0\xff"}
        limits = Limits(memory_bytes=1 << 20, wall_s=1.5, processes=8)
        outcome = await sandbox.run("print()", stdin="in", files=files, limits=limits)
        await sandbox.run("print()")
    assert outcome == ProgramOutcome(exit_code=None, stdout="\0ü", stderr="e", wall_s=0.5, ended_by="memory")
    assert recorder.asked == [("print()", "in", files, limits), ("print()", "", {}, ORDINARY)]


def test_unnamed_limits_are_the_defaults_cut_to_the_servers_maximum() -> None:
    asked = parse(RunRequest, b'{"program": "", "limits": {"wall_s": 20}}')
    assert asked.limits_within(MOST) == Limits(wall_s=20, processes=8)


async def test_a_cancelled_call_ends_the_program_at_the_server() -> None:
    recorder = Recorder()
    async with served(recorder) as url, RemoteSandbox(url, api_key=KEY) as sandbox:
        call = asyncio.create_task(sandbox.run("wait"))
        await recorder.waiting.wait()
        call.cancel()
        async with asyncio.timeout(30):
            await recorder.cancelled.wait()
        with pytest.raises(asyncio.CancelledError):
            await call


async def test_a_wrong_key_is_refused_and_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    async with served(recorder) as url:
        with pytest.raises(SandboxError, match="HTTP 401: Unauthorized; pass the api_key"):
            await RemoteSandbox(url, api_key="guess").__aenter__()
        async with aiohttp.ClientSession() as session, session.post(url + "/run", json={"program": ""}) as answer:
            assert answer.status == 401
    assert recorder.asked == []
    monkeypatch.delenv("ARL_SANDBOX_KEY", raising=False)
    with pytest.raises(SandboxError, match="pass api_key= or set ARL_SANDBOX_KEY"):
        RemoteSandbox(url)
    with pytest.raises(SandboxError, match="only with an API key"):
        application(recorder, api_key="", limits=MOST)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{", "the request body is not JSON: Expecting property name"),
        ("{}", "program is missing"),
        ('{"program": "", "code": 1}', "code (here 1): it is not known here"),
        ('{"program": "", "files": ["a"]}', 'files is ["a"]; it must be a JSON object'),
        ('{"program": "", "files": {"a": "text"}}', 'files.a is "text"; it must be {"text": ...} or {"base64": ...}'),
        ('{"program": "", "files": {"a": {"base64": "?"}}}', 'it must be {"text": ...} or {"base64": ...}'),
        ('{"program": "", "limits": {"time": 1}}', "limits.time (here 1): it is not known"),
        ('{"program": "", "limits": {"processes": "9"}}', 'limits.processes is "9"; it must be an integer'),
        ('{"program": "", "limits": {"wall_s": 0}}', "limits.wall_s is 0; it must be above 0"),
        ('{"program": "", "limits": {"wall_s": 31}}', "limits.wall_s is 31.0; this server allows 30"),
    ],
)
async def test_a_wrong_request_is_refused_by_name_of_its_field(body: str, message: str) -> None:
    recorder = Recorder()
    async with served(recorder) as url, aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as session:
        answer = await session.post(url + "/run", data=body)
        said: dict[str, Any] = await answer.json()
    assert (answer.status, message in said["error"]) == (400, True), said
    assert recorder.asked == []


async def test_a_sandbox_that_fails_or_is_not_at_the_url_is_an_error() -> None:
    async with served(Recorder()) as url:
        with pytest.raises(SandboxError, match="/elsewhere/health answered HTTP 404: Not Found"):
            await RemoteSandbox(url + "/elsewhere", api_key=KEY).__aenter__()
        async with RemoteSandbox(url, api_key=KEY) as sandbox:
            with pytest.raises(SandboxError, match="/run answered HTTP 500: no room"):
                await sandbox.run("fail")
        with pytest.raises(SandboxError, match="not open"):
            await sandbox.run("")
    with pytest.raises(SandboxError, match="could not be reached"):
        await RemoteSandbox(url, api_key=KEY).__aenter__()


@pytest.mark.asyncio(loop_scope="session")
async def test_the_command_serves_a_sandbox(bubblewrap: BubblewrapSandbox) -> None:
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "arl.sandbox.remote", "--port", "0", "--wall-s", "20"),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "ARL_SANDBOX_KEY": KEY},
    )
    assert server.stdout is not None
    line = (await server.stdout.readline()).decode()
    async with RemoteSandbox(line.split()[-1], api_key=KEY) as sandbox:
        outcome = await sandbox.run("print(input(), open('a').read())", stdin="x", files={"a": "y"})
        assert (outcome.stdout, outcome.ended_by) == ("x y\n", "exit")
    server.terminate()
    assert await server.wait() == 0
