"""What a function of FastDeploy's does to its runner, read from its source: names written, set and called.

``share_inputs.top_p``: an entry of a batch is written, or passed to a call that may write it. ``self.pooling_params``,
``request.schemata_key``: an attribute is set. ``self.sampler.apply_logits_processor()``, ``np.array()``: a call. A
computed key is given as it is written. Where it cannot be told, a name counts as written.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from hal_core import Unavailable

Path = tuple[str, ...]
BATCHES = ("share_inputs", "model_inputs", "target_model_inputs")
READS = frozenset(("clone", "cpu", "get", "item", "numpy", "tolist"))  # methods of an entry, or of a request
WRITING = frozenset(("__import__", "compile", "delattr", "eval", "exec", "globals", "setattr", "super", "vars"))
PASSING = frozenset(("enumerate", "filter", "iter", "map", "next", "reversed", "zip"))  # what they got, to others
TESTS = (ast.Compare, ast.UnaryOp, ast.BinOp, ast.If, ast.While, ast.Assert, ast.FormattedValue, ast.Subscript)


@lru_cache(maxsize=64)
def names_of(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names. The function's first argument is the runner, or the proposer; the second has the requests.

    :raises Unavailable: if there is no source.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    except (OSError, TypeError, SyntaxError) as error:
        what = f"the source of {getattr(function, '__qualname__', function)} cannot be read: {error}"
        raise Unavailable(what, cure="install FastDeploy with its Python sources", argument="FD_PLUGINS") from error
    assert isinstance(tree, ast.FunctionDef)
    return frozenset(_Reader(tree).names())


class _Reader:
    """One function. ``known``: what a local name stands for, as paths from an argument; a name may have several."""

    def __init__(self, tree: ast.FunctionDef) -> None:
        self.nodes = [*ast.walk(tree)]
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        arguments = [one.arg for one in (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)]
        roles = dict(zip(arguments, ("self", "req_dicts"), strict=False))
        self.known: dict[str, set[Path]] = {name: {(roles.get(name, name),)} for name in arguments}
        self.locals = {node.id for node in self.nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        self.locals |= {node.arg for node in self.nodes if isinstance(node, ast.arg)}
        self.locals |= {node.name for node in self.nodes[1:] if isinstance(node, ast.FunctionDef)}
        for node in self.nodes * 3:  # a name may stand for what another stands for
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr | ast.For | ast.comprehension):
                self._bind(node)

    def names(self) -> Iterator[str]:
        """Yield every name, some more than once."""
        for node in self.nodes:
            if isinstance(node, ast.Global | ast.Nonlocal):
                yield from (f"global {name}" for name in node.names)
            elif isinstance(node, ast.Call):
                yield from self._called(node)
            elif isinstance(node, ast.Attribute | ast.Subscript | ast.Name):
                loads = isinstance(node.ctx, ast.Load)
                yield from self._used(node) if loads or isinstance(node, ast.Name) else self._stored(node)

    def _bind(self, node: ast.Assign | ast.AnnAssign | ast.NamedExpr | ast.For | ast.comprehension) -> None:
        """Keep what a name is bound to, if that is part of an argument."""
        iterates = isinstance(node, ast.For | ast.comprehension)
        value = node.iter if isinstance(node, ast.For | ast.comprehension) else node.value
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name) and value is not None and (paths := self._paths(value)):
                self.known.setdefault(target.id, set()).update(map(_element, paths) if iterates else paths)

    def _paths(self, node: ast.AST) -> set[Path]:
        """Return what an expression stands for."""
        if isinstance(node, ast.Name):
            return set(self.known.get(node.id, ()))
        if isinstance(node, ast.NamedExpr):
            return self._paths(node.value)
        if isinstance(node, ast.Attribute):
            return {(*path, node.attr) for path in self._paths(node.value)}
        if isinstance(node, ast.Subscript):
            key = node.slice.value if isinstance(node.slice, ast.Constant) else f"[{ast.unparse(node.slice)}]"
            return {_entry(path, key) for path in self._paths(node.value)}
        if isinstance(node, ast.Call):  # getattr(self, "a"), request.get("a")
            held, name = ast.unparse(node.func), next((one for one in node.args if isinstance(one, ast.Constant)), None)
            of = node.args[0] if held == "getattr" else getattr(node.func, "value", node.func)
            if name is not None and (held == "getattr" or held.endswith(".get")):
                return {(*path, str(name.value)) for path in self._paths(of)}
        return set()

    def _stored(self, node: ast.Attribute | ast.Subscript) -> Iterator[str]:
        """Yield what an assignment or deletion changes; an entry of a local list or mapping is nobody's."""
        if paths := self._paths(node):
            yield from map(_written, paths)
        elif isinstance(node, ast.Attribute) or not self._is_own(node):
            yield ast.unparse(node if isinstance(node, ast.Attribute) else node.value)

    def _is_own(self, node: ast.AST) -> bool:
        """Return whether an expression is a part of a local name, of a constant, or of what a call has returned."""
        while isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        return not isinstance(node, ast.Name) or node.id in self.locals

    def _called(self, node: ast.Call) -> Iterator[str]:
        paths = self._paths(node.func) if isinstance(node.func, ast.Attribute) else set()
        yield from filter(None, map(_call, paths))
        name = ast.unparse(node.func)
        plain = hasattr(builtins, name) and name not in WRITING
        if not paths and not plain and not self._is_own(node.func):
            yield f"{name}()"

    def _used(self, node: ast.Attribute | ast.Subscript | ast.Name) -> Iterator[str]:
        """Yield an entry, a batch or the runner that goes where it may be written: all but plain reads."""
        parent = self.parents[node]
        if isinstance(parent, ast.Attribute | ast.Subscript) and parent.value is node:
            return  # a part of the name
        for path in self._paths(node) if isinstance(node.ctx, ast.Load) else ():
            held = path == ("self",) or (path[0] == "self" and path[1] in BATCHES)
            if held and not self._is_read(node, parent, whole=len(path) < 3):
                yield _written(path)

    def _is_read(self, node: ast.AST, parent: ast.AST, whole: bool) -> bool:
        if isinstance(parent, ast.Call):
            name = ast.unparse(parent.func)
            return parent.func is node or (hasattr(builtins, name) and name not in WRITING | PASSING)
        if isinstance(parent, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
            targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
            return all(isinstance(one, ast.Name) or not whole for one in targets)  # kept elsewhere: no alias
        while isinstance(parent, ast.BoolOp):  # gives one of its parts
            node, parent = parent, self.parents[parent]
        return isinstance(parent, TESTS) or (isinstance(parent, ast.IfExp) and parent.test is node)


def _entry(path: Path, key: object) -> Path:
    return (*path, str(key)) if len(path) == 2 and path[1] in BATCHES else _element(path)


def _element(path: Path) -> Path:
    """Return what one element of a list is: a request, or a part of the same name."""
    return ("request",) if path[0] == "req_dicts" else path


def _written(path: Path) -> str:
    of_batch = path[0] == "self" and len(path) > 2 and path[1] in BATCHES
    return f"{path[1]}.{path[2]}" if of_batch else ".".join(path)


def _call(path: Path) -> str:
    """Return the name of a call, "" for one that reads."""
    of_entry = path[0] == "self" and len(path) > 3 and path[1] in BATCHES
    if path[-1] in READS and (of_entry or path[0] != "self"):
        return ""
    return _written(path) if of_entry else f"{_written(path)}()"
