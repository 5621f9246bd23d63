"""The workflow on its way to a worker: what the controller's process sends first, and what the worker makes of it."""

from __future__ import annotations

import socket

from arl.api.endpoint import EndpointConfig
from arl.api.workflow import RolloutWorkflow
from arl.object_process import pickled, receive_message
from arl.sent_object import SentObject

_ADVICE = (
    "Open connections, locks and processes in its __aenter__, which runs in each worker, define its functions at the "
    "top of a module, and make no lambdas"
)


def sent_workflow(workflow: RolloutWorkflow, endpoint: EndpointConfig) -> bytes:
    """The first message to a worker. endpoint: the settings of its endpoints.

    Raises ConfigError if the workflow cannot travel.
    """
    name, instead = type(workflow).__name__, "; or set rollout.num_workers=0"
    sent = SentObject.of(workflow, name, "worker processes", _ADVICE, instead)
    return b"".join(pickled((sent, endpoint)))


def received_workflow(sock: socket.socket) -> tuple[RolloutWorkflow, EndpointConfig]:
    """In the worker: what was sent. Raises what importing the script, or unpickling, raises."""
    sent, endpoint = receive_message(sock)
    return sent.received(), endpoint
