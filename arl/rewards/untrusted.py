"""What a worker process does before it scores text that a model wrote: less memory, and no Python from that text."""

from __future__ import annotations

import ast
import importlib.util
import resource
import sys
from pathlib import Path
from typing import Any

from arl.api.errors import RewardError

Names = dict[str, Any]

MEMORY_BYTES = 2**30
"""What scoring may take, beside what the worker has when it is ready."""

_ARITHMETIC = (
    ast.Expression,
    ast.Constant,
    ast.List,
    ast.Tuple,
    ast.Set,
    ast.Dict,
    ast.BinOp,
    ast.UnaryOp,
    ast.Compare,
    ast.operator,
    ast.unaryop,
    ast.cmpop,
    ast.expr_context,
)
_MATHEMATICS = (*_ARITHMETIC, ast.Call, ast.Name, ast.keyword)
_FUNCTIONS = frozenset(("sqrt", "cbrt", "root", "abs", "pow", "round"))
"""Those of sympy and Python that are no classes of sympy's."""
_NAMING = frozenset(("Symbol", "Integer", "Float", "Rational", "Function"))
"""sympy's parser writes these around names and numbers; nothing else may hold a string, which would be parsed again."""


def require(module: str, package: str, extra: str) -> None:
    """Raise RewardError unless the module can be imported."""
    if importlib.util.find_spec(module) is None:
        raise RewardError(f"this reward needs {package}: pip install 'arl[{extra}]'")


def limit_memory() -> None:
    """Let allocations beyond MEMORY_BYTES fail, so that a huge power ends in a MemoryError before the machine does."""
    try:
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = now + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def guard_evaluation(*packages: str) -> None:
    """Have `eval` in these packages' modules take literals and arithmetic alone, and sympy's parser mathematics alone.

    Scorers hand answers to both, and either evaluates them as Python.
    """
    import sympy.parsing.sympy_parser as parser

    translate = parser.stringify_expr

    def translate_checked(s: str, local_dict: Names, global_dict: Names, transformations: Any) -> str:
        code = translate(s, local_dict, global_dict, transformations)
        _check_mathematics(code, {**global_dict, **local_dict})
        return code

    parser.stringify_expr = translate_checked
    for name, module in tuple(sys.modules.items()):
        if name.partition(".")[0] in packages:
            module.__dict__["eval"] = _eval_arithmetic


def _eval_arithmetic(source: str) -> Any:
    """Of literals, lists of them, and operators."""
    tree = ast.parse(source.strip(), mode="eval")
    for node in ast.walk(tree):
        if not isinstance(node, _ARITHMETIC):
            raise ValueError(f"{type(node).__name__} is neither a literal nor arithmetic")
    return eval(compile(tree, "<answer>", "eval"), {"__builtins__": {}})


def _check_mathematics(code: str, names: Names) -> None:
    tree = ast.parse(code.strip(), mode="eval")
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    named = {id(argument) for call in calls if _name(call.func) in _NAMING for argument in call.args}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            is_allowed = node.id in _FUNCTIONS or _is_of_sympy(names.get(node.id))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            is_allowed = id(node) in named
        else:
            is_allowed = isinstance(node, _MATHEMATICS)
        if not is_allowed:
            raise ValueError(f"{_name(node) or type(node).__name__} is no mathematics")


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _is_of_sympy(known: object) -> bool:
    from sympy import Basic

    return isinstance(known, Basic) or (isinstance(known, type) and issubclass(known, Basic))
