"""Tools of a real MCP server, written with the official package, over stdio and over HTTP."""

import asyncio
import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from PIL import Image as Pictures
from scripted_answers import TOKENIZER, calling, exact, saying, seen_by
from still_clock import still_clock

from arl.api.errors import ConfigError, ServerError
from arl.api.images import Image
from arl.api.version import install_command
from arl.workflow.call_formats import ToolCall
from arl.workflow.mcp_tools import MCPTools
from arl.workflow.messages import image_part, text_part
from arl.workflow.tool_agent import ToolAgentWorkflow
from arl.workflow.tools import Tool, ToolLimits, ToolResult, arun_tools

SERVER = str(Path(__file__).parent / "mcp_server.py")


def png() -> bytes:
    """The file that the server draws; arl itself would write its pixels otherwise."""
    file = io.BytesIO()
    Pictures.new("RGB", (20, 10), "red").save(file, "PNG")
    return file.getvalue()


PICTURE = Image.of(png())
QUESTION = {"question": "?", "answer": "done"}


def started(**env: str) -> MCPTools:
    return MCPTools.stdio(sys.executable, [SERVER], env=env)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The URL of a server on loopback."""
    with subprocess.Popen([sys.executable, SERVER, "http"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/mcp", process
        process.kill()


async def called(tools: Sequence[Tool], name: str, **arguments: object) -> ToolResult:
    (result,) = await arun_tools([ToolCall(name=name, arguments=arguments)], tools)
    return result


async def test_errors_of_tools_are_for_the_model_and_the_death_of_their_server_fails_the_episode() -> None:
    async with started(NAME="me") as tools:
        assert [tool.name for tool in tools] == ["add", "increase", "fail", "die", "hang", "draw"]
        about = tools[0].spec["function"]
        assert about["description"] == "Add two numbers."
        assert about["parameters"]["required"] == ["a", "b"]
        assert (await called(tools, "add", a=1, b=2)).content == "3"
        assert str((await called(tools, "increase")).content).endswith("for me")
        wrong = await called(tools, "add", a="one")
        assert wrong.failure == "refused"
        assert "unable to parse string as an integer" in str(wrong.content)
        assert (await called(tools, "fail")).content == "error: Error executing tool fail: on purpose"
        drawn = (await called(tools, "draw")).content
        assert drawn == [text_part("a picture:"), image_part(PICTURE), text_part("a page")]
        (result,) = await arun_tools([ToolCall(name="hang", arguments={})], tools, ToolLimits(timeout_s=0.05))
        assert result.content == "error: there was no answer within 0.05 s"
        await check_death_and_resurrection(tools)
    with pytest.raises(ServerError, match="is not open"):
        await called(tools, "add", a=1, b=2)


async def check_death_and_resurrection(tools: Sequence[Tool]) -> None:
    """Here, since starting a server takes a second."""
    assert str((await called(tools, "increase")).content).startswith("2 in")
    with pytest.raises(ServerError, match=r"mcp_server\.py` failed in a call of die(.|\n)*my last words"):
        await called(tools, "die")
    assert str((await called(tools, "increase")).content).startswith("1 in")


async def test_each_episode_may_have_a_server_of_its_own() -> None:
    workflow = ToolAgentWorkflow(TOKENIZER, exact, open_tools=lambda data: started(NAME=data["name"]))
    engines = [saying(calling("increase") * 2, "done") for _ in range(2)]
    async with asyncio.TaskGroup() as group:
        for engine, name in zip(engines, ("one", "other"), strict=True):
            group.create_task(workflow.arun_episode(engine, {**QUESTION, "name": name}))
    pids = set[str]()
    for engine, name in zip(engines, ("one", "other"), strict=True):
        lines = [line for line in seen_by(engine).splitlines() if line.endswith(f"for {name}")]
        assert sorted(line[0] for line in lines) == ["1", "2"]
        pids |= {line.split()[2] for line in lines}
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


async def test_a_workflow_is_entered_and_left_in_one_task_and_its_episodes_run_in_others(
    served: tuple[str, object],
) -> None:
    """As in a notebook, whose cells are tasks of their own, it may even be left in another than it was entered."""
    workflow = ToolAgentWorkflow(TOKENIZER, exact, tools=[MCPTools.http(served[0], headers={"X-Key": "k"})])
    await asyncio.create_task(workflow.__aenter__())
    engines = [saying(calling("add", a=i, b=1), "done") for i in range(20)]
    async with asyncio.TaskGroup() as group:
        for engine in engines:
            group.create_task(workflow.arun_episode(engine, QUESTION))
    for i, engine in enumerate(engines):
        assert f"<tool_response>\n{i + 1}\n</tool_response>" in seen_by(engine)
    await asyncio.create_task(workflow.__aexit__())


async def test_a_server_that_is_gone_or_was_never_there_is_an_error_that_names_it(
    served: tuple[str, subprocess.Popen[str]],
) -> None:
    url, process = served
    async with (connection := MCPTools.http(url, images=False)) as tools:
        assert (await called(tools, "add", a=1, b=2)).content == "3"
        drawn = (await called(tools, "draw")).content
        assert drawn == f"a picture:\n[image, image/png, {len(PICTURE.data)} bytes]\na page"
        with pytest.raises(ConfigError, match="is open already"):
            await connection.__aenter__()
        process.send_signal(signal.SIGKILL)
        process.wait()
        for _ in range(2):
            with pytest.raises(ServerError, match=r"the MCP server at http://127\.0\.0\.1"):
                await called(tools, "add", a=1, b=2)
    with pytest.raises(
        ServerError, match=r"at http://127\.0\.0\.1.* could not be used: All connection attempts failed"
    ):
        await MCPTools.http(url).__aenter__()


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        (["/no/such/server"], "could not be used: .*No such file"),
        ([sys.executable, "-c", "import sys; sys.exit('a bad start')"], r"could not be used: (.|\n)*a bad start"),
    ],
)
async def test_a_server_that_does_not_start_is_an_error_that_says_why(command: list[str], complaint: str) -> None:
    with pytest.raises(ServerError, match=complaint):
        await MCPTools.stdio(command[0], command[1:]).__aenter__()


async def test_a_server_that_is_not_ready_in_time_is_an_error_with_what_it_said(tmp_path: Path) -> None:
    os.mkfifo(waits := tmp_path / "waits")
    server = MCPTools.stdio("sh", ["-c", f"echo it waits >&2; echo > {waits}; cat > /dev/null"], start_timeout_s=1)
    with still_clock() as passes:
        opening = asyncio.create_task(server.__aenter__())
        await asyncio.to_thread(waits.read_text)
        await passes(1)
    with pytest.raises(ServerError, match="was not ready within 1 s; it said:\nit waits"):
        await opening


@pytest.mark.parametrize("times", [1, 3])
async def test_a_start_that_is_cancelled_leaves_no_process_and_no_task(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcp.client.stdio.PROCESS_TERMINATION_TIMEOUT", 0.1)
    path = tmp_path / "pid"
    os.mkfifo(path)
    opening = asyncio.create_task(MCPTools.stdio("sh", ["-c", f"echo $$ > {path}; exec sleep 60"]).__aenter__())
    pid = int(await asyncio.to_thread(path.read_text))
    for _ in range(times):
        opening.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await opening
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_a_missing_package_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match=re.escape(install_command("mcp"))):
        MCPTools.http("http://127.0.0.1:1/mcp")
