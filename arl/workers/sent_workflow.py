"""The workflow on its way to a worker: what the controller's process sends first, and what the worker makes of it."""

from __future__ import annotations

import multiprocessing.process
import multiprocessing.spawn
import pickle
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from arl.api.endpoint import EndpointConfig
from arl.api.errors import ConfigError
from arl.api.workflow import RolloutWorkflow
from arl.object_process import pickled, receive_message


class _Sent(NamedTuple):
    main: Mapping[str, Any]
    """How a fresh process makes the script's own module __main__, for what the workflow uses of it."""
    workflow: bytes
    """Pickled."""
    endpoint: EndpointConfig
    """The settings of its endpoints."""


def sent_workflow(workflow: RolloutWorkflow, endpoint: EndpointConfig) -> bytes:
    """The first message to a worker. Raises ConfigError if the workflow cannot travel."""
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        raise ConfigError(
            "a process that imports this script, such as an episode worker, would start a run of its own; put the code "
            'that starts the run under `if __name__ == "__main__":`'
        )
    data = multiprocessing.spawn.get_preparation_data("episode worker")
    main = {name: value for name, value in data.items() if name != "authkey"}
    sent = _Sent(main, _pickled(workflow), endpoint)
    path = main.get("init_main_from_path")
    is_script = "init_main_from_name" in main or (path is not None and Path(path).is_file())
    if b"__main__" in sent.workflow and not is_script:
        raise ConfigError(
            f"{type(workflow).__name__} uses what a notebook or an interactive session defines, and worker "
            "processes cannot import that; define it in a module, or set rollout.num_workers=0"
        )
    return b"".join(pickled(sent))


def _pickled(workflow: RolloutWorkflow) -> bytes:
    try:
        return pickle.dumps(workflow, protocol=5)
    except Exception as error:
        raise ConfigError(
            f"{type(workflow).__name__} cannot be sent to worker processes ({type(error).__name__}: {error}). Open "
            "connections, locks and processes in its __aenter__, which runs in each worker, define its functions at "
            "the top of a module, and make no lambdas; or set rollout.num_workers=0"
        ) from error


def received_workflow(sock: socket.socket) -> tuple[RolloutWorkflow, EndpointConfig]:
    """In the worker: what was sent. Raises what importing the script, or unpickling, raises."""
    sent: _Sent = receive_message(sock)
    process: Any = multiprocessing.process.current_process()
    process._inheriting = True  # a script without `if __name__ == "__main__"` would start a run here: arl refuses it
    try:
        multiprocessing.spawn.prepare(dict(sent.main))
        return pickle.loads(sent.workflow), sent.endpoint
    finally:
        del process._inheriting
