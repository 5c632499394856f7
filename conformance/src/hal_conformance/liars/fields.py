"""Liars about declared fields, which a worker adds to the slot table, and about fields that a slot keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
from hal_core.devices.base import plan_value
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import ByteRange
from hal_core.slots.fields import STATE_TABLE
from hal_core.slots.host_table import BLOCKS
from hal_core.slots.tasks import TaskKind

from .rows import Call, How, first, register, row, then

KNOWN = frozenset(field.name for field in STATE_TABLE)

# -- values that a request brings --------------------------------------------------------------------------------------


def stretch(call: Call) -> None:
    for place in call.places:
        field = place.field
        if place.width == 1:
            continue
        if values := call.request.extra[field.name] if field.source == "extra" else field.source(call.request):
            begin, rest = call.at[field.name] + len(values), place.width - len(values)
            call.numbers[begin : begin + rest] = [call.numbers[begin - 1]] * rest


def begin_elsewhere(call: Call) -> None:
    for name in call.at.keys() - KNOWN - {place.field.name for place in call.places}:
        call.numbers[call.at[name]] = 0 if call.numbers[call.at[name]] else 1


def call_once(call: Call) -> object:
    known = call.kept("first", {})
    kept = [
        replace(place, field=replace(place.field, source=lambda _, value=value: value))
        for place in call.places
        if callable(source := place.field.source)
        for value in [known.setdefault(source, source(call.request))]
    ]
    return call(places=[place for place in call.places if not callable(place.field.source)] + kept)


def low_words(call: Call) -> None:
    for place in call.places:
        if place.field.dtype.name == "int64":
            begin = call.at[place.field.name]
            numbers = call.numbers[begin : begin + place.width]
            call.numbers[begin : begin + place.width] = [(number + 2**31) % 2**32 - 2**31 for number in numbers]


def count_each(call: Call) -> None:
    call.me.count("submissions", len(call.state.layout.fields.keys() - KNOWN))


def reset_kept(call: Call) -> None:
    for place in call.state.layout.fields.values():
        if place.field.kept:
            call.writes.reset(place, call.slots)


def moved(group: str, to: str) -> How:
    """Return a lie about the table: the declared fields of a group lie outside it."""

    def lie(call: Call) -> object:
        groups = [" ".join([to if one == group else one for one in field.groups.split()]) for field in call.fields]
        return call(fields=[replace(field, groups=of) for field, of in zip(call.fields, groups, strict=True)])

    return lie


def mute(call: Call) -> object:
    fields = [one if call.stepped or not callable(one.value) else replace(one, value=None) for one in call.fields]
    return call(fields=fields)


def terms(change: Callable[[Any], Iterable[tuple[str, Any]]]) -> How:
    """Return a lie about the terms that ranks compare: those of a state with the fields ``change(state)``."""

    def lie(call: Call) -> object:
        state = call.state
        layout = replace(state.layout, fields=MappingProxyType(dict(change(state))))
        return call(
            state=SimpleNamespace(
                layout=layout, broadcast_range=state.broadcast_range, name=state.name, sizes=state.sizes
            )
        )

    return lie


def untyped(alike: Callable[[Any, int], bool]) -> How:
    """Return a lie: ranks compare the bytes, and not the type, of the fields where ``alike(state, offset)``."""

    def unsigned(place: Any) -> Any:  # noqa: ANN401 (a field's place)
        return replace(place, field=replace(place.field, dtype=dtype_of(f"uint{8 * place.field.dtype.itemsize}")))

    return terms(
        lambda state: [
            (name, unsigned(place) if alike(state, place.offset) else place)
            for name, place in state.layout.fields.items()
        ]
    )


def outside_the_slice(state: Any, offset: int) -> bool:  # noqa: ANN401 (a state of slots)
    part = state.broadcast_range()
    return not part.offset <= offset < part.end


VALUES, LEAVING, TERMS = "values of declared fields", "leaving of slots", "terms of a group"
TABLE_OF = "table of declared fields"
DECLARED = {
    "a declared field keeps its reset value, whatever the request brings": row(
        "ForgetsDeclared", 9, VALUES, lambda call: None
    ),  # an admission that knows the parameters of sampling alone
    "a row of a declared field is written up to its width, the rest with its last value": row(
        "StretchesRows", 9, VALUES, then(stretch)
    ),  # a row that is filled instead of reset behind the request's values
    "a field of the step alone does not begin with its reset value": row(
        "StepFieldsBeginElsewhere", 9, VALUES, then(begin_elsewhere)
    ),  # a counter that entering leaves to the first step, which finds another number there
    "the function of a declared field is called for the first request alone": row(
        "CallsFunctionsOnce", 9, VALUES, call_once
    ),  # a value that is taken for a constant
    "values of declared int64 fields are int32": row(
        "DeclaredLongsAreInts", 9, VALUES, then(low_words)
    ),  # the packed record of a request was written with ``int``
    "each declared field is a submission of its own": row(
        "DeclaredApart", 10, "insert_tasks", first(count_each), "fused_scatter"
    ),  # fields that are written one by one after the record
    "leaving resets a kept field": row(
        "ResetsKept", 11, LEAVING, first(reset_kept)
    ),  # the whole empty record is written, kept fields included
    "leaving resets nothing where one field is kept": row(
        "KeepsAll", 11, LEAVING, lambda call: call.records if call.state.layout.keeps else call()
    ),  # one kept field keeps its neighbours
    "a declared field of a step's input is not copied out with it": row(
        "LeftOutOfTheInput", 9, TABLE_OF, moved("step_input", "")
    ),  # a step reads the fields of the slot table alone
    "a declared field of the log-probabilities is not copied out with them": row(
        "LeftOutOfTheAlternatives", 9, TABLE_OF, moved("output_topk", "step_input")
    ),
    "a declared field of the output is not copied out with it": row(
        "LeftOutOfTheOutput", 12, TABLE_OF, moved("output", "step_input")
    ),
    "a declared field of broadcast is left out of the slice": row(
        "LeftOutOfTheSlice", 13, TABLE_OF, moved("broadcast", "output")
    ),  # each rank keeps its own value
    "a companion's own fields have reset values where their functions give others": row(
        "CompanionsFunctionsUncalled", 9, TABLE_OF, mute
    ),  # a companion's table of which only what requests bring is looked at
    "ranks compare no declared fields": row(
        "DeclaredUncompared",
        14,
        TERMS,
        terms(lambda state: [pair for pair in state.layout.fields.items() if pair[0] in KNOWN]),
        "several_ranks",
    ),  # terms of the slot table alone
    "ranks compare sizes and places, and no element types": row(
        "SizesAreCompared", 14, TERMS, untyped(lambda state, offset: True), "several_ranks"
    ),  # a digest of offsets and bytes
    "ranks compare the element types of the fields that they broadcast alone": row(
        "OtherTypesLeftOut", 14, TERMS, untyped(outside_the_slice), "several_ranks"
    ),  # the parameters of sampling differ
}
register(__name__, DECLARED)

# -- what an insertion writes and books --------------------------------------------------------------------------------


def keeping(name: str) -> How:
    """Return a lie: an insertion leaves a field of the former request in its slots."""

    def lie(call: Call) -> object:
        view = call.state.view(name)
        copied = call.me.copy_out(
            call.state.memory, [ByteRange(view.offset, view.memory.nbytes - view.offset)], call.stream
        )
        copied.wait()
        call()
        values = np.ndarray(view.shape, view.dtype.storage, np.array(copied.data[0]), 0, view.strides)
        return call.me.submit(plan_value(view, np.ascontiguousarray(values)), call.stream)

    return lie


def one_draft_more(call: Call) -> None:
    place = call.state.layout.fields["draft_tokens"]
    for slot, drafts in zip(call.tasks.slots.tolist(), call.tasks.drafts, strict=True):
        if 0 < len(drafts) < place.width:
            at = place.offset + slot * place.stride + 8 * len(drafts)
            call.write(call.state.memory, (at, np.int64(drafts[0]).tobytes()))


def padding(call: Call) -> None:
    if 0 not in call.tasks.slots:
        place = call.state.layout.fields["seq_lens_this_time"]
        call.write(call.state.memory, (place.offset, np.int32(9).tobytes()))


class BooksBlocksAsHeld:
    """A twin of a state's table that books all but the length that more blocks have written."""

    def __init__(self, table: Any) -> None:  # noqa: ANN401
        self.table = table

    def sound(self, _: Any) -> bool:  # noqa: ANN401
        """Leave the checks to the core."""
        return False

    def commit(self, batch: Any) -> bool:  # noqa: ANN401
        """Book the batch."""
        lengths, self.table.twin = self.table.row_lengths[BLOCKS].copy(), None
        try:
            self.table.commit(batch)
        finally:
            self.table.twin = self
        for kind, slot in zip(batch.plain["kinds"], batch.plain["slots"], strict=True):
            if kind == TaskKind.MORE_BLOCKS:
                self.table.row_lengths[BLOCKS][slot] = lengths[slot]
        return True


def native_table(call: Call) -> None:
    call.state.host_table.twin = BooksBlocksAsHeld(call.state.host_table)


INSERTED = {
    "a stop reason survives its slot": row(
        "StopReasonSurvives", 11, "insert_tasks", keeping("stop_reason")
    ),  # the insertion kernel's list of fields has not this one
    "the count of accepted tokens survives its slot": row(
        "AcceptNumSurvives", 11, "insert_tasks", keeping("accept_num")
    ),
    "the first draft is written once too often, past the given length": row(
        "OneDraftMore", 12, "insert_tasks", then(one_draft_more), seen="FastDeploy"
    ),  # a copy loop with <= instead of <
    "a slot that no task names is changed: the padding of the batch goes to slot 0": row(
        "PaddingGoesToSlotZero", 9, "insert_tasks", then(padding)
    ),  # a kernel launched for a rounded-up batch, whose padding has slot 0
    "native booking counts more blocks as held, and not as written": row(
        "MoreBlocksAreNotBooked", 11, "register_state", then(native_table)
    ),  # the next request's row is then reset to the length that the first task had written
}
register(__name__, INSERTED)
