"""Options of a command from a TOML file: the fields of the structs from which its parameters are made."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from hal_core import InvalidValue

from .parameters import described

_CONFIG = "--config"


def read_config(path: str, kinds: Sequence[type[msgspec.Struct]]) -> dict[str, Any]:
    """Return the values of a file by field: ``max-waiting = 64`` or ``max_waiting = 64``; a list for an option that may
    be given several times, or one value.

    :raises InvalidValue: for a file that cannot be read, and for a name or a value that is no option's.
    """
    known = {name: found for kind in kinds for name, found in described(kind).items()}
    values: dict[str, Any] = {}
    for key, value in _loaded(path).items():
        if (name := key.replace("-", "_")) not in known:
            near = difflib.get_close_matches(name, known, 1)
            cure = f"did you mean {near[0].replace('_', '-')}?" if near else "its names are those of the options"
            raise InvalidValue(f"{path}: no option is called {key!r}", cure=cure, argument=_CONFIG)
        kind, meta = known[name]
        values[name] = _converted(f"{path}: {key}", value, (meta.extra or {})["typed"] or kind)
    return values


def _loaded(path: str) -> Mapping[str, Any]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise InvalidValue(f"{path}: {error.strerror}", cure="name a readable file", argument=_CONFIG) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidValue(
            f"{path}: {error}", cure="write NAME = VALUE, such as port = 8000", argument=_CONFIG
        ) from error


def _converted(where: str, value: Any, kind: Any) -> Any:  # noqa: ANN401 (what TOML has, and a type)
    several = "list[" in str(kind)
    try:
        return msgspec.convert([value] if several and not isinstance(value, list) else value, kind)
    except msgspec.ValidationError as error:
        what = str(error).partition(" - at ")[0]
        cure = "give such a value"
        raise InvalidValue(f"{where}: {what[:1].lower()}{what[1:]}", cure=cure, argument=_CONFIG) from None
