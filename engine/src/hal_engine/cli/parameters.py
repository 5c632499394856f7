"""Parameters of a command, made from the descriptions of options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, get_type_hints

import msgspec
import typer


def parameters(kind: type[msgspec.Struct], variables: str = "") -> dict[str, inspect.Parameter]:
    """Return typer's parameters of the options of ``kind``, by the name of their field.

    ``variables``: what the environment variables of all options begin with, which give them too; "" for none.
    """
    defaults = {one.name: one.default for one in msgspec.structs.fields(kind)}
    found = described(kind)
    return {name: _parameter(name, defaults[name], *found[name], variables) for name in found}


def read(kind: type[msgspec.Struct], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the options of ``kind`` among what a command line has. Raises
    :class:`hal_core.InvalidValue`, naming the option, for a text that cannot be read."""
    reads = {name: (meta.extra or {})["read"] for name, (_, meta) in described(kind).items() if name in given}
    return {name: given[name] if change is None else change(given[name]) for name, change in reads.items()}


def set_parameters(command: Callable[..., object], made: Mapping[str, inspect.Parameter], first: Sequence[str]) -> None:
    """Give a command its parameters, those of ``first`` before the others, in place of its own ``**options``."""
    own = {
        name: one
        for name, one in inspect.signature(command, eval_str=True).parameters.items()
        if one.kind is not inspect.Parameter.VAR_KEYWORD
    }
    found = {name: one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for name, one in own.items()} | dict(made)
    order = [*first, *(name for name in found if name not in first)]
    command.__signature__ = inspect.Signature([found[name] for name in order])  # type: ignore[attr-defined]
    command.__annotations__ = {name: found[name].annotation for name in order}


def described(kind: type[msgspec.Struct]) -> dict[str, tuple[Any, msgspec.Meta]]:
    """Return the type and description of each field that is an option, those of a base after its own."""
    found, hints = {}, get_type_hints(kind, include_extras=True)
    for name in [*kind.__annotations__, *hints]:
        hint = hints[name]
        for meta in getattr(hint, "__metadata__", ()):
            if isinstance(meta, msgspec.Meta) and meta.extra is not None:
                found[name] = hint.__origin__, meta
    return found


def variable_of(name: str, meta: msgspec.Meta, variables: str) -> str:
    """Return the environment variable of an option: its own, else ``variables`` with its name; "" for none."""
    return str((meta.extra or {})["variable"]) or (f"{variables}{name.upper()}" if variables else "")


def _parameter(
    name: str,
    default: object,
    kind: Any,  # noqa: ANN401 (a type)
    meta: msgspec.Meta,
    variables: str,
) -> inspect.Parameter:
    extra = meta.extra or {}
    info = typer.Option(
        *(extra["names"] or [f"--{name.replace('_', '-')}"]),
        help=meta.description,
        metavar=extra["value"] or None,
        rich_help_panel=extra["panel"] or None,
        envvar=variable_of(name, meta, variables) or None,
    )
    shown = None if extra["read"] is not None or default is msgspec.NODEFAULT else default
    kind = extra["typed"] or kind
    annotation = Annotated[kind, info]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=shown, annotation=annotation)


def was_given(ctx: typer.Context, name: str) -> bool:
    """Return whether a parameter was given on the command line."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
