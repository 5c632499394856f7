"""Tasks in columns, the batch of ``insert_tasks``."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence, Sized
from itertools import accumulate, islice
from typing import Any

import numpy as np

from ..errors import InvalidValue
from . import gathering
from .admission import AdmittedRequest
from .fields import SplitRole
from .gathering import COLUMNS, NAMES, NativeColumns
from .layout import StateLayout
from .staying import more_of
from .task import ENTERING as ENTERING
from .task import LEAVING as LEAVING
from .task import Task as Task
from .task import TaskKind as TaskKind
from .whole import Ids, Int32s, block_ids, whole

Int64s = np.ndarray[Any, np.dtype[np.int64]]


class _Column:
    """A column of a batch: the array is made on first use, as small batches do without it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self.code = name, "q" if name == "first_tokens" else "i"

    def __get__(self, batch: TaskBatch, owner: type) -> Any:  # noqa: ANN401 (int32 or int64 [n])
        column = batch.arrays.get(self.name)
        if column is None:
            # Through an array of the standard library, which converts a list in half of NumPy's time.
            ints = batch._checked.get(self.name) or array(self.code, batch.plain[self.name])
            column = np.frombuffer(ints, self.code)
            column.flags.writeable = False
            batch.arrays[self.name] = column
        return column


class TaskBatch:
    """Tasks in columns, in order; immutable. ``TaskBatch.of(tasks)``, or ``TaskBatch.prefill(…)`` without objects.

    Columns of length n, int32 (``first_tokens`` int64): ``kinds``, ``slots``, ``num_computed_tokens``,
    ``num_scheduled_tokens``, ``first_blocks``, ``block_counts``. ``plain`` has them as lists. ``requests`` and
    ``drafts`` are tuples, ``block_ids`` each task's block ids, ``blocks`` all of them in order, int32. ``native`` has
    the data for native code, if ``more`` is not None. ``all_new``: all tasks are new requests, with their blocks from
    entry 0 and without drafts. ``all_growing``: all tasks bring more blocks.

    :raises InvalidValue: for columns of different lengths, and for values that do not fit their types.
    """

    __slots__ = (
        "_checked",
        "all_growing",
        "all_new",
        "all_prefill",
        "arrays",
        "requests",
    )
    all_new: bool
    all_growing: bool
    all_prefill: bool
    arrays: dict[str, Any]
    _checked: dict[str, array[int]]
    requests: tuple[AdmittedRequest, ...]
    kinds, slots, num_computed_tokens, num_scheduled_tokens = _Column(), _Column(), _Column(), _Column()
    block_counts, first_blocks, first_tokens = _Column(), _Column(), _Column()

    def __init__(
        self,
        kinds: Sequence[int],
        slots: Sequence[int],
        requests: Sequence[AdmittedRequest],
        num_computed_tokens: Sequence[int] | None,
        num_scheduled_tokens: Sequence[int],
        blocks: Sequence[Ids],
        first_blocks: Sequence[int] | None = None,
        first_tokens: Sequence[int] | None = None,
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        n = len(slots)
        ints: dict[str, array[int]] = {}
        plain = {
            "kinds": list(kinds),
            "slots": whole(slots, "slots", ints),
            "num_computed_tokens": [0] * n
            if num_computed_tokens is None
            else whole(num_computed_tokens, "num_computed_tokens", ints),
            "num_scheduled_tokens": whole(num_scheduled_tokens, "num_scheduled_tokens", ints),
            "block_counts": list(map(len, blocks)),
            "first_blocks": [0] * n if first_blocks is None else whole(first_blocks, "first_blocks"),
            "first_tokens": [-1] * n if first_tokens is None else whole(first_tokens, "first_tokens"),
        }
        put = object.__setattr__
        put(self, "_checked", ints)
        put(self, "requests", tuple(requests))
        given = ((),) * n if drafts is None else tuple([tuple(d) for d in drafts])
        ready = [
            ids if type(ids) is _ARRAY and ids.dtype is _IDS and ids.ndim == 1 else block_ids(ids) for ids in blocks
        ]
        put(self, "arrays", {"plain": plain, "drafts": given, "block_ids": tuple(ready)})
        put(self, "all_prefill", plain["kinds"] == [TaskKind.PREFILL] * n)
        put(self, "all_growing", n > 0 and plain["kinds"] == [TaskKind.MORE_BLOCKS] * n)
        new = first_blocks is None or not any(plain["first_blocks"])
        put(self, "all_new", self.all_prefill and new and (drafts is None or not any(given)))
        if {n} != {len(column) for column in (*plain.values(), self.requests, self.drafts)}:
            raise InvalidValue("the columns of a batch differ in length", cure=f"give {n} of each", argument="tasks")

    @property
    def plain(self) -> dict[str, list[int]]:
        """The columns as lists."""
        found: dict[str, list[int]] | None = self.arrays.get("plain")
        if found is None:
            n, columns = len(self), [array("i", column).tolist() for column in self.native[1:5]]
            head = array("i", self.native[6][: 12 * n]).tolist() or [TaskKind.PREFILL] * n + [0] * n + [-1] * n
            columns += head[:n], head[n : 2 * n], head[2 * n :]
            plain = dict(zip(COLUMNS, columns, strict=True))
            found = self.arrays["plain"] = plain
        return found

    @property
    def drafts(self) -> tuple[tuple[int, ...], ...]:
        """The drafts of each task."""
        found: tuple[tuple[int, ...], ...] | None = self.arrays.get("drafts")
        if found is None:
            n, flat = len(self), iter(array("i", self.native[6][12 * len(self) :]))
            counts = list(islice(flat, n)) or [0] * n
            found = self.arrays["drafts"] = tuple([tuple(islice(flat, count)) for count in counts])
        return found

    @property
    def block_ids(self) -> tuple[Int32s, ...]:
        """The block ids of each task."""
        found: tuple[Int32s, ...] | None = self.arrays.get("block_ids")
        if found is None:
            counts, blocks = self.plain["block_counts"], self.blocks
            ends = zip(accumulate(counts), counts, strict=True)
            found = self.arrays["block_ids"] = tuple([blocks[end - count : end] for end, count in ends])
        return found

    @property
    def block_bytes(self) -> bytes:
        """The bytes of ``blocks``."""
        joined: bytes | None = self.arrays.get("block_bytes")
        if joined is None and "native" in self.arrays:
            joined = self.arrays["native"][5]
        elif joined is None:
            pieces: tuple[Any, ...] = self.block_ids
            try:
                joined = b"".join(pieces)
            except (BufferError, TypeError, ValueError):  # a caller's array that is not contiguous
                joined = b"".join([piece.tobytes() for piece in pieces])
            self.arrays["block_bytes"] = joined
        return joined

    @property
    def blocks(self) -> Int32s:
        """Return all tasks' block ids in order."""
        found: Int32s | None = self.arrays.get("blocks")
        if found is None:
            found = self.arrays["blocks"] = np.frombuffer(self.block_bytes, np.int32)
        return found

    @property
    def rows(self) -> bytes:
        """Return the requests' rows as consecutive :data:`hal_core.slots.layout.REQUEST_ROW`."""
        joined: bytes | None = self.arrays.get("rows")
        if joined is None and "native" in self.arrays:
            joined = self.arrays["native"][0]
        elif joined is None:
            joined = self.arrays["rows"] = b"".join([request.request_row for request in self.requests])
        return joined

    @property
    def native(self) -> NativeColumns:
        """Return the data for native code, made without NumPy, which may release the GIL: ``rows``; slots,
        ``num_computed_tokens``, ``num_scheduled_tokens``, ``block_counts`` as int32; ``block_bytes``; ``more``."""
        found: NativeColumns | None = self.arrays.get("native")
        if found is None:
            ints, plain = self._checked, self.plain
            starts = ints.get("num_computed_tokens") or array("i", plain["num_computed_tokens"])
            counts = array("i", plain["block_counts"])
            lengths, more = ints["num_scheduled_tokens"], self.more or b""
            found = self.arrays["native"] = self.rows, ints["slots"], starts, lengths, counts, self.block_bytes, more
        return found

    @property
    def more(self) -> bytes | None:
        """Return the columns for other tasks than new requests: :func:`hal_core.slots.staying.more_of`."""
        if "more" not in self.arrays:
            self.arrays["more"] = b"" if self.all_new else more_of(self.plain, self.requests, self.drafts)
        found: bytes | None = self.arrays["more"]
        return found

    @property
    def request_row(self) -> Int64s:
        """Return ``rows`` as a matrix, int64 ``[n, 7]``, read-only."""
        request_row: Int64s | None = self.arrays.get("request_row")
        if request_row is None:
            request_row = self.arrays["request_row"] = np.frombuffer(self.rows, np.int64).reshape(len(self), -1)
        return request_row

    def check_sizes(self, layout: StateLayout) -> None:
        """Raise :class:`InvalidValue` if a request was admitted for other sizes."""
        config_key = layout.config_key
        for request in self.requests:
            if request.config_key != config_key:
                raise InvalidValue(
                    f"request {request.request_id!r} was admitted for a state of other sizes",
                    cure="admit it with this state's layout",
                    argument="tasks",
                )

    def packed(self, layout: StateLayout) -> np.ndarray[Any, np.dtype[np.void]]:
        """Return the packed requests ``[n]`` (``layout.admission_dtype``), read-only. Raises as :meth:`check_sizes`."""
        known, packed = self.arrays.get("packed", (None, None))
        if known is not layout:
            self.check_sizes(layout)
            packed = np.frombuffer(b"".join([request.packed for request in self.requests]), layout.admission_dtype)
            self.arrays["packed"] = layout, packed
        found: np.ndarray[Any, np.dtype[np.void]] = packed
        return found

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"TaskBatch is immutable: {name}")

    @classmethod
    def of(cls, tasks: Sequence[Task]) -> TaskBatch:
        """Return the batch of some tasks, in their order."""
        if isinstance(tasks, list | tuple) and not tasks:
            return NO_TASKS  # most decode steps
        if gathering.of_tasks is not None:
            found = gathering.of_tasks(tasks, Task, AdmittedRequest, SplitRole.PREFILL, NAMES, _IDS)
            if found is not None:
                return cls._gathered(*found)
        try:
            return cls(
                [task.kind for task in tasks],
                [task.slot for task in tasks],
                [task.request for task in tasks],
                [task.num_computed_tokens for task in tasks],
                [task.num_scheduled_tokens for task in tasks],
                [task.blocks for task in tasks],
                [task.first_block for task in tasks],
                [task.first_token for task in tasks],
                [task.drafts for task in tasks],
            )
        except (AttributeError, TypeError, InvalidValue):
            check_kinds(tasks)
            raise

    @classmethod
    def prefill(
        cls,
        slots: Sequence[int],
        requests: Sequence[AdmittedRequest],
        num_scheduled_tokens: Sequence[int],
        blocks: Sequence[Ids],
        num_computed_tokens: Sequence[int] | None = None,
    ) -> TaskBatch:
        """Return a batch of new requests for some slots; the next step feeds the first ``num_scheduled_tokens`` tokens
        of each."""
        n = len(slots)
        starts, found = num_computed_tokens, None
        if gathering.of_lists is not None:
            found = gathering.of_lists(
                slots, starts, num_scheduled_tokens, requests, blocks, AdmittedRequest, "request_row", _IDS, "dtype"
            )
        if found is None:
            return cls([TaskKind.PREFILL] * n, slots, requests, num_computed_tokens, num_scheduled_tokens, blocks)
        batch = cls._gathered(found, tuple(requests))
        batch.arrays["block_ids"] = tuple(blocks)
        return batch

    @classmethod
    def _gathered(cls, columns: NativeColumns, requests: tuple[AdmittedRequest, ...]) -> TaskBatch:
        """Return a batch of columns made by native code."""
        batch, put, more = cls.__new__(cls), object.__setattr__, columns[6]
        put(batch, "arrays", {"native": columns, "more": more})
        put(batch, "_checked", {})
        put(batch, "requests", requests)
        put(batch, "all_new", not more)
        kinds = set(array("i", more[: 4 * len(requests)])) if more else ()
        put(batch, "all_prefill", not more or kinds == _PREFILL)
        put(batch, "all_growing", kinds == _GROWING)
        return batch

    def __len__(self) -> int:
        return len(self.requests)

    def __repr__(self) -> str:
        pairs = zip(self.plain["kinds"], self.plain["slots"], strict=True)
        return f"TaskBatch({', '.join(f'{TaskKind(kind).name.lower()} -> {slot}' for kind, slot in pairs)})"


_PREFILL, _GROWING = {int(TaskKind.PREFILL)}, {int(TaskKind.MORE_BLOCKS)}
_ARRAY, _IDS = np.ndarray, np.dtype(np.int32)


def check_kinds(tasks: Any) -> None:  # noqa: ANN401 (whatever the caller gave)
    """Raise :class:`InvalidValue` for anything but a batch or tasks. Checked only after another error."""
    if isinstance(tasks, TaskBatch):
        wrong = next((r for r in tasks.requests if not isinstance(r, AdmittedRequest)), None)
        if wrong is not None:
            raise InvalidValue(f"request {wrong!r}", cure="admit() the request first", argument="tasks")
        return
    cure = "give a list of tasks, or a TaskBatch"
    if not isinstance(tasks, Iterable) or not isinstance(
        tasks, Sized
    ):  # one task, or an iterator, which can be read only once
        raise InvalidValue(f"a bare {type(tasks).__name__} is not a list of tasks", cure=cure, argument="tasks")
    for at, task in enumerate(tasks):
        if not isinstance(task, Task):
            raise InvalidValue(f"entry {at} is {task!r}, which is not a Task", cure=cure, argument="tasks")
        for name in ("blocks", "drafts"):
            if not isinstance(getattr(task, name), Sized) or not isinstance(getattr(task, name), Iterable):
                raise InvalidValue(
                    f"{name} of task {at} = {getattr(task, name)!r}", cure="give a list of numbers", argument="tasks"
                )


NO_TASKS = TaskBatch([], [], [], None, [], [])
"""The batch of a step that changes no slot. Batches are immutable."""
