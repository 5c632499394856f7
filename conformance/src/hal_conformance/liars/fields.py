"""Liars about declared fields, which a worker adds to the slot table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from hal_core.contract.markers import hookimpl
from hal_core.slots.companions import _own_slots
from hal_core.slots.fields import STATE_TABLE
from hal_core.tickets import Ticket

from . import Lie, Patch, liar

if TYPE_CHECKING:
    from hal_core.contract.device import Device
    from hal_core.group import Group
    from hal_core.slots.state import SlotState
    from hal_core.slots.tasks import TaskBatch
    from hal_core.streams import Stream


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


@liar(9, "a field of the step alone does not begin with its reset value")
class StepFieldsBeginElsewhere(Patch):
    """A counter that entering leaves to the first step, which finds another number there."""

    seam = "values of declared fields"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Write 0 for another reset value, 1 for 0."""
        known = {field.name for field in STATE_TABLE}

        def fill(numbers: Any, at: Any, request: Any, places: Any) -> None:  # noqa: ANN401
            true(numbers, at, request, places)
            for name in at.keys() - known - {place.field.name for place in places}:
                numbers[at[name]] = 0 if numbers[at[name]] else 1

        return fill


@liar(9, "the function of a declared field is called for the first request alone")
class CallsFunctionsOnce(Patch):
    """A value that is taken for a constant."""

    seam = "values of declared fields"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Give every request what the first one got."""
        first: dict[Any, Any] = {}

        def fill(numbers: Any, at: Any, request: Any, places: Any) -> None:  # noqa: ANN401
            kept = [
                replace(place, field=replace(place.field, source=lambda _, value=value: value))
                for place in places
                if callable(source := place.field.source)
                for value in [first.setdefault(source, source(request))]
            ]
            true(numbers, at, request, [place for place in places if not callable(place.field.source)] + kept)

        return fill


@liar(10, "each declared field is a submission of its own", requires="fused_scatter")
class DeclaredApart(Lie):
    """Fields that are written one by one after the record."""

    @hookimpl
    def insert_tasks(self, device: Device, state: SlotState, tasks: TaskBatch, stream: Stream) -> Ticket:
        """Insert, and count as such a loop would."""
        known = {field.name for field in STATE_TABLE}
        self.count("submissions", len(state.layout.fields.keys() - known))  # type: ignore[attr-defined]
        return super().insert_tasks(device, state, tasks, stream)  # type: ignore[misc,no-any-return]


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


@liar(9, "a declared field of a step's input is not copied out with it")
class LeftOutOfTheInput(Patch):
    """A step reads the fields of the slot table alone."""

    seam = "table of declared fields"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Place it where no step reads."""
        return _moved(true, "step_input", "")


@liar(9, "a declared field of the log-probabilities is not copied out with them")
class LeftOutOfTheAlternatives(Patch):
    """The output with log-probabilities has the fields of the slot table alone."""

    seam = "table of declared fields"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Place it where no output is."""
        return _moved(true, "output_topk", "step_input")


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


@liar(9, "a companion's own fields have reset values where their functions give others")
class CompanionsFunctionsUncalled(Patch):
    """A companion's table of which only what requests bring is looked at."""

    seam = "table of declared fields"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Take the functions away from the companion's fields."""

        def table(sizes: Any, fields: Any, *, stepped: bool = True) -> Any:  # noqa: ANN401
            mute = [one if stepped or not callable(one.value) else replace(one, value=None) for one in fields]
            return true(sizes, mute, stepped=stepped)

        return table


@liar(14, "ranks compare no declared fields", requires="several_ranks")
class DeclaredUncompared(Patch):
    """Terms of the slot table alone."""

    seam = "terms of a group"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Give the terms of a state without them."""
        known = {field.name for field in STATE_TABLE}

        def terms(state: SlotState, group: Group) -> Any:  # noqa: ANN401 (the core's)
            plain = {name: place for name, place in state.layout.fields.items() if name in known}
            layout = replace(state.layout, fields=MappingProxyType(plain))
            told = SimpleNamespace(
                layout=layout, broadcast_range=state.broadcast_range, name=state.name, sizes=state.sizes
            )
            return true(told, group)

        return terms


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
