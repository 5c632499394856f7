"""Liars about declared fields, which a worker adds to the slot table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hal_core.slots.companions import _own_slots

from . import Patch, liar


@liar(9, "a declared field keeps its reset value, whatever the request brings")
class ForgetsDeclared(Patch):
    """An admission that knows the parameters of sampling alone."""

    seam = "values of declared fields"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Nothing is filled in."""
        return lambda numbers, at, request, places: None


@liar(9, "a row of a declared field is written up to its width, the rest with its last value")
class StretchesRows(Patch):
    """A row that is filled instead of reset behind the request's values."""

    seam = "values of declared fields"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Repeat the last element."""

        def fill(numbers: Any, at: Any, request: Any, places: Any) -> None:  # noqa: ANN401
            true(numbers, at, request, places)
            for place in places:
                if place.width > 1 and (values := _values(place.field, request)):
                    begin = at[place.field.name] + len(values)
                    rest = place.width - len(values)
                    numbers[begin : begin + rest] = [numbers[begin - 1]] * rest

        return fill


def _values(field: Any, request: Any) -> Any:  # noqa: ANN401 (a row)
    return request.extra[field.name] if field.source == "extra" else field.source(request)


@liar(11, "leaving resets a kept field")
class ResetsKept(Patch):
    """The whole empty record is written, kept fields included."""

    seam = "leaving of slots"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Reset kept fields too."""

        def reset(state: Any, writes: Any, records: Any, slots: Any) -> Any:  # noqa: ANN401
            for place in state.layout.fields.values():
                if place.field.kept:
                    writes.reset(place, slots)
            return true(state, writes, records, slots)

        return reset


@liar(11, "leaving resets nothing where one field is kept")
class KeepsAll(Patch):
    """One kept field keeps its neighbours."""

    seam = "leaving of slots"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Leave the slot as it is."""
        return lambda state, writes, records, slots: (
            records if state.layout.keeps else true(state, writes, records, slots)
        )


def _moved(true: Callable[..., Any], group: str, to: str) -> Callable[..., Any]:
    """A table in which the declared fields of a group lie outside it."""

    def table(sizes: Any, fields: Any, *, stepped: bool = True) -> Any:  # noqa: ANN401
        places = [" ".join([to if one == group else one for one in field.groups.split()]) for field in fields]
        moved = [replace(field, groups=groups) for field, groups in zip(fields, places, strict=True)]
        return true(sizes, moved, stepped=stepped)

    return table


@liar(12, "a declared field of the output is not copied out with it")
class LeftOutOfTheOutput(Patch):
    """The output's copy has the fields of the slot table alone."""

    seam = "table of declared fields"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Place it where steps read."""
        return _moved(true, "output", "step_input")


@liar(13, "a declared field of broadcast is left out of the slice")
class LeftOutOfTheSlice(Patch):
    """Each rank keeps its own value."""

    seam = "table of declared fields"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Place it with the output."""
        return _moved(true, "broadcast", "output")


@liar(9, "a companion declared with the target's slots has slots of its own")
class OwnSlotsAllTheSame(Patch):
    """The declaration is not looked at."""

    seam = "plan of a companion's tasks"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Choose slots."""

        def beside(companion: Any, tasks: Any) -> Any:  # noqa: ANN401
            honest = true(companion, tasks)
            if not companion.same_slots or honest.plain["slots"] == (own := _own_slots(companion, tasks)):
                return honest
            return honest.moved(own, honest.requests)

        return beside
