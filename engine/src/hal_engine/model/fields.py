"""Typed access to the fields of a checkpoint's JSON files; errors name file and field."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from hal_core import InvalidValue

from hal_engine.model.files import check_regular, read_file

SUPPORTED = "this decoder supports Llama-, Mistral-, Qwen2- and Qwen3-style checkpoints; others need a --runner"
"""The cure for features that the decoder does not implement."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``; ``InvalidValue`` names the path if there is none."""
    check_regular(path)
    try:
        content = json.loads(read_file(path))
    except FileNotFoundError:
        raise InvalidValue("no such file", cure="a checkpoint directory needs it", argument=str(path)) from None
    except InvalidValue:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidValue(f"cannot be read: {error}", cure="restore the file", argument=str(path)) from None
    if not isinstance(content, dict):
        raise InvalidValue("is not a JSON object", cure="restore the file", argument=str(path))
    return content


_Value = TypeVar("_Value", int, float, bool)


class Fields:
    """Typed access to the fields of one file; records which were read, and names file and field in errors."""

    def __init__(self, fields: Mapping[str, Any], source: str) -> None:
        # A null field has no value, so it counts as absent.
        self.given = {name: value for name, value in fields.items() if value is not None}
        self.null = frozenset(name for name, value in fields.items() if value is None)
        """Fields that are null: null also removes an absent field's default."""
        self.source = source
        self.read: set[str] = set()
        self.idle: set[str] = set()
        """Fields without effect that deserve a note."""

    def __contains__(self, name: str) -> bool:
        return name in self.given

    def get(self, name: str) -> Any:  # noqa: ANN401 - whatever JSON can hold
        self.read.add(name)
        return self.given.get(name)

    def says(self, name: str, allowed: tuple[Any, ...]) -> bool:
        """Return whether the field has one of these values, or is absent."""
        return name not in self.given or self.given[name] in allowed

    def shown(self, name: str) -> str:
        """Return the field's value, cut to fit a line."""
        shown = repr(self.given[name]) if name in self.given else "absent"
        return shown if len(shown) <= 80 else shown[:77] + "..."

    def refuse(self, name: str, why: str, cure: str = "correct the field") -> NoReturn:
        """Raise ``InvalidValue`` with the file, the field, its value and the reason."""
        raise InvalidValue(f"{self.shown(name)}: {why}", cure=cure, argument=f"{self.source}: {name}")

    def _value(self, name: str, default: _Value | None, accept: Callable[[Any], bool], kind: str) -> _Value:
        value = self.get(name)
        if value is None:
            if default is None:
                self.refuse(name, f"{kind} is required")
            return default
        if not accept(value):
            self.refuse(name, f"must be {kind}")
        return value  # type: ignore[no-any-return]  # accept has just proved it

    def count(self, name: str, *, default: int | None = None, least: int = 1) -> int:
        kind = f"a whole number from {least} to {2**31 - 1}"
        return int(self._value(name, default, lambda v: type(v) is int and least <= v < 2**31, kind))

    def number(self, name: str, *, default: float | None = None) -> float:
        def accept(value: object) -> bool:
            return isinstance(value, int | float) and type(value) is not bool and math.isfinite(value) and value > 0

        return float(self._value(name, default, accept, "a finite number above 0"))

    def flag(self, name: str, *, default: bool) -> bool:
        return bool(self._value(name, default, lambda v: type(v) is bool, "true or false"))

    def token_ids(self, name: str, vocab: int) -> tuple[int, ...]:
        value = self.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(token) is int and 0 <= token < vocab for token in ids):
            self.refuse(name, f"must be a token id below vocab_size={vocab}, or a list of them")
        return tuple(ids)
