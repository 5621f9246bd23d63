"""Child servers: ready or an error with their log, watched and started again while they run, and gone afterwards.

Also the actor of a server on a Ray cluster, without Ray; tests/cluster/test_servers_on_ray.py has runs over real nodes.
"""

import asyncio
import os
import shutil
import signal
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from arl.api.errors import ConfigError, ServerError
from arl.api.settings.engines import LocalEngineConfig, SGLangProcessesConfig
from arl.api.settings.run import Config
from arl.engine.client import server_processes
from arl.engine.client.ray_servers import ServerActor
from arl.engine.client.server_processes import adapter_options, started_here, stock_program

Play = Callable[[str], None]

PRELUDE = """
import http.server, os, signal, subprocess, sys, threading, time
port, notes = int(sys.argv[1]), sys.argv[2]
open(f"{notes}/{os.getpid()}.pid", "w").close()
births = len(os.listdir(notes))
def say(text): print(text, file=sys.stderr, flush=True)
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *args): pass
def serve(): http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""
SERVE = "serve()\n"


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, notes: Path) -> Play:
    """Let the children run a script in place of the server; each notes its process id."""
    monkeypatch.setattr(server_processes, "_FIRST_BACKOFF_S", 0.01)

    def play(script: str) -> None:
        def command(model: str, config: LocalEngineConfig, host: str, port: int) -> list[str]:
            return [sys.executable, "-c", PRELUDE + script, str(port), str(notes)]

        monkeypatch.setattr(server_processes, "_local_command", command)

    return play


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    (tmp_path / "notes").mkdir()
    return tmp_path / "notes"


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[str]:
    queue: asyncio.Queue[str] = asyncio.Queue()
    monkeypatch.setattr(server_processes.logger, "warning", lambda message, *args: queue.put_nowait(message % args))
    return queue


def pids(notes: Path) -> list[int]:
    return [int(path.stem) for path in notes.glob("*.pid")]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - of another process, which sets no event here
            await asyncio.sleep(0.01)


async def answers(address: str) -> bool:
    try:
        (await asyncio.to_thread(urllib.request.urlopen, f"{address}/health")).close()
    except OSError:
        return False
    return True


async def test_servers_answer_at_their_addresses_log_what_they_say_and_are_gone_after_the_block(
    play: Play, tmp_path: Path, notes: Path
):
    play("say(f'life {births} with {os.environ[\"OMP_NUM_THREADS\"]} threads')\n" + SERVE)
    for _ in range(2):
        config = LocalEngineConfig(num_servers=2, num_threads=3)
        async with started_here("m", config, tmp_path / "logs") as servers:
            addresses = servers.addresses
            assert len(set(addresses)) == 2
            assert [await answers(address) for address in addresses] == [True, True]
            assert sum(map(is_running, pids(notes))) == 2
        assert not any(map(is_running, pids(notes)))
    for index in range(2):
        log = (tmp_path / "logs" / f"server-{index}.log").read_text().splitlines()
        said = [line for line in log if line.startswith("life")]
        assert len(said) == 2
        assert all(line.endswith("with 3 threads") for line in said)


@pytest.mark.parametrize(
    ("script", "timeout_s", "message"),
    [
        ("say('no such model'); sys.exit(3)", 20, r"did not start: it ended with exit code 3(.|\n)*no such model"),
        (
            "time.sleep(60)",
            0.5,
            r"not ready within 0\.5 s \(engine\.startup_timeout_s\): it was killed for it; the end",
        ),
    ],
)
async def test_a_server_that_does_not_start_is_an_error_and_is_gone(
    play: Play, tmp_path: Path, notes: Path, script: str, timeout_s: float, message: str
):
    play(script)
    with pytest.raises(ServerError, match=message):
        async with started_here("m", LocalEngineConfig(startup_timeout_s=timeout_s), tmp_path):
            pytest.fail("it started")
    assert not any(map(is_running, pids(notes)))


async def test_a_server_that_dies_is_started_again_at_its_address_when_what_it_had_started_is_dead(
    play: Play, tmp_path: Path, notes: Path, warnings: asyncio.Queue[str]
):
    child = "print(subprocess.Popen(['sleep', '60']).pid, file=open(f'{notes}/child-{births}', 'w'))\n"
    play("say(f'life {births}')\n" + child + SERVE)
    async with started_here("m", LocalEngineConfig(num_servers=1), tmp_path) as servers:
        addresses = servers.addresses
        (first,), first_child = pids(notes), int((notes / "child-1").read_text())
        assert is_running(first_child)
        os.kill(first, signal.SIGKILL)
        warning = await warnings.get()
        await until(lambda: len(pids(notes)) == 2)
        assert not is_running(first_child)
        async with asyncio.timeout(20):
            while not await answers(addresses[0]):
                pass
    assert all(words in warning for words in ("restart 1 of 3 follows", "ended by SIGKILL", "life 1"))
    assert not any(map(is_running, pids(notes)))


async def test_a_server_that_cannot_be_started_again_is_tried_again_without_its_log_too(
    play: Play, tmp_path: Path, notes: Path, warnings: asyncio.Queue[str], monkeypatch: pytest.MonkeyPatch
):
    start, tries = asyncio.create_subprocess_exec, iter([OSError("Cannot allocate memory")])

    async def started(*argv: Any, **options: Any) -> asyncio.subprocess.Process:
        for error in tries:
            raise error
        return await start(*argv, **options)

    play(SERVE)
    async with started_here("m", LocalEngineConfig(num_servers=1), tmp_path / "logs"):
        monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
        shutil.rmtree(tmp_path / "logs")
        os.kill(pids(notes)[0], signal.SIGKILL)
        assert "restart 1 of 3 follows" in await warnings.get()
        assert "it could not be started (Cannot allocate memory)" in await warnings.get()
        await until(lambda: len(pids(notes)) == 2)


async def test_when_all_servers_died_as_often_as_they_may_the_block_ends_with_their_last_words(
    play: Play, tmp_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server_processes, "_MAX_RESTARTS", 1)
    end = "def end():\n    while not os.path.exists(f'{notes}/end'): time.sleep(0.01)\n"
    end += "    say('out of memory')\n    os._exit(9)\n"
    play(end + "threading.Thread(target=end).start()\n" + SERVE)
    words = r"every server that arl started died(.|\n)*exit code 9(.|\n)*of memory"

    async def run() -> None:
        async with started_here("m", LocalEngineConfig(num_servers=2), tmp_path):
            (notes / "end").touch()
            try:
                await asyncio.Event().wait()
            finally:
                raise ZeroDivisionError("the block's own")

    with pytest.raises(ServerError, match=words) as raised:
        await run()
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert len(pids(notes)) == 4


async def test_a_server_that_has_served_long_enough_may_die_as_often_again(
    play: Play, tmp_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server_processes, "_STEADY_S", 0.0)
    monkeypatch.setattr(server_processes, "_MAX_RESTARTS", 1)
    play(SERVE)
    async with started_here("m", LocalEngineConfig(), tmp_path) as servers:
        killed = set[int]()
        for deaths in (1, 2, 3):
            (pid,) = set(pids(notes)) - killed
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
            await until(lambda deaths=deaths: len(pids(notes)) == 1 + deaths and servers.num_restarts == deaths)
            await until(lambda: all(server._up_since is not None for server in servers._servers))


async def test_when_one_of_two_dies_for_good_the_block_goes_on_and_it_is_not_killed_again(
    play: Play, tmp_path: Path, notes: Path, warnings: asyncio.Queue[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server_processes, "_MAX_RESTARTS", 0)
    killed: list[int] = []
    kill_group = os.killpg
    monkeypatch.setattr(os, "killpg", lambda pid, number: (killed.append(pid), kill_group(pid, number)))
    play(SERVE)
    async with started_here("m", LocalEngineConfig(num_servers=2), tmp_path) as servers:
        addresses = servers.addresses
        os.kill(pids(notes)[0], signal.SIGKILL)
        assert "is not started again: it was ended by SIGKILL" in await warnings.get()
        assert sorted([await answers(address) for address in addresses]) == [False, True]
    assert len(pids(notes)) == 2
    assert sorted(killed) == sorted(pids(notes))  # once each: later its id may belong to another process


async def test_errors_and_cancellation_of_the_block_pass_and_stop_servers_that_ignore_the_polite_signal(
    play: Play, tmp_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server_processes, "_STOP_TIMEOUT_S", 0.2)
    play("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVE)
    for error in (ZeroDivisionError(), ExceptionGroup("two", [ValueError()]), asyncio.CancelledError()):
        with pytest.raises(type(error)):
            async with started_here("m", LocalEngineConfig(), tmp_path):
                raise error
    assert len(pids(notes)) == 3
    assert not any(map(is_running, pids(notes)))


RUN = """
import asyncio, signal, sys
from pathlib import Path
from arl.api.settings.engines import LocalEngineConfig, SGLangProcessesConfig
from arl.engine.client import server_processes
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background inherits that it is ignored
notes, tmp, script = sys.argv[1:]
server_processes._local_command = lambda model, config, host, port: [sys.executable, "-c", script, str(port), notes]
server_processes._sglang_command = lambda model, config, host, port: ["-c", script, str(port), notes]
async def main():
    async with {servers}("m", {config}, Path(tmp)):
        print("up", flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


def _interrupt(
    servers: str, config: str, number: signal.Signals, notes: Path, tmp_path: Path, before: str = ""
) -> None:
    """Run servers in a process of its own, and end it by a signal. before: what each server does first."""
    run = RUN.format(servers=servers, config=config)
    command = [sys.executable, "-c", run, str(notes), str(tmp_path), PRELUDE + before + SERVE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        assert all(map(is_running, pids(notes)))
        process.send_signal(number)


def test_an_interrupted_run_leaves_no_server_behind(notes: Path, tmp_path: Path):
    _interrupt("server_processes.started_here", "LocalEngineConfig()", signal.SIGINT, notes, tmp_path)
    assert not any(map(is_running, pids(notes)))


async def test_a_killed_run_leaves_no_stock_server_behind_and_nothing_that_it_started(notes: Path, tmp_path: Path):
    """vLLM's engine does not notice that its HTTP server was killed."""
    engine = "if os.fork() == 0:\n    open(os.path.join(notes, f'{os.getpid()}.pid'), 'w').close(); time.sleep(600)\n"
    config = "SGLangProcessesConfig(gpus_per_server=0)"
    _interrupt("server_processes.started_here", config, signal.SIGKILL, notes, tmp_path, before=engine)
    assert len(pids(notes)) == 2
    await until(lambda: not any(map(is_running, pids(notes))))


def test_stock_servers_share_out_the_gpus_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch):
    config = SGLangProcessesConfig(num_servers=2, gpus_per_server=2, first_gpu=1, arguments=("--mem", "0.8"))
    assert [server_processes._gpus(config, index) for index in range(2)] == ["1,2", "3,4"]
    command = "-m sglang.launch_server --model-path /m --host 127.0.0.1 --port 7 --tp-size 2 --mem 0.8"
    assert server_processes._sglang_command("/m", config, "127.0.0.1", 7) == command.split()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    config = SGLangProcessesConfig(num_servers=2, first_gpu=1)
    assert [server_processes._gpus(config, index) for index in range(2)] == ["6", "7"]
    with pytest.raises(ConfigError, match="need more than the 3 GPUs of CUDA_VISIBLE_DEVICES"):
        server_processes._gpus(SGLangProcessesConfig(num_servers=2, first_gpu=2), 1)


@pytest.mark.parametrize(
    ("lora", "targets"),
    [({"rank": 8}, "all"), ({"rank": 8, "target_modules": ["v_proj", "self_attn.q_proj"]}, "q_proj v_proj")],
)
def test_stock_servers_are_started_for_the_runs_adapters(lora: dict[str, object], targets: str):
    settings = {"model": "m", "engine": {"kind": "sglang_processes"}, "train": {"lora": lora}}
    config = Config.model_validate({**settings, "weights": {"transport": "adapter"}, "rollout": {"max_staleness": 4}})
    options = f"--enable-lora --max-lora-rank 8 --lora-target-modules {targets} --max-loras-per-batch 7"
    expected = options.split()
    assert adapter_options(config) == expected
    on_cpu = config.model_copy(update={"engine": config.engine.model_copy(update={"gpus_per_server": 0})})
    assert adapter_options(on_cpu) == [*expected, "--lora-backend", "torch_native"]
    assert adapter_options(Config.model_validate(settings)) == []


@pytest.mark.parametrize(
    ("python", "error", "message"),
    [
        ("/nowhere/python", ConfigError, r"engine\.python is '/nowhere/python'"),
        (sys.executable, ServerError, "No module named"),
    ],
)
async def test_an_interpreter_that_cannot_run_sglang_is_an_error(
    tmp_path: Path, python: str, error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        async with started_here("m", SGLangProcessesConfig(python=Path(python), gpus_per_server=0), tmp_path):
            pytest.fail("it started")


STOCK_SERVER = """
import os, sys, time
file = sys.argv[sys.argv.index("--config") + 1]
print(oct(os.stat(file).st_mode), file, open(file).read().strip(), flush=True)
print(" ".join(open("/proc/self/cmdline").read().split("\\0")), flush=True)
time.sleep(1000)
"""


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerActor]:
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: ["2", "3"])
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    actor = ServerActor()
    yield actor
    actor._port.close()


def fake_python(tmp_path: Path) -> Path:
    """A Python whose `-m sglang.launch_server` is STOCK_SERVER."""
    (tmp_path / "server.py").write_text(STOCK_SERVER)
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} "$@"\nexec {sys.executable} {tmp_path}/server.py "$@"\n'
    )
    python.chmod(stat.S_IRWXU)
    return python


def test_a_stock_server_gets_its_key_in_a_file_of_its_own_and_keeps_its_address(
    actor: ServerActor, tmp_path: Path
) -> None:
    config = SGLangProcessesConfig(python=fake_python(tmp_path), on_ray=True, gpus_per_server=2)
    program, log = partial(stock_program, "/model", config), tmp_path / "log"
    places = list[str]()
    for life in (1, 2):
        pid, part = actor.start(program, "a-secret", True, 0, log)
        while log.read_text().count("--model-path") < life:
            os.sched_yield()
        actor.signal(pid, signal.SIGKILL)
        assert actor.wait(pid) == -signal.SIGKILL
        assert part.device == "GPUs 2-3"
        places.append(part.address)
    assert places[0] == places[1]
    (mode, file, *content), command = (line.split() for line in log.read_text().splitlines()[:2])
    assert (mode, content) == ("0o100600", ["api-key:", '"a-secret"'])
    assert "a-secret" not in command
    assert f"--host 127.0.0.1 --port {places[0].rpartition(':')[2]} --tp-size 2" in " ".join(command)
    while Path(file).exists():  # its thread removes it once the server has ended
        os.sched_yield()


def test_a_program_that_cannot_be_started_is_an_error_and_leaves_no_key(
    actor: ServerActor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = partial(stock_program, "/model", SGLangProcessesConfig(python=Path("no-python"), on_ray=True))
    with pytest.raises(ConfigError, match=r"engine\.python is 'no-python'"):
        actor.start(program, "a-secret", True, 0, tmp_path / "log")
    assert list(tmp_path.iterdir()) == []
