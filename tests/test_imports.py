"""Who may import whom, read from the sources; and what stays light to import."""

import ast
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
ON_LAUNCH = ("arl.experiment", "arl.start")
"""What runs whole experiments."""
COMPOSERS = (
    "arl.assembly",
    "arl.examining",
    "arl.exporting",
    "arl.policy_engines",
    "arl.rehearsal",
    "arl.run_engines",
    "arl.server_checks",
    "arl.serving",
    "arl.trainer_process",
)
"""The composition root."""
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


SHOWN = (
    "arl.training.evaluator",
    "arl.training.metrics",
    "arl.training.display",
    "arl.training.run_dir",
    "arl.training.run_end",
    "arl.training.run_facts",
)
"""What commands see of training: no trainer."""
CALLS = ("arl.offload", "arl.remote_calls", "arl.object_process")
"""Calls in other threads and processes."""
ALLOWED = {
    "arl.api": (),
    "arl.algorithm": ("arl.api",),
    "arl.web": ("arl.api",),
    "arl.eventlog": ("arl.api",),
    "arl.digest": (),
    "arl.remarks": ("arl.digest",),
    "arl.view": ("arl.api", "arl.eventlog", "arl.web", "arl.offload", "arl.digest", "arl.remarks"),
    "arl.rollout": ("arl.api",),
    "arl.training": (
        "arl.api",
        "arl.algorithm",
        "arl.rollout",
        "arl.stopping",
        "arl.json_console",
        "arl.digest",
        "arl.remarks",
        *CALLS,
    ),
    "arl.finetuning": (
        "arl.api",
        "arl.algorithm",
        "arl.workflow",
        "arl.data",
        "arl.training",
        "arl.engine.tiny",
        "arl.engine.tiny_vision",
        "arl.engine.model_files",
        "arl.trainer_process",
        "arl.lazy",
        "arl.offload",
        "arl.stopping",
    ),
    "arl.vision": ("arl.api",),
    "arl.engine.frames": (),
    "arl.engine.routers": ("arl.api",),
    "arl.engine.local": ("arl.api", "arl.vision", "arl.web", "arl.engine.frames", "arl.engine.routers"),
    "arl.engine.client": (
        "arl.api",
        "arl.vision",
        "arl.web",
        "arl.engine.frames",
        "arl.engine.fsdp.ray_cluster",
        "arl.cluster.servers_file",
        "arl.offload",
        "arl.child_process",
        "arl.object_process",
    ),
    "arl.engine.weights": ("arl.api", "arl.web", "arl.engine.local.received_weights", "arl.offload"),
    "arl.engine.fsdp": (
        "arl.api",
        "arl.vision",
        "arl.algorithm",
        "arl.engine.weights",
        "arl.engine.model_files",
        "arl.engine.routers",
        *CALLS,
    ),
    "arl.engine.tiny": (),
    "arl.engine.tiny_vision": ("arl.engine.tiny",),
    "arl.engine.model_files": ("arl.api", "arl.engine.routers"),
    "arl.extending": ("arl.api", "arl.algorithm", "arl.training", "arl.lazy"),
    "arl.sandbox": ("arl.api", "arl.lazy", "arl.offload"),
    "arl.rewards": ("arl.api", "arl.web", "arl.sandbox", "arl.lazy", "arl.offload"),
    "arl.workflow": ("arl.api", "arl.vision", "arl.web", "arl.sandbox", "arl.rewards"),
    "arl.endpoint": ("arl.api", "arl.web", "arl.sandbox", "arl.rewards", "arl.workflow"),
    "arl.workers": (
        "arl.api",
        "arl.web.watch",
        "arl.rollout",
        "arl.remote_calls",
        "arl.object_process",
        "arl.child_process",
        "arl.sent_object",
    ),
    "arl.policies": ("arl.api", "arl.training"),
    "arl.tracking": ("arl.api", "arl.remote_calls"),
    "arl.plan": ("arl.api", "arl.eventlog"),
    "arl.replaying": (
        "arl.api",
        "arl.training",
        "arl.trainer_process",
        "arl.object_process",
        "arl.engine.model_files",
        "arl.engine.fsdp.watched_engine",
    ),
    "arl.cluster": ("arl.api", "arl.web.addresses"),
    "arl.cli": ("arl.api", "arl.in_cell", "arl.stopping", "arl.json_console", "arl.rehearsal"),
    "arl.in_cell": ("arl.api", "arl.stopping"),
    "arl.lazy": (),
    "arl.stopping": (),
    "arl.json_console": (),
    "arl.log_files": (),
    "arl.metrics_endpoint": ("arl.api", "arl.web", "arl.training", "arl.offload"),
    "arl.offload": (),
    "arl.remote_calls": ("arl.api",),
    "arl.sent_object": ("arl.api",),
    "arl.child_process": (),
    "arl.object_process": ("arl.api", "arl.remote_calls", "arl.child_process", "arl.web.watch"),
    "arl.data": ("arl.api",),
    "arl.given_tasks": ("arl.api", "arl.data", "arl.rollout", "arl.offload"),
    "arl.doctor": ("arl.api", "arl.web", "arl.offload"),
    "arl.commands": (
        "arl.api",
        "arl.rollout",
        "arl.data.lazy_rows",
        "arl.experiment",
        "arl.given_tasks",
        "arl.assembly",
        "arl.doctor",
        "arl.examining",
        "arl.exporting",
        "arl.serving",
        "arl.cli",
        "arl.cluster",
        "arl.offload",
        "arl.json_console",
        "arl.eventlog",
        "arl.view",
        "arl.web",
        "arl.plan",
        "arl.replaying",
        "arl.finetuning",
        *SHOWN,
    ),
    "arl.__main__": ("arl.api", "arl.commands"),
}
"""Each wing, and the wings that it may import. The embedded server is a separate program: it sees neither its client
nor the trainer."""


@pytest.mark.parametrize("wing", ALLOWED)
def test_a_wing_imports_only_what_lies_below_it(wing: str) -> None:
    assert breaches(wing, allowed=(wing, *ALLOWED[wing])) == []


def test_the_algorithm_does_no_io_and_imports_no_library_but_torch_and_numpy() -> None:
    found = {(m, i.partition(".")[0]) for m, names in imports().items() if is_in(m, "arl.algorithm") for i in names}
    allowed = {*sys.stdlib_module_names, "arl", "torch", "numpy"} - IO
    assert {(m, i) for m, i in found if i not in allowed} == set()


def test_every_module_has_a_place_in_these_rules() -> None:
    known = (*ALLOWED, *ON_LAUNCH, *COMPOSERS)
    assert [m for m in SOURCES if m not in ("arl", "arl.engine") and not is_in(m, known)] == []


def test_only_the_composition_root_names_concrete_engines() -> None:
    """The face names them for editors."""
    named = {m for m, found in imports().items() if any(is_in(i, "arl.engine") for i in found)}
    allowed = {*COMPOSERS, "arl", "arl.finetuning.job", "arl.finetuning.warm_starts", "arl.start"}
    assert {m for m in named if not is_in(m, ("arl.engine", "arl.replaying"))} == allowed


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


def test_a_file_name_and_a_class_name_occur_once() -> None:
    stems = Counter(source.stem for source in SOURCES.values() if not source.stem.startswith("__"))
    classes = Counter(
        node.name for source in SOURCES.values() for node in ast.walk(trees()[source]) if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in (stems + classes).items() if count > 1] == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter({m: found & SOURCES.keys() for m, found in imports().items()}).prepare()
    except CycleError as cycle:
        pytest.fail(" -> ".join(cycle.args[1]))


def test_importing_loads_nothing_heavy_before_it_is_needed() -> None:
    flow = ("arl", "arl.api", "arl.cli", "arl.data.loading", "arl.data.given", "arl.rollout.controller")
    light = (*flow, "arl.workflow.conversation", "arl.workflow.tools", "arl.experiment", "arl.commands.scoring")
    script = f"""
import sys
for module in {light}:
    __import__(module)
    print(*(f"{{module}} loads {{name}}" for name in {HEAVY} if name in sys.modules), sep="\\n", end="")
import arl.assembly  # what a run's own process runs: training is in another
print(*(f"arl.assembly loads {{name}}" for name in ("torch", "transformers", "pyarrow") if name in sys.modules))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == ""
