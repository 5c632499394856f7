"""Strategies for declared fields, and for what requests bring for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from hal_core.errors import InvalidValue
from hal_core.memory.dtypes import DTYPES
from hal_core.slots.admission import Request
from hal_core.slots.declared import StateField
from hal_core.slots.fields import StateConfig
from hypothesis import strategies as st

from ..kit import Draw
from ..opening import attribute


def declared_at(path: str) -> tuple[StateField, ...]:
    """The fields at ``module:attribute``. Raises :class:`InvalidValue`."""
    found = attribute(path, "--fields")
    if not isinstance(found, list | tuple) or not found or not all(isinstance(one, StateField) for one in found):
        raise InvalidValue(f"{path!r} is no list of StateField", cure="name the worker's list", argument="--fields")
    return tuple(found)


WIDTHS: tuple[int | str, ...] = (1, 1, 2, 5, "max_blocks", "max_accept")
GROUPS = ("", "step_input", "output", "output_topk", "broadcast", "step_input output")


def number(dtype: str) -> st.SearchStrategy[Any]:
    """A value that the type holds."""
    if dtype == "bool":
        return st.booleans()
    return st.integers(0, 100) if "int" in dtype else st.sampled_from([0.0, 0.5, -2.0, 96.0])


def of_request(dtype: str, row: bool) -> Callable[[Request], object]:
    """A function of the request that gives a value of the type."""

    def length(request: Request) -> Any:  # noqa: ANN401 (a number of the type, or a row of one)
        found: Any = len(request.prompt) % 2 == 1 if dtype == "bool" else len(request.prompt) % 100
        return [found] if row else found

    return length


def draw_fields(draw: Draw, *, most: int = 4, groups: Sequence[str] = GROUPS) -> list[StateField]:
    """Some fields, which differ in type, width, place and in where their values come from."""
    count = draw(st.integers(1, most), "declared fields")
    return [_draw_field(draw, f"field_{at}", groups) for at in range(count)]


def _draw_field(draw: Draw, name: str, groups: Sequence[str]) -> StateField:
    dtype = draw(st.sampled_from(DTYPES), f"type of {name}").name
    width = draw(st.sampled_from(WIDTHS), f"width of {name}")
    source: Literal["extra", "function"] | None = draw(
        st.sampled_from(["extra", "function", None]), f"source of {name}"
    )
    return StateField(
        name,
        dtype,
        width,
        reset=draw(number(dtype), f"reset value of {name}"),
        groups=draw(st.sampled_from(groups), f"groups of {name}"),
        value=of_request(dtype, width != 1) if source == "function" else source,
        kept=draw(st.booleans(), f"{name} is kept"),
    )


def width_of(field: StateField, size: StateConfig) -> int:
    """Elements a slot."""
    return int(getattr(size, field.width)) if isinstance(field.width, str) else field.width


def draw_extra(draw: Draw, fields: Sequence[StateField], size: StateConfig) -> dict[str, Any]:
    """What a request brings: a number, or a row of at most the field's width."""
    found: dict[str, Any] = {}
    for field in fields:
        one = number(field.dtype)
        row = st.lists(one, max_size=width_of(field, size))
        found[field.name] = draw(one if field.width == 1 else row, f"value of {field.name}")
    return found
