"""What nodes answer, and which of it is a mistake. The nodes are probes in this process, some of them changed."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from free_port import free_port

from arl.api.settings.run import Config
from arl.cluster.node_checks import NodeReport, check_nodes, differences, written
from arl.cluster.node_probe import NodeProbe
from arl.cluster.ray_nodes import ClusterNode

OWN_TORCH = ".".join(NodeProbe().facts()["versions"]["torch"].split(".")[:2])


class FakeNode(NodeProbe):
    """A node at a loopback address of its own, with `changes` in the place of what it would answer."""

    def __init__(self, number: int, cpus: float = 0, gpus: float = 0, **changes: Any) -> None:
        super().__init__()
        name, total = f"n{number}", {"CPU": float(cpus), "GPU": float(gpus)}
        self.node = ClusterNode(
            node_id=f"id-{number}",
            name=name,
            address=f"127.0.0.{number}",
            total=total,
            free=changes.pop("free", total),
            is_here=number == 1,
        )
        self.changes = changes

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"machine": self.node.name}

    def answer(self, method: str, arguments: tuple[Any, ...]) -> Any:
        if method not in self.changes:
            return getattr(self, method)(*arguments)
        change = self.changes[method]
        return change(getattr(self, method), *arguments) if callable(change) else change


def checked(tmp_path: Path, *nodes: FakeNode, **settings: Any) -> NodeReport:
    by_id = {node.node.node_id: node for node in nodes}

    def ask(method: str, arguments: Mapping[str, tuple[Any, ...]]) -> Mapping[str, Any]:
        return {node_id: by_id[node_id].answer(method, own) for node_id, own in arguments.items()}

    train = {"num_ranks": 2, "ray_address": "auto", **settings.pop("train", {})}
    config = Config.model_validate({"model": "none", "run_dir": tmp_path / "a" / "run", "train": train, **settings})
    report = check_nodes(config, [node.node for node in nodes], ask)
    assert list(tmp_path.iterdir()) == [], "something was left behind"
    return report


def mistakes(report: NodeReport) -> list[str]:
    return [finding.text for finding in report.findings if finding.is_mistake]


def warnings(report: NodeReport) -> list[str]:
    return [finding.text for finding in report.findings if not finding.is_mistake]


def gone(*_: Any) -> str:
    return "no"


def test_nodes_without_faults_have_a_place_for_each_rank(tmp_path: Path) -> None:
    report = checked(tmp_path, FakeNode(1, cpus=1), FakeNode(2, cpus=4), FakeNode(3), train={"num_ranks": 3})
    assert [(part.name, part.host) for part in report.ranks] == [
        ("policy rank 0", "n1"),
        ("policy rank 1", "n2"),
        ("policy rank 2", "n2"),
    ]
    assert report.findings == []
    (run_dir,) = report.shared
    assert run_dir.seen == {"n1": "yes", "n2": "yes"}, "n3 has no room for a rank"


def test_a_rank_that_finds_no_place_is_a_mistake_with_what_each_node_has(tmp_path: Path) -> None:
    report = checked(tmp_path, FakeNode(1, cpus=2), FakeNode(2, cpus=3), train={"num_ranks": 3, "num_threads": 2})
    (text,) = mistakes(report)
    assert text.startswith("3 ranks need 2 CPU(s) each, and the Ray cluster has no room for them: n1 has 2 of 2 CPUs; ")
    assert not any(finding.ends_start for finding in report.findings), "nodes may still join"
    busy = FakeNode(2, cpus=3, free={"CPU": 1.0})
    waits = checked(tmp_path, FakeNode(1, cpus=1), busy, train={"num_ranks": 4})
    assert mistakes(waits) == []
    assert "n2 has 1 of 3 CPUs free; a run waits some minutes" in warnings(waits)[0]
    fewer = {"num_ranks": 4, "min_ranks": 1}
    begins = checked(tmp_path, FakeNode(1, cpus=1), FakeNode(2, cpus=1), train=fewer, rollout={"batch_size": 8})
    assert mistakes(begins) == []
    assert "; 2 rank(s) train until it has (train.min_ranks); set train.num_ranks" in warnings(begins)[0]


def test_a_run_dir_that_a_node_with_a_rank_does_not_see_is_a_mistake(tmp_path: Path) -> None:
    report = checked(tmp_path, FakeNode(1, cpus=1), FakeNode(2, cpus=1, looks_for=gone))
    (text,) = mistakes(report)
    assert text.startswith(f"{tmp_path}/a/run (run_dir) is not seen on n2: set run_dir to storage that all nodes share")
    assert report.shared[0].seen == {"n1": "yes", "n2": "no"}


def test_a_run_dir_of_a_nodes_own_at_the_same_path_is_not_seen(tmp_path: Path) -> None:
    report = checked(tmp_path, FakeNode(1, cpus=1), FakeNode(2, cpus=1, looks_for="yes"))
    assert report.shared[0].seen == {"n1": "yes", "n2": "no"}
    assert len(mistakes(report)) == 1


def test_a_node_that_may_not_write_is_told_from_one_that_does_not_see(tmp_path: Path) -> None:
    def read_only(look: Any, token: str, mark: str, kind: str) -> str:
        return look(token, "/proc/none", kind)

    (text,) = mistakes(checked(tmp_path, FakeNode(1, cpus=1), FakeNode(2, cpus=1, looks_for=read_only)))
    assert text.startswith(f"n2 sees {tmp_path}/a/run (run_dir), but may not write there")


def test_a_node_that_a_rank_could_get_but_does_not_is_warned_about(tmp_path: Path) -> None:
    report = checked(tmp_path, FakeNode(1, cpus=2), FakeNode(2, cpus=1, looks_for=gone), FakeNode(3, looks_for=gone))
    assert mistakes(report) == []
    assert len(warnings(report)) == 1


def test_this_process_must_be_able_to_write(tmp_path: Path) -> None:
    report = checked(tmp_path, FakeNode(1, cpus=2), run_dir="/proc/run")
    assert mistakes(report)[0].startswith("run_dir is /proc/run, where this machine cannot write")


def test_a_models_directory_must_hold_the_same_files(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text("{}")

    def other(files: Any, path: str) -> Any:
        return files(path) | {"config": "another"}

    nodes = FakeNode(1, cpus=1), FakeNode(2, cpus=1, files=None), FakeNode(3, cpus=1, files=other)
    report = checked(tmp_path, *nodes, model=str(model), train={"num_ranks": 3})
    assert report.shared[1].seen == {"n1": "yes", "n2": "no", "n3": "another one"}
    assert [text.split(":")[0] for text in mistakes(report)] == [
        f"n2 does not see the model's directory {model}",
        f"n3 has other files in the model's directory {model}",
    ]


def test_a_directory_of_weights_is_looked_at_where_it_is_written_and_read(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("weights")
    given = {"kind": "sglang", "addresses": ("http://127.0.0.3:1", "http://192.0.2.77:1")}
    nodes = FakeNode(1, cpus=1), FakeNode(2, cpus=1), FakeNode(3, looks_for=gone)
    report = checked(tmp_path, *nodes, engine=given, weights={"directory": directory})
    assert report.shared[0].seen == {"n3": "no", "n1": "yes", "192.0.2.77": "not checked (no node of the Ray cluster)"}
    assert mistakes(report)[0].startswith(f"{directory} (weights.directory) is not seen on n3")
    assert list(directory.iterdir()) == []


def test_servers_of_other_machines_read_weights_from_the_run_directory(tmp_path: Path) -> None:
    given = {"kind": "sglang", "addresses": ("http://127.0.0.3:1", "http://192.0.2.77:1")}
    nodes = FakeNode(1, cpus=2), FakeNode(3, looks_for=gone)
    report = checked(tmp_path, *nodes, engine=given)
    assert report.shared[0].seen == {"n3": "no", "n1": "yes", "192.0.2.77": "not checked (no node of the Ray cluster)"}
    assert " (run_dir) is not seen on n3" in mistakes(report)[0]


def test_a_node_that_answers_nothing_is_named_once(tmp_path: Path) -> None:
    report = checked(tmp_path, FakeNode(1, cpus=1), FakeNode(2, cpus=1, facts=TimeoutError("no answer within 60 s")))
    (text,) = mistakes(report)
    assert text.startswith("n2 (127.0.0.2) ran no task of this run: no answer within 60 s")


def test_a_clock_an_hour_off_is_a_mistake_that_training_survives(tmp_path: Path) -> None:
    ahead, behind = (lambda _: time.time() + 4000), (lambda _: time.time() - 60)
    nodes = FakeNode(1, cpus=1), FakeNode(2, cpus=1, clock=ahead), FakeNode(3, cpus=1, clock=behind)
    report = checked(tmp_path, *nodes, train={"num_ranks": 3})
    (finding,) = [finding for finding in report.findings if finding.is_mistake]
    assert finding.text.startswith("the clock of n2 is 4000 s ahead of this machine's: set both by NTP")
    assert not finding.ends_start
    assert warnings(report)[0].startswith("the clock of n3 is 60 s behind this machine's")


def changed(**versions: str | None) -> dict[str, Any]:
    facts = NodeProbe().facts()
    own = {name: version for name, version in versions.items() if name not in facts}
    return (
        facts
        | {name: version for name, version in versions.items() if name in facts}
        | {"versions": facts["versions"] | own}
    )


@pytest.mark.parametrize(
    ("there", "said", "is_mistake"),
    [
        ({}, None, None),
        ({"sources": None}, "n has no arl: install this version", True),
        ({"sources": "others"}, "too, but with other source files", False),
        ({"arl": "0.0.1"}, "n has arl 0.0.1, this machine ", True),
        ({"python": "3.4.1"}, "n has Python 3.4.1, this machine ", True),
        ({"torch": "1.0.0"}, "n has torch 1.0.0, this machine ", True),
        ({"torch": f"{OWN_TORCH}.99"}, "n has torch", False),
        ({"transformers": None}, "n has transformers (none), this machine ", True),
    ],
)
def test_other_versions_are_named(there: dict[str, Any], said: str | None, is_mistake: bool | None) -> None:
    found = list(differences(NodeProbe().facts(), changed(**there), "n"))
    assert [is_one for _, is_one in found] == ([] if said is None else [is_mistake])
    assert said is None or said in found[0][0]


def cut_from(*others: int) -> Any:
    """What a node finds that does not get through to others of these numbers."""

    def tried(reaches_all: Any, places: list[tuple[str, int, str]]) -> list[str]:
        cut = {f"127.0.0.{number}" for number in others}
        return ["cut" if place[0] in cut else answer for place, answer in zip(places, reaches_all(places), strict=True)]

    return tried


def test_a_server_that_does_not_reach_rank_0_is_a_mistake_both_ways(tmp_path: Path) -> None:
    given = {"kind": "sglang", "addresses": ("http://127.0.0.2:1",)}
    sent = {"engine": given, "weights": {"transport": "distributed", "address": "127.0.0.1"}}
    fine = checked(tmp_path, FakeNode(1, cpus=2), FakeNode(2), **sent)
    assert fine.findings == []
    assert fine.hosts == {"http://127.0.0.2:1": "n2"}
    mute, deaf = FakeNode(2, reaches_all=cut_from(1)), FakeNode(1, cpus=2, reaches_all=cut_from(2))
    (there,) = mistakes(checked(tmp_path, FakeNode(1, cpus=2), mute, **sent))
    assert there.startswith("http://127.0.0.2:1 on n2 does not reach rank 0 on n1 (at 127.0.0.1: cut): let connections")
    assert "set weights.address" in there
    (back,) = mistakes(checked(tmp_path, deaf, FakeNode(2), **sent))
    assert back.startswith("rank 0 on n1 does not reach http://127.0.0.2:1 on n2 (at 127.0.0.2: cut)")
    (both,) = mistakes(checked(tmp_path, deaf, mute, **sent))
    assert both.startswith("http://127.0.0.2:1 on n2 and rank 0 on n1 do not reach each other (at 127.0.0.1: cut; at ")
    disk = checked(tmp_path, FakeNode(1, cpus=2), mute, engine=given)
    assert mistakes(disk) == []


def test_servers_on_other_machines_are_said_to_be_unchecked(tmp_path: Path) -> None:
    far = "http://192.0.2.77:1"
    given = {"engine": {"kind": "sglang", "addresses": (far,)}, "weights": {"transport": "distributed"}}
    report = checked(tmp_path, FakeNode(1, cpus=2), **given)
    assert report.notes == {far: "not checked whether it reaches rank 0: its host is no node of the Ray cluster"}


def test_ranks_must_reach_each_other(tmp_path: Path) -> None:
    nodes = FakeNode(1, cpus=1), FakeNode(2, cpus=1), FakeNode(3, cpus=1, reaches_all=cut_from(2))
    (text,) = mistakes(checked(tmp_path, *nodes, train={"num_ranks": 3}))
    assert text.startswith("n3 does not reach n2 (at 127.0.0.2: cut)")


def test_a_node_finds_out_whether_it_reaches_another() -> None:
    probe = NodeProbe()
    port, word = probe.listens("127.0.0.1")
    closed = free_port()
    answers = probe.reaches_all(
        [("127.0.0.1", port, word), ("127.0.0.1", port, "another"), ("127.0.0.1", closed, word)]
    )
    assert answers == ["", "something else answered", "Connection refused"]


def test_a_ray_with_more_gpus_than_the_machine_shares_them(tmp_path: Path) -> None:
    def gpus(count: int) -> Any:
        return lambda facts: facts() | {"num_gpus": count}

    cuda = {"num_ranks": 2, "device": "cuda"}
    (text,) = mistakes(checked(tmp_path, FakeNode(1, cpus=2, gpus=2, facts=gpus(1)), train=cuda))
    assert text.startswith("Ray was started with 2 GPUs on n1, which shows 1: two ranks would share one")
    one = {"facts": lambda facts: facts() | {"machine": "one", "num_gpus": 1}}
    doubled = checked(tmp_path, FakeNode(1, cpus=1, gpus=1, **one), FakeNode(2, cpus=1, gpus=1, **one), train=cuda)
    assert [text.split(", whose")[0] for text in mistakes(doubled)] == [
        "n1 (127.0.0.1) is one of 2 Ray nodes on one machine",
        "n2 (127.0.0.2) is one of 2 Ray nodes on one machine",
    ]


def test_servers_that_arl_starts_keep_off_the_gpus_that_ray_gives_to_ranks(tmp_path: Path) -> None:
    cuda = {"num_ranks": 2, "device": "cuda"}
    node = FakeNode(1, cpus=2, gpus=2)
    (text,) = mistakes(checked(tmp_path, node, train=cuda, engine={"kind": "sglang_processes"}))
    assert text.startswith("Ray may give a rank each of the first 2 GPUs of this node, n1, and arl starts servers from")
    assert checked(tmp_path, node, train=cuda, engine={"kind": "sglang_processes", "first_gpu": 2}).findings == []


def test_servers_on_the_cluster_leave_this_node_to_ranks_and_the_other_nodes_must_see_what_they_need(
    tmp_path: Path,
) -> None:
    on_ray = {"kind": "sglang_processes", "on_ray": True, "num_servers": 3, "gpus_per_server": 2}
    cuda = {"num_ranks": 4, "device": "cuda"}
    nodes = [FakeNode(number, cpus=8, gpus=4) for number in (1, 2)]
    last = FakeNode(3, cpus=8, gpus=4, looks_for=gone)
    report = checked(tmp_path, *nodes, last, train=cuda, engine=on_ray)
    assert {part.host for part in report.ranks} == {"n1"}
    assert [(part.host, part.device) for part in report.servers] == [("n2", "2 GPUs")] * 2 + [("n3", "2 GPUs")]
    assert [text.partition(": ")[0] for text in mistakes(report)] == [f"{tmp_path}/a/run (run_dir) is not seen on n3"]
    full = checked(tmp_path, nodes[0], train=cuda, engine=on_ray)
    assert "3 servers need 1 CPU(s) and 2 GPU(s) each, and the Ray cluster has no room" in "\n".join(mistakes(full))


def test_a_trainer_without_ray_stays_here_beside_servers_on_the_cluster(tmp_path: Path) -> None:
    on_ray = {"kind": "local", "on_ray": True, "num_servers": 2}
    report = checked(tmp_path, FakeNode(1, cpus=1), FakeNode(2, cpus=2), train={"num_ranks": 1}, engine=on_ray)
    assert (report.findings, {part.host for part in report.servers}) == ([], {"n2"})


def test_a_file_that_was_written_to_be_looked_for_goes_with_the_directories_made_for_it(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    for directory in (tmp_path / "old", tmp_path / "new" / "run"):
        with written(directory) as token:
            assert token.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert list((tmp_path / "old").iterdir()) == []
