"""Execution of a ``%%ort`` cell: as a plain cell, with a call before its body and one at its end.

A cell magic gets its body as text and would have to execute it itself: without top-level ``await``,
with line numbers that are off by one, and with a display of its own. Instead the magic's line
becomes a string before IPython looks for cell magics, and the tree of the cell is changed:

    '%%ort net'                 <- was %%ort net; the line numbers do not change
    begin(1, 'net', ('net',))
    net = make()                <- the body
    finish(1, net)              <- its last expression was net, which is still displayed
"""

from __future__ import annotations

import ast
import re
from typing import Any

from IPython.core.inputtransformer2 import cell_magic

from ortlab.notebook.magics.parsing import asks_for_help

_FIRST_LINE = re.compile(r"%%ort(?:[ \t](.*))?$")
_MARK = "%%ort "


def mark(lines: list[str]) -> list[str]:
    """Turn the line ``%%ort ...`` into a string expression; an IPython input transformer.

    Args:
        lines: Lines of a cell.

    Returns:
        The lines; unchanged if the first one is not ``%%ort``.
    """
    match = _FIRST_LINE.match(lines[0].rstrip()) if lines else None
    if match is None:
        return lines
    body = cell_magic(lines[1:])  # type: ignore[no-untyped-call]
    return [repr(_MARK + (match[1] or "")) + "\n", *body]


# IPython then checks the unchanged lines for completeness: in a terminal a blank line ends a cell
# magic.
mark.has_side_effects = True  # type: ignore[attr-defined]


class Calls(ast.NodeTransformer):
    """Puts the two calls into a cell that `mark` has marked; an IPython AST transformer.

    Args:
        magics: Name of the class whose ``begin`` and ``finish`` are called.
    """

    def __init__(self, magics: str) -> None:
        self._magics = magics
        self._number = 0

    def visit(self, node: ast.AST) -> ast.AST:
        """Return the tree of a cell with the calls added; other cells do not change.

        Args:
            node: The tree of a cell.
        """
        if not isinstance(node, ast.Module) or (line := _marked(node)) is None:
            return node
        self._number += 1
        first, *body = node.body
        bound = bound_names(node) if body else None
        begin, _ = self._call("begin", self._number, line, bound, at=first)
        # Without a body, or if help was asked for, `begin` prints everything.
        if not body or asks_for_help(line):
            node.body = [begin]
            return node
        last = body[-1]
        finish, call = self._call("finish", self._number, at=last)
        if isinstance(last, ast.Expr):
            body.pop()
            call.args.append(last.value)
        node.body = [begin, *body, finish]
        return node

    def _call(self, name: str, *values: Any, at: ast.stmt) -> tuple[ast.Expr, ast.Call]:
        """Return the call ``get_ipython().magics_manager.registry[...].name(*values)``."""
        source = f"get_ipython().magics_manager.registry[{self._magics!r}].{name}{values!r}"
        call = ast.parse(source, mode="eval").body
        assert isinstance(call, ast.Call)
        statement = ast.Expr(call)
        for part in ast.walk(statement):
            ast.copy_location(part, at)
        return statement, call


def _marked(tree: ast.Module) -> str | None:
    """Return the words after ``%%ort`` of a marked cell; None for any other cell."""
    first = tree.body[0] if tree.body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        text = first.value.value
        if isinstance(text, str) and text.startswith(_MARK):
            return text.removeprefix(_MARK)
    return None


def bound_names(tree: ast.AST) -> tuple[str, ...]:
    """Return the names that a cell binds at its top level, in order.

    Args:
        tree: The tree of the cell.
    """
    finder = _Bound()
    finder.visit(tree)
    return tuple(finder.names)


class _Bound(ast.NodeVisitor):
    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.names[node.id] = None

    def visit_alias(self, node: ast.alias) -> None:
        self.names[node.asname or node.name.partition(".")[0]] = None

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        self._capture(node, node.name)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        self._capture(node, node.name)

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        self._capture(node, node.rest)

    def _capture(self, node: ast.AST, name: str | None) -> None:
        if name is not None:
            self.names[name] = None
        self.generic_visit(node)

    def _scope(self, node: ast.AST) -> None:
        """Skip a function or a class: it has a scope of its own."""

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = _scope  # noqa: N815

    def _comprehension(self, node: ast.AST) -> None:
        """Skip the loop names, which stay inside; a walrus binds in the cell."""
        for inner in ast.walk(node):
            if isinstance(inner, ast.NamedExpr):
                self.visit(inner.target)

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension  # noqa: N815
