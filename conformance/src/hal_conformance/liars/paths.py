"""Liars of a path of insertions or outputs that no test took: several problems, long values, names and sinks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from hal_core import hookimpl
from hal_core.output.records import OutputRecord, SlotStatus

from . import Lie, Patch, liar
from .outputs import Told


@liar(8, "only the first problem of each task is listed")
class OneProblemATask(Patch):
    """The check of a task ends where it has failed."""

    seam = "check of a batch"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Leave out the others."""

        def check(*arguments: Any) -> list[str]:  # noqa: ANN401 (whatever the true one takes)
            first: dict[str, str] = {}
            for text in true(*arguments):
                first.setdefault(text.split(":")[0], text)
            return [*first.values()]

        return check


@liar(9, "values of declared int64 fields are int32")
class DeclaredLongsAreInts(Patch):
    """The packed record of a request was written with ``int``."""

    seam = "values of declared fields"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Keep the low word."""

        def fill(numbers: Any, at: Any, request: Any, places: Any) -> None:  # noqa: ANN401
            true(numbers, at, request, places)
            for place in places:
                if place.field.dtype.name == "int64":
                    begin = at[place.field.name]
                    words = [(number + 2**31) % 2**32 - 2**31 for number in numbers[begin : begin + place.width]]
                    numbers[begin : begin + place.width] = words

        return fill


@contextmanager
def _with_the_targets_lengths(state: Any) -> Iterator[None]:  # noqa: ANN401 (a state of slots)
    tables = [companion.host_table for companion in state.companions]
    own = [table.row_lengths for table in tables]
    for table in tables:
        table.row_lengths = state.host_table.row_lengths.copy()
    try:
        yield
    finally:
        for table, lengths in zip(tables, own, strict=True):
            table.row_lengths = lengths


@liar(11, "rows of a companion are reset to the lengths of the target's slots")
class TargetsLengths(Lie):
    """There was one table of lengths before there were companions."""

    @hookimpl
    def insert_tasks(self, device: Any, state: Any, tasks: Any, stream: Any) -> Any:  # noqa: ANN401
        """Plan with the target's table."""
        with _with_the_targets_lengths(state):
            return super().insert_tasks(device=device, state=state, tasks=tasks, stream=stream)  # type: ignore[misc]


@liar(12, "the host mirror is of the output that was read last, by the sink too")
class MirrorFollowsTheSink(Patch):
    """It is set where a record is made, which the worker does not do alone."""

    seam = "record of an output"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Set it with the record."""

        def resolve(ticket: Any, timeout: float | None = None) -> Any:  # noqa: ANN401 (the core's)
            made = ticket._record is None
            record = true(ticket, timeout)
            if made:
                ticket._state.mirror = {name: ticket.columns[name] for name in ticket._state.mirror}
            return record

        return resolve


@liar(19, "a preemption is not told of a request that goes on in the same frame")
class ToldUnderItsNameOnce(Told):
    """A frame has each name once, it is thought."""

    @classmethod
    def change(cls, record: OutputRecord) -> OutputRecord:
        """Leave the row out."""
        names = record.request_ids
        gone = [name for name, status in zip(names, record.status, strict=True) if status == SlotStatus.PREEMPTED]
        rows = np.array(
            [
                names.count(name) == 1 or name not in gone or status != SlotStatus.PREEMPTED
                for name, status in zip(names, record.status, strict=True)
            ],
            np.bool_,
        )
        if rows.all():
            return record
        arrays = {
            name: getattr(record, name)[rows] for name in ("status", "finish", "positions", "counts", "first_token")
        }
        kept = tuple(name for name, row in zip(names, rows, strict=True) if row)
        return replace(record, request_ids=kept, messages={}, **arrays)


@liar(21, "of the tokens of a row only the first is compared with the vocabulary")
class FirstTokensAreChecked(Patch):
    """As it was when a step gave one."""

    seam = "build of a record"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Hide the others behind a valid id."""

        def build(columns: Any, snapshot: Any) -> Any:  # noqa: ANN401 (as the true one)
            if "accept_tokens" not in columns or snapshot.step.logprobs is not None:
                return true(columns, snapshot)
            tokens = columns["accept_tokens"].copy()
            later = tokens[:, 1:]
            later[(later < 0) | (later >= snapshot.token_limit)] = 0
            return true(columns | {"accept_tokens": tokens}, snapshot)

        return build
