"""The actor of a server on a Ray cluster, without Ray: what it starts, with which key, and what it leaves.

tests/cluster/test_servers_on_ray.py has runs over real nodes.
"""

import os
import signal
import stat
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import ray

from arl.api.errors import ConfigError
from arl.api.settings.engines import SGLangProcessesConfig
from arl.engine.client.ray_servers import ServerActor
from arl.engine.client.server_processes import stock_program

SERVER = """
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
    """A Python whose `-m sglang.launch_server` is SERVER."""
    (tmp_path / "server.py").write_text(SERVER)
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
