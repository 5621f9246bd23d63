"""The table of what runs where, and the mistakes that settings alone show."""

import re
import socket
from typing import Any

import pytest

from arl.api.events import Finding, PlacedPart, SharedPath
from arl.api.settings.run import Config
from arl.cluster.placement import PlacementTable, gpu_mistakes, planned_servers, planned_trainer, shared_gpus

HOST = socket.gethostname()
SGLANG: dict[str, Any] = {"kind": "sglang_processes"}
SHARED_GPU = ("--mem-fraction-static", "0.3")


def config_of(**settings: Any) -> Config:
    return Config.model_validate({"model": "none", **settings})


def texts(findings: list[Finding]) -> str:
    return "\n".join(finding.text for finding in findings)


def rank(number: int, host: str, gpu: int) -> PlacedPart:
    return PlacedPart(part="trainer", name=f"policy rank {number}", host=host, address="10.0.0.1", device=f"GPU {gpu}")


def test_one_machine_takes_one_line() -> None:
    parts = [
        PlacedPart(part="controller", host="a", pid=1),
        PlacedPart(part="trainer", host="a", device="cpu", pid=2),
        PlacedPart(part="server", host="a", address="http://127.0.0.1:1", device="cpu", pid=3),
        PlacedPart(part="workers", host="a", note="2 processes for episodes"),
    ]
    line = "on a: trainer on cpu (process 2), server on cpu (http://127.0.0.1:1, process 3), 2 processes for episodes"
    assert PlacementTable(parts=parts).brief() == line
    more = [PlacedPart(part="server", host="a", address=f"http://127.0.0.1:{n}", device=f"GPU {n}") for n in (1, 2, 3)]
    assert (
        PlacementTable(parts=[*parts[:2], *more]).brief() == "on a: trainer on cpu (process 2), 3 servers on GPUs 1-3"
    )


def test_neighbouring_ranks_of_a_machine_take_one_line_of_a_cluster() -> None:
    ranks = [rank(number, host="ab"[number // 4], gpu=number % 4) for number in range(6)]
    seen = {f"n{number}": "yes" for number in range(10)} | {"n7": "no"}
    table = PlacementTable(
        parts=[PlacedPart(part="controller", host="a"), *ranks],
        shared=[SharedPath(name="run_dir", path="/runs", seen=seen)],
        findings=[Finding(text="broken"), Finding(text="odd", is_mistake=False)],
    )
    lines = [" ".join(line.split()) for line in str(table).splitlines()]
    assert "policy ranks 0-3 a 10.0.0.1 GPUs 0-3" in lines
    assert "policy ranks 4-5 b 10.0.0.1 GPUs 0-1" in lines
    assert "run_dir /runs yes: n0, n1, n2, n3, n4, n5, n6, n8 and 1 more; no: n7" in lines
    assert lines[-4:] == ["mistakes:", "1. broken", "warnings:", "1. odd"]
    assert table.brief().count("\n") == 5


@pytest.mark.parametrize(
    ("train", "engine", "said"),
    [
        ({"device": "cuda"}, SGLANG, r"trainer has GPU 0, and .* on GPU 0, too: set engine.first_gpu to 1,"),
        ({"device": "cuda"}, SGLANG | {"first_gpu": 1}, ""),
        ({"device": "cuda"}, SGLANG | {"arguments": SHARED_GPU}, ""),
        ({"device": "cuda"}, SGLANG | {"colocated": True}, ""),
        ({"device": "cpu"}, SGLANG, ""),
        ({"device": "cuda"}, SGLANG | {"gpus_per_server": 0}, ""),
        ({"device": "cuda"}, {"kind": "local", "device": "cuda"}, ""),
        ({"device": "cuda", "num_ranks": 2}, SGLANG | {"first_gpu": 1, "num_servers": 2}, r"on GPU 1, too: .* to 2,"),
        ({"device": "cuda:2"}, SGLANG | {"gpus_per_server": 2, "num_servers": 2}, r"on GPU 2, too: .* to 3,"),
        ({"device": "cuda:1", "num_ranks": 2}, {}, "train.device is cuda:1, one GPU, and train.num_ranks is 2"),
        ({"device": "cuda", "num_ranks": 2, "ray_address": "auto"}, SGLANG, ""),
    ],
)
def test_parts_that_would_share_a_gpu_are_named(train: dict[str, Any], engine: dict[str, Any], said: str) -> None:
    found = gpu_mistakes(config_of(train=train, engine=engine))
    assert bool(found) == bool(said)
    assert re.search(said, texts(found))


@pytest.mark.parametrize(
    ("settings", "num_gpus", "said"),
    [
        ({"train": {"device": "cuda"}}, 0, "train.device is cuda, and this machine shows 0"),
        ({"train": {"device": "cuda"}}, 1, ""),
        ({"train": {"device": "cuda", "num_ranks": 4}}, 3, "train.num_ranks is 4, and this machine shows 3"),
        (
            {"train": {"device": "cuda", "num_ranks": 2}, "algorithm": {"preset": "ppo"}},
            3,
            "as many ranks for the critic",
        ),
        (
            {"train": {"device": "cuda", "num_ranks": 2}, "algorithm": {"preset": "prime"}},
            3,
            "as many ranks for the reward model",
        ),
        (
            {"engine": SGLANG | {"num_servers": 2, "gpus_per_server": 2, "first_gpu": 1}},
            4,
            "2 servers .*need GPUs 1-4, and this machine shows 4",
        ),
        ({"engine": {"device": "cuda:1"}}, 1, "engine.device is cuda:1"),
    ],
)
def test_gpus_that_a_machine_lacks_are_counted(settings: dict[str, Any], num_gpus: int, said: str) -> None:
    found = gpu_mistakes(config_of(**settings), num_gpus)
    assert len(found) == bool(said)
    assert re.search(said, texts(found))


def test_ranks_that_got_one_gpu_are_named() -> None:
    ranks = [rank(number, host="ab"[number // 2], gpu=0) for number in range(4)]
    assert shared_gpus(ranks, ["", "", "", ""]) == []
    assert shared_gpus(ranks, ["x", "y", "z", "w"]) == []
    (found,) = shared_gpus(ranks, ["x", "y", "y", "w"])
    assert found.text.startswith("policy rank 1 and policy rank 2 are on one GPU of a (y)")


def test_what_settings_place_on_this_machine() -> None:
    config = config_of(train={"device": "cuda", "num_ranks": 2}, engine=SGLANG | {"first_gpu": 2, "gpus_per_server": 2})
    assert [(part.name, part.device) for part in planned_trainer(config)] == [
        ("policy rank 0", "GPU 0"),
        ("policy rank 1", "GPU 1"),
    ]
    assert [(part.host, part.device) for part in planned_servers(config)] == [(HOST, "GPUs 2-3")]
    for preset, role in (("ppo", "critic"), ("prime", "reward_model")):
        beside = planned_trainer(config_of(algorithm={"preset": preset}))
        assert [(part.name, part.device) for part in beside] == [("policy", "cpu"), (role, "cpu")]
