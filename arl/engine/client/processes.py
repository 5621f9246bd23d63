"""How the servers that arl starts by itself are started: the embedded one, and stock SGLang."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from arl.api.config import LocalEngineConfig, SGLangProcessesConfig
from arl.api.errors import ConfigError
from arl.engine.client.supervision import Program, reserved_ports, running

_DIES_WITH_PARENT = """
import ctypes, os, signal, sys
parent, *command = sys.argv[1:]
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, which exec keeps
if os.getppid() == int(parent):
    os.execv(command[0], command)
"""
"""Runs a command that the kernel kills when the process that started it is gone, however that ended."""


@asynccontextmanager
async def local_servers(model: str, config: LocalEngineConfig, log_dir: Path) -> AsyncIterator[Sequence[str]]:
    """Start config.num_servers embedded servers of the model directory `model`; gives their base URLs.

    What server K says is appended to log_dir/server-K.log. See `running` for what happens when one dies.
    """
    with reserved_ports(config.num_servers) as ports:
        programs = [
            Program(
                argv=_local_command(model, config, port),
                port=port,
                log=log_dir / f"server-{index}.log",
                environment=_local_environment(config.num_threads),
            )
            for index, port in enumerate(ports)
        ]
        async with running(programs, config) as addresses:
            yield addresses


@asynccontextmanager
async def sglang_servers(model: str, config: SGLangProcessesConfig, log_dir: Path) -> AsyncIterator[Sequence[str]]:
    """Start config.num_servers SGLang servers of the model directory `model`; gives their base URLs.

    What server K says is appended to log_dir/sglang-K.log. They and their schedulers die with this process. Raises
    ConfigError if the Python interpreter or the GPUs are not there. See `running` for what happens when one dies.
    """
    python = shutil.which(str(config.python))
    if python is None:
        raise ConfigError(f"engine.python is {str(config.python)!r}, which is no program that can be run")
    with reserved_ports(config.num_servers) as ports:
        programs = [
            Program(
                argv=[python, "-c", _DIES_WITH_PARENT, str(os.getpid()), *_sglang_command(python, model, config, port)],
                port=port,
                log=log_dir / f"sglang-{index}.log",
                environment={**os.environ, "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": _gpus(config, index)},
            )
            for index, port in enumerate(ports)
        ]
        async with running(programs, config) as addresses:
            yield addresses


def _local_command(model: str, config: LocalEngineConfig, port: int) -> list[str]:
    command = [sys.executable, "-m", "arl.engine.local", "--model", model, "--port", str(port)]
    command += ["--device", config.device, "--dtype", config.dtype, "--num-threads", str(config.num_threads)]
    command += ["--max-running-requests", str(config.max_running_requests)]
    if config.context_length is not None:
        command += ["--context-length", str(config.context_length)]
    return [*command, "--parent-pid", str(os.getpid())]


def _local_environment(num_threads: int) -> dict[str, str]:
    """Torch reads its thread counts when it is imported, so they have to be set from outside."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(num_threads))
    return {**os.environ, **threads, "PYTHONUNBUFFERED": "1"}


def _sglang_command(python: str, model: str, config: SGLangProcessesConfig, port: int) -> list[str]:
    command = [python, "-m", "sglang.launch_server", "--model-path", model, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--tp-size", str(config.gpus_per_server)] if config.gpus_per_server else ["--device", "cpu"]
    return [*command, *config.arguments]


def _gpus(config: SGLangProcessesConfig, index: int) -> str:
    """CUDA_VISIBLE_DEVICES for server `index`: its share of the GPUs that this process may use, in order."""
    first = config.first_gpu + index * config.gpus_per_server
    last = first + config.gpus_per_server
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return ",".join(map(str, range(first, last)))
    devices = [device.strip() for device in visible.split(",") if device.strip()]
    if last > len(devices) and config.gpus_per_server:
        raise ConfigError(
            f"engine.num_servers {config.num_servers} x engine.gpus_per_server {config.gpus_per_server} from "
            f"engine.first_gpu {config.first_gpu} on need more GPUs than the {len(devices)} of CUDA_VISIBLE_DEVICES"
        )
    return ",".join(devices[first:last])
