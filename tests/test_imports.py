"""Who may import whom, read from the sources; and what stays light to import."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import sources
from sources import ROOT, trees

HEAVY = ("torch", "transformers", "aiohttp", "numpy")
WINGS: dict[str, tuple[int, tuple[str, ...]]] = {
    "cli": (
        7,
        ("api", "runtime", "data", "engine", "rollout", "observe", "training", "rewards", "cluster", "run"),
    ),
    "run": (
        6,
        (
            *("api", "algorithm", "data", "runtime", "engine", "rollout", "observe"),
            *("training", "rewards", "cluster", "endpoint", "workflow"),
        ),
    ),
    "cluster": (5, ("api", "runtime", "rollout", "observe")),
    "endpoint": (5, ("api", "runtime", "data", "rewards", "sandbox", "workflow")),
    "workflow": (5, ("api", "runtime", "data", "rewards", "sandbox")),
    "training": (4, ("api", "runtime", "algorithm", "rollout", "observe")),
    "rewards": (4, ("api", "runtime", "sandbox")),
    "engine": (3, ("api", "runtime", "algorithm", "data")),
    "rollout": (3, ("api", "runtime")),
    "observe": (3, ("api", "runtime")),
    "sandbox": (3, ("api", "runtime")),
    "algorithm": (2, ("api",)),
    "data": (2, ("api",)),
    "runtime": (2, ("api",)),
    "api": (1, ()),
}
"""Each wing, its floor, and the wings that it may import. docs/architecture.md shows the same table."""
WITHIN_ENGINE = {
    "local": ("frames", "linear_layers", "model_files", "routers", "trial"),
    "client": ("frames", "fsdp.ray_cluster"),
    "weights": ("local.weight_receiver",),
    "fsdp": ("weights", "linear_layers", "model_files", "routers", "trial"),
}
"""The embedded server is a separate program: it sees neither its client nor the trainer."""
IO = frozenset(
    (
        "asyncio", "concurrent", "ctypes", "fcntl", "http", "io", "logging", "mmap", "multiprocessing", "os", "pathlib",
        "pickle", "queue", "selectors", "shutil", "signal", "socket", "sqlite3", "ssl", "subprocess", "sys", "tempfile",
        "threading", "time", "urllib",
    )
)  # fmt: skip


def name_of(source: Path) -> str:
    parts = source.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {name_of(source): source for source in sources.SOURCES}


def is_in(module: str, packages: str | Iterable[str]) -> bool:
    packages = (packages,) if isinstance(packages, str) else packages
    return any(module == package or module.startswith(package + ".") for package in packages)


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Every imported module, those within functions and under TYPE_CHECKING too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            module = node.module or ""
            inner = [f"{module}.{alias.name}" for alias in node.names]
            yield from (name if name in SOURCES else module for name in inner)


@cache
def imports() -> dict[str, frozenset[str]]:
    """Module -> all that it imports."""
    return {module: frozenset(imports_of(trees()[source])) for module, source in SOURCES.items()}


def breaches(of: str | Iterable[str], allowed: str | Iterable[str]) -> list[str]:
    """Imports of arl's own modules, made in `of`, that are not among `allowed`."""
    own = {module: [i for i in found if is_in(i, "arl")] for module, found in imports().items() if is_in(module, of)}
    assert own, f"no module is named {of}: this rule watches nothing"
    return [f"{module} imports {i}" for module, found in own.items() for i in found if not is_in(i, allowed)]


@pytest.mark.parametrize("wing", WINGS)
def test_a_wing_imports_only_what_lies_below_it(wing: str) -> None:
    allowed = WINGS[wing][1]
    assert breaches(f"arl.{wing}", [f"arl.{name}" for name in (wing, *allowed)]) == []


def test_imports_lead_downwards_or_to_a_neighbour() -> None:
    floors = {wing: floor for wing, (floor, _) in WINGS.items()}
    upwards = {
        (wing, other) for wing, (_, allowed) in WINGS.items() for other in allowed if floors[other] > floors[wing]
    }
    assert upwards == set()
    assert {(w, o) for w, (_, allowed) in WINGS.items() for o in allowed if floors[o] == floors[w]} == {
        ("endpoint", "workflow")
    }


@pytest.mark.parametrize("part", WITHIN_ENGINE)
def test_the_parts_of_the_engine_know_only_these_of_each_other(part: str) -> None:
    others = [f"arl.{name}" for name in WINGS["engine"][1]]
    allowed = [f"arl.engine.{name}" for name in (part, *WITHIN_ENGINE[part])]
    assert breaches(f"arl.engine.{part}", [*others, *allowed]) == []


def test_the_root_holds_the_face_the_command_and_the_contracts_for_other_engines() -> None:
    assert {m for m in SOURCES if m.count(".") < 2 and m.removeprefix("arl.") not in WINGS} == {
        *("arl", "arl.__main__", "arl.extending")
    }


def test_the_table_in_the_architecture_is_this_one() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text().partition("## Wings, and who may import whom")[2]
    rows = re.findall(r"^\| (\d) \| `arl\.(\w+)` \| .* \| (.*) \|$", page, re.MULTILINE)
    shown = {wing: (int(floor), tuple(re.findall(r"`(\w+)`", allowed))) for floor, wing, allowed in rows}
    assert shown == WINGS


def test_the_algorithm_does_no_io_and_imports_no_library_but_torch_and_numpy() -> None:
    found = {(m, i.partition(".")[0]) for m, names in imports().items() if is_in(m, "arl.algorithm") for i in names}
    allowed = {*sys.stdlib_module_names, "arl", "torch", "numpy"} - IO
    assert {(m, i) for m, i in found if i not in allowed} == set()


def test_only_the_composition_root_names_concrete_engines() -> None:
    """The face names the tiny models for editors, and a command the file of servers."""
    named = {m for m, found in imports().items() if any(is_in(i, "arl.engine") for i in found)}
    assert {m for m in named if not is_in(m, ("arl.engine", "arl.run"))} == {"arl", "arl.cli.servers_command"}


def test_a_name_is_imported_from_the_module_that_defines_it() -> None:
    names = [
        (module, node.module, alias.name)
        for module, source in SOURCES.items()
        for node in ast.walk(trees()[source])
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    borrowed = {(m, name) for m, home, name in names if home in SOURCES and f"{home}.{name}" not in SOURCES}
    assert [f"{module} imports {name} from {home}" for module, home, name in names if (home, name) in borrowed] == []


def test_a_class_name_occurs_once() -> None:
    classes = Counter(
        node.name for source in SOURCES.values() for node in ast.walk(trees()[source]) if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in classes.items() if count > 1] == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter({m: found & SOURCES.keys() for m, found in imports().items()}).prepare()
    except CycleError as cycle:
        pytest.fail(" -> ".join(cycle.args[1]))


def test_importing_loads_nothing_heavy_before_it_is_needed() -> None:
    flow = ("arl", "arl.api", "arl.run.script", "arl.data.loading", "arl.data.loading", "arl.rollout.controller")
    light = (*flow, "arl.workflow.conversation", "arl.workflow.tools", "arl.run.experiment", "arl.cli.scoring")
    script = f"""
import sys
for module in {light}:
    __import__(module)
    print(*(f"{{module}} loads {{name}}" for name in {HEAVY} if name in sys.modules), sep="\\n", end="")
import arl.run.launch  # what a run's own process runs: training is in another
print(*(f"arl.run.launch loads {{name}}" for name in ("torch", "transformers", "pyarrow") if name in sys.modules))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == ""


def test_what_a_run_does_not_use_it_does_not_load() -> None:
    """Workflows, rewards, the endpoint, policies, worker processes, node checks and plans come when they are used."""
    script = "import arl, sys; arl.launch; print(*(name for name in sys.modules if name.startswith('arl')))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    loaded = run.stdout.split()
    unused = ("workflow", "rewards", "sandbox", "endpoint", "algorithm", "cluster.plan", "cluster.node_checks")
    assert [name for name in loaded if is_in(name, [f"arl.{wing}" for wing in unused])] == []
    assert len(loaded) <= 105
