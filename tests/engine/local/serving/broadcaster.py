"""A trainer, seen from a server: joins as rank 0, broadcasts a model's weights, and may misbehave while it does.

    python broadcaster.py PORT GROUP MODEL_DIR whole|stall|die

It broadcasts when a line comes on stdin; then prints a line, and waits for stdin to close.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import load_file

from arl.engine.local.received_weights import GroupAddress, join_group


def main(port: int, name: str, model: str, behaviour: str) -> None:
    at = GroupAddress(address="127.0.0.1", port=port, rank=0, world_size=2, name=name, backend="gloo")
    group = join_group(at, timedelta(seconds=60))
    sys.stdin.readline()
    tensors = list(load_file(Path(model, "model.safetensors")).values())
    for tensor in tensors if behaviour == "whole" else tensors[: len(tensors) // 2]:
        dist.broadcast(tensor, group_src=0, group=group)
    if behaviour != "die":
        sys.stdout.write("sent\n")
        sys.stdout.flush()
        sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
