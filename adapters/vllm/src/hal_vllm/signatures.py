"""What vLLM must look like: the classes, methods and kernels that hal stands in for, compared by inspection.

Compared with vLLM 0.24.0 and 0.32.0 (2026-11-29). What looks otherwise is refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from hal_core import Unavailable

from .buffers import CLASSES
from .launching import REGISTRY
from .settings import Settings

TESTED = ("0.24.0", "0.32.0")
OPTIONAL = {"FusedStagedWriter"}
"""Classes that an earlier vLLM lacks."""
CURE = "use vLLM 0.24 or 0.32, or set HAL_VLLM_UNTESTED=1 once hal vllm check finds the same bytes"


def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a function's parameters, each with its default as text; without ``**``.

    A kernel of Triton's has ``arg_names``, and a registered one in its place too.
    """
    inner = getattr(function, "fn", None) or getattr(function, "func", None) or function
    found = inspect.signature(inner).parameters.values()
    return tuple(
        one.name if one.default is one.empty else f"{one.name}={one.default!r}"
        for one in found
        if one.kind is not one.VAR_KEYWORD
    )


def methods(cls: type[Any]) -> dict[str, tuple[str, ...]]:
    """Return the public methods of a class and its ``__init__``, with their parameters."""
    return {
        name: parameters(function)
        for name, function in vars(cls).items()
        if inspect.isfunction(function) and (name == "__init__" or not name.startswith("_"))
    }


def differences_of_class(name: str, theirs: type[Any]) -> list[str]:
    """Return what a class of vLLM's has that hal's does not stand in for, a line each."""
    own, found = methods(CLASSES[name]), methods(theirs)
    lines = [f"{name}.{method}: hal has none" for method in sorted(found.keys() - own.keys())]
    lines += [f"{name}.{method}: vLLM has none" for method in sorted(own.keys() - found.keys())]
    for method in sorted(own.keys() & found.keys()):
        if own[method] != found[method]:
            lines.append(f"{name}.{method}({', '.join(found[method])}): hal knows ({', '.join(own[method])})")
    return lines


def differences_of_function(name: str, theirs: Callable[..., Any], ours: Callable[..., Any]) -> list[str]:
    """Return how the parameters of a kernel or method differ from those of hal's in its place, as a line or none."""
    found, known = parameters(theirs), parameters(ours)
    return [] if found == known else [f"{name}({', '.join(found)}): hal knows ({', '.join(known)})"]


def compare_classes(owner: object) -> tuple[dict[str, type[Any]], list[str]]:
    """Return vLLM's classes in its module of buffers that hal has, and how they differ."""
    found: dict[str, type[Any]] = {name: vars(owner)[name] for name in CLASSES if name in vars(owner)}
    lines = [f"{name}: vLLM has none" for name in CLASSES if name not in found and name not in OPTIONAL]
    for name, cls in found.items():
        lines += differences_of_class(name, cls)
    return found, lines


def compare_functions(
    known: Mapping[str, Callable[..., Any]], others: Iterable[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Return vLLM's kernels and functions of these qualified names, and how those that are ``known`` differ. What
    another registered in a kernel's place, and ``others``, are not compared.

    :raises Unavailable: if vLLM registers no kernels.
    """
    if find_spec(REGISTRY) is None:
        what = "hal's kernels need vLLM's register_kernels, which this version lacks"
        raise Unavailable(what, cure="install Triton, or vLLM 0.32")
    override, found, lines = import_module(REGISTRY).KernelOverride, {}, []
    for name in {**known, **dict.fromkeys(others)}:
        owner, own = owner_of(name)
        theirs = getattr(owner, own, None)
        if theirs is None:
            lines.append(f"{name}: vLLM has none")
            continue
        found[name] = theirs
        if name in known and not isinstance(theirs, override):
            lines += differences_of_function(own, theirs, known[name])
    return found, lines


def owner_of(name: str) -> tuple[Any, str]:
    """Return the module or class of vLLM's that has a qualified name, and the name in it."""
    module, _, own = name.rpartition(".")
    outer, _, last = module.rpartition(".")
    return (getattr(import_module(outer), last) if last[0].isupper() else import_module(module)), own


def check_known(lines: list[str], settings: Settings, version: str) -> None:
    """Raise :class:`Unavailable` for differences, unless ``HAL_VLLM_UNTESTED=1``."""
    if lines and not settings.untested:
        raise Unavailable(f"vLLM {version} differs from what hal stands in for: {'; '.join(lines)}", cure=CURE)


def check_unreplaced(owner: str, names: Mapping[str, Any]) -> None:
    """Raise :class:`Unavailable` if one of a module's classes was made elsewhere: another plugin replaced it."""
    for name, found in names.items():
        if found.__module__ != owner:
            what = f"{owner}.{name} is {found.__module__}.{found.__qualname__} already"
            raise Unavailable(what, cure="let one plugin replace it: set VLLM_PLUGINS, or HAL_VLLM=off")
