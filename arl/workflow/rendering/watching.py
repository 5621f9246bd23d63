"""Compiles a chat template so that its loops over messages can be watched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeGuard, cast

from jinja2 import Environment, Template, TemplateSyntaxError, nodes
from jinja2.visitor import NodeTransformer

ITEMS, END, COMPARE, FROM_END = "_arl_items", "_arl_end", "_arl_compare", "_arl_from_end"
"""The template calls these: before a loop, after it, to compare a namespace's attribute, and to count from the end."""
_COMPARED = {"eq", "ne", "lt", "lteq", "gt", "gteq"}
_STATEFUL = {"cycler", "joiner", "lipsum", "self"}
_OF_LOOP = {"index0", "index", "revindex0", "revindex", "length", "first", "last", "previtem", "nextitem"}
"""What a template may read of `loop`."""


class _Watching(NodeTransformer):
    """Lets comparisons of namespaces' attributes, and `messages|length - 1 - loop.index0`, call the rendering."""

    def __init__(self, spaces: set[str]) -> None:
        self._spaces = spaces

    def visit_Compare(self, node: nodes.Compare) -> nodes.Expr:  # noqa: N802 - as jinja calls it
        self.generic_visit(node)
        if len(node.ops) > 1 or node.ops[0].op not in _COMPARED:
            return node
        sides = (node.expr, node.ops[0].expr)
        if any(isinstance(side, nodes.Call) or any(side.find_all(nodes.Call)) for side in sides):
            return node  # it might change the attribute
        for side, other in (sides, sides[::-1]):
            if _is_of(side, self._spaces) and not side.attr.startswith("_"):
                known = (nodes.Const(side.attr), nodes.Const(node.ops[0].op))
                return _call(COMPARE, side.node, *known, other, nodes.Const(side is sides[0]))
        return node

    def visit_Sub(self, node: nodes.Sub) -> nodes.Expr:  # noqa: N802 - as jinja calls it
        self.generic_visit(node)
        left, right = node.left, node.right
        if isinstance(right, nodes.Getattr) and right.attr == "index0" and isinstance(left, nodes.Sub):
            is_next = isinstance(left.right, nodes.Const) and left.right.value == 1
            if is_next and isinstance(left.left, nodes.Filter) and left.left.name in ("length", "count"):
                return _call(FROM_END, cast("nodes.Expr", left.left.node), right.node)
        return node


def _is_of(node: nodes.Node, names: set[str]) -> TypeGuard[nodes.Getattr]:
    return isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name) and node.node.name in names


def _call(name: str, *arguments: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load"), list(arguments), [], None, None)


def _names(within: Sequence[nodes.Node], context: str = "load") -> set[str]:
    return {name.name for node in within for name in node.find_all(nodes.Name) if name.ctx == context}


def _watch(body: list[nodes.Node], readable: set[str], assigned: set[str], loops: list[nodes.For]) -> set[str]:
    """Let the loops whose text goes straight into the rendering ask `_items` for their messages.

    assigned: the variables assigned before. Returns those assigned by the end. To read another variable could give it
    another value: jinja lets a variable that is assigned only later hide one of the same name outside the template.
    """
    for node in tuple(body):
        if isinstance(node, nodes.Assign | nodes.AssignBlock):
            assigned = assigned | _names([node], "store")
        if isinstance(node, nodes.If):
            parts = (node.body, cast("list[nodes.Node]", node.elif_), node.else_)
            assigned = assigned.union(*[_watch(part, readable, assigned, loops) for part in parts])
        if isinstance(node, nodes.For) and not (node.recursive or node.else_ or node.test):
            names = sorted((_names(node.body) | readable) & assigned)
            variables = nodes.Dict([nodes.Pair(nodes.Const(name), nodes.Name(name, "load")) for name in names])
            node.iter = _call(ITEMS, nodes.Const(len(loops)), cast("nodes.Expr", node.iter), variables)
            body.insert(body.index(node) + 1, nodes.ExprStmt(_call(END)))
            loops.append(node)
    return assigned


def _is_watchable(tree: nodes.Template) -> bool:
    """Whether all that its iterations read can be followed."""
    apart = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block, nodes.With)
    fixed = {node.name for node in tree.body if isinstance(node, nodes.Macro)}
    of_loop = [node for node in tree.find_all(nodes.Getattr) if _is_of(node, {"loop"})]
    return not (
        any(tree.find_all(apart))
        or len(list(tree.find_all(nodes.Macro))) > len(fixed)
        or _names([tree]) & _STATEFUL
        or any(node.attr not in _OF_LOOP for node in of_loop)
        or len(of_loop) < sum(node.name == "loop" for node in tree.find_all(nodes.Name))
    )


@lru_cache(maxsize=64)
def watched(source: str, loop_context: Callable[..., Any]) -> Template | None:
    """The template with its loops watched; None if that cannot be done. loop_context: in place of jinja's class."""
    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        environment: Environment = _compile_jinja_template(source).environment
        tree = environment.parse(source)
    except (ImportError, TemplateSyntaxError):  # a private function, for the environment in which transformers renders
        return None
    if "random" in source or not _is_watchable(tree):
        return None
    macros = list(tree.find_all(nodes.Macro))
    spaces = {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and _names([assign.node]) >= {"namespace"}
    }
    loops: list[nodes.For] = []
    _watch(tree.body, _names(macros), set(), loops)
    _Watching(spaces).visit(tree)
    tree.set_environment(environment)
    template = Template.from_code(environment, environment.compile(tree), environment.make_globals(None))
    template.root_render_func.__globals__["LoopContext"] = loop_context
    return template if loops else None
