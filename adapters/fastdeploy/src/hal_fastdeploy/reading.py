"""The effects of a function of FastDeploy's on its runner, read from its source: names written, set and called.

``share_inputs.top_p``: an entry of a batch is written, or passed to a call that may write it. ``self.pooling_params``,
``request.schemata_key``: an attribute is set. ``self.sampler.apply_logits_processor()``, ``np.array()``: a call. A
computed key is given as it is written. Where that is unknown, a name counts as written.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

from hal_core import Unavailable

Path = tuple[str, ...]
BATCHES = ("share_inputs", "model_inputs", "target_model_inputs")
READS = frozenset(("clone", "cpu", "get", "item", "numpy", "tolist"))  # methods of an entry, or of a request
WRITING = frozenset(("__import__", "compile", "delattr", "eval", "exec", "globals", "setattr", "super", "vars"))
PASSING = frozenset(("enumerate", "filter", "iter", "list", "map", "next", "reversed", "sorted", "tuple", "zip"))
WRITERS = frozenset(("async_set_value", "np.copyto", "np.place", "np.put", "np.putmask"))  # into the first argument
TESTS = (ast.Compare, ast.UnaryOp, ast.BinOp, ast.If, ast.While, ast.Assert, ast.FormattedValue, ast.Subscript)


@lru_cache(maxsize=64)
def names_of(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names. The function's first argument is the runner, or the proposer; the second has the requests.

    :raises Unavailable: if there is no source.
    """
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body
        if not isinstance(tree, ast.FunctionDef):
            raise TypeError("it is no def")
    except (OSError, TypeError, SyntaxError) as error:
        what = f"the source of {getattr(function, '__qualname__', function)} cannot be read: {error}"
        raise Unavailable(what, cure="install FastDeploy with its Python sources", argument="FD_PLUGINS") from error
    return frozenset(_Reader(tree).names())


class _Reader:
    """One function. ``known``: the values of local names, as paths from an argument; a name may have several."""

    def __init__(self, tree: ast.FunctionDef) -> None:
        self.nodes = [*ast.walk(tree)]
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        arguments = [one.arg for one in (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)]
        roles = dict(zip(arguments, ("self", "req_dicts"), strict=False))
        self.known: dict[str, set[Path]] = {name: {(roles.get(name, name),)} for name in arguments}
        self.locals = {node.id for node in self.nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        self.locals |= {node.arg for node in self.nodes if isinstance(node, ast.arg)}
        self.locals |= {node.name for node in self.nodes[1:] if isinstance(node, ast.FunctionDef)}
        for node in self.nodes * 3:  # a name may have the value of another one
            for field in ("value", "iter", "context_expr"):
                if (value := getattr(node, field, None)) and not isinstance(node, ast.AugAssign):
                    self._bind(node, value, iterates=field == "iter")

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

    def _bind(self, node: ast.AST, value: ast.AST, iterates: bool) -> None:
        """Keep what names are bound to, if that is part of an argument."""
        for target in ast.iter_child_nodes(node):
            if isinstance(getattr(target, "ctx", None), ast.Store):
                paths = self._all(getattr(value, "elts", [value]) if iterates or hasattr(target, "elts") else [value])
                for name in ast.walk(target):
                    if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store) and paths:
                        self.known.setdefault(name.id, set()).update(map(_element, paths) if iterates else paths)

    def _all(self, nodes: Iterable[ast.AST]) -> set[Path]:
        return {path for node in nodes for path in self._paths(node)}

    def _paths(self, node: ast.AST) -> set[Path]:
        """Return the paths that an expression may have."""
        if isinstance(node, ast.Name):
            return set(self.known.get(node.id, ()))
        if isinstance(node, ast.NamedExpr):
            return self._paths(node.value)
        if isinstance(node, ast.Attribute):
            return {(*path, node.attr) for path in self._paths(node.value)}
        if isinstance(node, ast.Subscript):
            held, key = self._paths(node.value), _key(node.slice)
            return {(*one, key) if len(one) == 2 and one[1] in BATCHES else _element(one) for one in held}
        if isinstance(node, ast.BoolOp | ast.IfExp):  # one of its parts
            return self._all(node.values if isinstance(node, ast.BoolOp) else (node.body, node.orelse))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in PASSING:
            return self._all(node.args)
        if isinstance(node, ast.Call):  # getattr(self, "a"), request.get("a")
            gets = isinstance(node.func, ast.Attribute) and node.func.attr == "get"
            given = [getattr(node.func, "value", node.func), *node.args] if gets else node.args
            if len(given) > 1 and (gets or ast.unparse(node.func) == "getattr"):
                return {(*path, _key(given[1])) for path in self._paths(given[0])}
        return set()

    def _stored(self, node: ast.Attribute | ast.Subscript) -> Iterator[str]:
        """Yield what an assignment or deletion changes; an entry of a local list or mapping does not count."""
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
        paths = self._paths(node.func)
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
        first = isinstance(parent, ast.Call) and node in parent.args[:1] and ast.unparse(parent.func) in WRITERS
        target = first or getattr(parent, "arg", "") == "tgt"
        for path in self._paths(node) if isinstance(node.ctx, ast.Load) else ():
            held = path == ("self",) or (path[0] == "self" and path[1] in BATCHES)
            if target or (held and not self._is_read(node, parent, direct=len(path) < 3)):
                yield _written(path)

    def _is_read(self, node: ast.AST, parent: ast.AST, direct: bool) -> bool:
        if isinstance(parent, ast.Call):
            name = ast.unparse(parent.func)
            return parent.func is node or (hasattr(builtins, name) and name not in WRITING | PASSING)
        if isinstance(parent, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
            targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
            return all(isinstance(one, ast.Name) or not direct for one in targets)  # kept elsewhere: no alias
        while isinstance(parent, ast.BoolOp):  # gives one of its parts
            node, parent = parent, self.parents[parent]
        return isinstance(parent, TESTS) or (isinstance(parent, ast.IfExp) and parent.test is node)


def _key(node: ast.AST) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else f"[{ast.unparse(node)}]"


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
