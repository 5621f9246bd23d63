"""Where cgroups of v2 are made and what is written there, played on directories laid out like those of the kernel."""

import contextlib
import os
from pathlib import Path

import pytest

from arl.sandbox import cgroup


class Tree:
    """Directories laid out like v2, with the files that the kernel would make in each."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self._mkdir, self._rmdir = os.mkdir, os.rmdir
        monkeypatch.setattr(cgroup.os, "mkdir", self.mkdir)
        monkeypatch.setattr(cgroup.os, "rmdir", self.rmdir)
        self._read = cgroup._read
        monkeypatch.setattr(cgroup, "_read", self.read)
        self.own = "/"
        self.mkdir(str(root / "user"))

    def mkdir(self, path: str) -> None:
        self._mkdir(path)
        for name in ("memory.max", "memory.swap.max", "memory.oom.group", "pids.max", "cpu.max", "memory.events",
                     "cpu.stat", "cgroup.procs", "cgroup.subtree_control"):  # fmt: skip
            Path(path, name).write_text("")

    def rmdir(self, path: str) -> None:
        for file in Path(path).iterdir():
            if file.is_file():
                file.unlink()
        self._rmdir(path)

    def read(self, path: str) -> str:
        match path:
            case "/proc/self/cgroup":
                return f"0::{self.own}\n"
            case "/proc/self/mountinfo":
                return f"30 23 0:26 / {self.root} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
            case _:
                return self._read(path)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    return Tree(tmp_path, monkeypatch)


def test_in_v2_cgroups_are_made_beside_our_own_with_the_controllers_passed_on(tree: Tree) -> None:
    tree.own = "/user/train.scope"
    tree.mkdir(str(tree.root / "user/train.scope"))
    (tree.root / "user/cgroup.subtree_control").write_text("cpuset io memory pids\n")
    cgroups = cgroup.Cgroups()
    (mine,) = (tree.root / "user").glob("arl-*")
    assert (mine / "cgroup.subtree_control").read_text() == "+memory +pids"
    assert (mine / "keeper/cgroup.procs").read_text() == "0"
    cgroups.prove()
    assert cgroups.names == "memory pids"
    limits = {"memory_bytes": 100 << 20, "disk_bytes": 20 << 20, "processes": 7, "cpu_s": 4.0, "wall_s": 2.0}
    with contextlib.ExitStack() as removed:
        run = cgroups._made(limits)
        removed.callback(run.are_removed)
        (place,) = (path for path in mine.iterdir() if path.is_dir() and path.name != "keeper")
        names = ("memory.max", "memory.swap.max", "memory.oom.group", "pids.max", "cpu.max")
        assert [(place / name).read_text() for name in names] == [str(136 << 20), "0", "1", "10", ""]
        run.enter()
        assert (place / "cgroup.procs").read_text() == "0"
        (place / "cpu.stat").write_text("usage_usec 3900000\nuser_usec 1\n")
        (place / "memory.events").write_text("low 0\nmax 9\noom 0\noom_kill 0\n")
        assert run.exceeded() is None
        (place / "cpu.stat").write_text("usage_usec 4100000\nuser_usec 1\n")
        assert run.exceeded() == "cpu"
        (place / "memory.events").write_text("oom 1\noom_kill 1\n")
        assert run.exceeded() == "memory"
    assert not place.exists()


@pytest.mark.parametrize(
    ("own", "control", "limit", "expected"),
    [
        ("/user/train", "memory", "max", [("user", {"memory"})]),
        ("/user/train", "", "max", []),  # nothing is passed on
        ("/user/train", "memory pids", "1073741824", []),  # beside it, programs would escape the limit of all of arl
        ("/", "memory", "", [("", {"memory"})]),
        ("/../elsewhere", "memory", "max", []),
    ],
)
def test_where_v2_gives_a_place(
    tree: Tree, own: str, control: str, limit: str, expected: list[tuple[str, set[str]]]
) -> None:
    tree.own = own
    tree.mkdir(str(tree.root / "user/train"))
    (tree.root / "user/cgroup.subtree_control").write_text(control)
    (tree.root / "cgroup.subtree_control").write_text(control)
    (tree.root / "user/train/memory.max").write_text(limit)
    found = [(os.path.relpath(place.path, tree.root).strip("."), {*place.controllers}) for place in cgroup.places()]
    assert found == expected


def test_a_keeper_without_the_right_to_make_cgroups_leaves_none(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.own = "/user/train"
    tree.mkdir(str(tree.root / "user/train"))
    (tree.root / "user/cgroup.subtree_control").write_text("memory")

    def refuse(self: cgroup.Cgroup) -> None:
        raise PermissionError(13, "the directory above belongs to another")

    monkeypatch.setattr(cgroup.Cgroup, "enter", refuse)
    assert cgroup.Cgroups().names == "none, because no cgroup may be made here"
    assert list((tree.root / "user").glob("arl-*")) == []


def test_a_keeper_whose_proof_fails_halfway_goes_back_and_does_not_kill_itself(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.own = "/user/train"
    tree.mkdir(str(tree.root / "user/train"))
    (tree.root / "user/cgroup.subtree_control").write_text("memory")
    cgroups, killed = cgroup.Cgroups(), list[int]()
    (mine,) = (tree.root / "user").glob("arl-*")
    (mine / "keeper/cgroup.procs").write_text("")

    def halfway(self: cgroup.RunCgroups) -> None:
        (mine / "0/cgroup.procs").write_text(f"0\n{os.getpid()}\n")
        raise PermissionError(13, "the next hierarchy refuses it")

    monkeypatch.setattr(cgroup.RunCgroups, "enter", halfway)
    monkeypatch.setattr(cgroup.os, "kill", lambda pid, _: killed.append(pid))
    cgroups.prove()
    assert killed == []
    assert (mine / "keeper/cgroup.procs").read_text() == "0"
    assert "the next hierarchy refuses it" in cgroups.names


def test_leftovers_of_keepers_that_are_gone_are_removed_also_of_one_with_our_number(tree: Tree) -> None:
    tree.own = "/user/train"
    tree.mkdir(str(tree.root / "user/train"))
    (tree.root / "user/cgroup.subtree_control").write_text("memory")
    beyond = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    names = [f"{cgroup._prefix()}{pid}" for pid in (os.getpid(), beyond, os.getppid())]
    for path in [*names, f"{names[0]}/keeper", f"{names[1]}/keeper", f"{names[1]}/7", "another"]:
        tree.mkdir(str(tree.root / "user" / path))
    cgroup.remove_leftovers()
    assert {path.name for path in (tree.root / "user").iterdir() if path.is_dir()} == {"train", "another", names[2]}
