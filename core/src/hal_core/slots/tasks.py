"""Tasks in columns, the batch of ``insert_tasks``."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence, Sized
from itertools import accumulate, chain, islice
from typing import Any

import numpy as np

from ..errors import InvalidValue
from .admission import AdmittedRequest, Int64s
from .int_columns import INT32, Ids, Int32s, block_ids, int_column
from .layout import StateLayout
from .native_columns import TASK_NAMES, NativeColumns
from .task import ENTERING as ENTERING
from .task import FEEDING as FEEDING
from .task import LEAVING as LEAVING
from .task import TRAITS as TRAITS
from .task import Task as Task
from .task import TaskKind as TaskKind

COLUMNS = (
    "kinds",
    "slots",
    "num_computed_tokens",
    "num_scheduled_tokens",
    "block_counts",
    "first_blocks",
    "first_tokens",
    "draft_counts",
)
"""The columns of a batch, in their order in ``TaskBatch.ints``."""


class TaskBatch:
    """Tasks in columns, in order; immutable. ``TaskBatch.of(tasks)``, or ``TaskBatch.prefill(…)`` without objects.

    Python, NumPy and native code read the same two buffers:

    - ``ints``: int32, the :data:`COLUMNS` of n numbers each, then every task's block ids, then every task's drafts;
    - ``rows``: the requests' :data:`hal_core.slots.layout.REQUEST_ROW`, one after the other.

    ``plain`` has the columns as lists; ``kinds`` and ``slots`` are columns as arrays. ``requests`` is a tuple,
    ``drafts`` a tuple of each task's, ``block_ids`` each task's block ids, ``blocks`` all of them, int32.

    :raises InvalidValue: for columns of different lengths, and for values that do not fit their types.
    """

    __slots__ = ("_made", "ints", "requests", "rows")
    ints: bytes
    rows: bytes
    requests: tuple[AdmittedRequest, ...]
    _made: dict[str, Any]

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
        columns = (
            slots,
            [0] * n if num_computed_tokens is None else num_computed_tokens,
            num_scheduled_tokens,
            [*map(len, blocks)],
            [0] * n if first_blocks is None else first_blocks,
            [-1] * n if first_tokens is None else first_tokens,
            [0] * n if drafts is None else [*map(len, drafts)],
        )
        if {n} != {len(kinds), len(requests), *map(len, columns)}:
            raise InvalidValue("the columns of a batch differ in length", cure=f"give {n} of each", argument="tasks")
        if not TRAITS.keys() >= {*kinds}:
            raise InvalidValue(f"kinds {[*kinds]!r}", cure="give a TaskKind for each task", argument="kinds")
        ints = [array("i", kinds), _columns(columns), block_ids(blocks)]
        if drafts is not None:
            ints.append(int_column([*chain.from_iterable(drafts)], "drafts"))
        try:
            rows = b"".join([request.request_row for request in requests])
        except AttributeError:
            wrong = next(one for one in requests if not isinstance(one, AdmittedRequest))
            raise InvalidValue(f"request {wrong!r}", cure="admit() the request first", argument="tasks") from None
        self._fill(b"".join(ints), rows, tuple(requests))

    def _fill(self, ints: bytes, rows: bytes, requests: tuple[AdmittedRequest, ...]) -> TaskBatch:
        put = object.__setattr__  # past this class's own, which refuses
        put(self, "ints", ints)
        put(self, "rows", rows)
        put(self, "requests", requests)
        put(self, "_made", {})
        return self

    @property
    def plain(self) -> dict[str, list[int]]:
        """The columns as lists."""
        found: dict[str, list[int]] | None = self._made.get("plain")
        if found is None:
            n = len(self.requests)
            flat = memoryview(self.ints)[: 4 * n * len(COLUMNS)].cast("i").tolist()
            found = self._made["plain"] = {name: flat[at * n : at * n + n] for at, name in enumerate(COLUMNS)}
        return found

    @property
    def kinds(self) -> Int32s:
        """The number of each task's kind."""
        return self._column("kinds")

    @property
    def slots(self) -> Int32s:
        """The slot of each task."""
        return self._column("slots")

    def _column(self, name: str) -> Int32s:
        n = len(self.requests)
        return np.frombuffer(self.ints, np.int32, n, 4 * n * COLUMNS.index(name))

    @property
    def blocks(self) -> Int32s:
        """All tasks' block ids in order."""
        found: Int32s | None = self._made.get("blocks")
        if found is None:
            begin = 4 * len(self.requests) * len(COLUMNS)
            found = np.frombuffer(self.ints, np.int32, sum(self.plain["block_counts"]), begin)
            self._made["blocks"] = found
        return found

    @property
    def block_ids(self) -> tuple[Int32s, ...]:
        """The block ids of each task."""
        found: tuple[Int32s, ...] | None = self._made.get("block_ids")
        if found is None:
            blocks, counts = self.blocks, self.plain["block_counts"]
            ends = zip(accumulate(counts), counts, strict=True)
            found = self._made["block_ids"] = tuple([blocks[end - count : end] for end, count in ends])
        return found

    @property
    def drafts(self) -> tuple[tuple[int, ...], ...]:
        """The drafts of each task."""
        found: tuple[tuple[int, ...], ...] | None = self._made.get("drafts")
        if found is None:
            counts = self.plain["draft_counts"]
            flat = iter(memoryview(self.ints)[len(self.ints) - 4 * sum(counts) :].cast("i").tolist())
            found = self._made["drafts"] = tuple([tuple(islice(flat, count)) for count in counts])
        return found

    @property
    def request_rows(self) -> Int64s:
        """``rows`` as a matrix, int64 ``[n, 8]``, read-only."""
        return np.frombuffer(self.rows, np.int64).reshape(len(self.requests), -1)

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

    def moved(self, slots: Sequence[int], requests: Sequence[AdmittedRequest]) -> TaskBatch:
        """Return the same tasks in other slots, for the same requests as they were admitted for another state."""
        n = 4 * len(slots)
        ints = b"".join([self.ints[:n], int_column(slots, "slots"), self.ints[2 * n :]])
        rows = b"".join([request.request_row for request in requests])
        return TaskBatch.__new__(TaskBatch)._fill(ints, rows, tuple(requests))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"TaskBatch is immutable: {name}")

    @classmethod
    def of(cls, tasks: Sequence[Task], native: NativeColumns | None = None) -> TaskBatch:
        """Return the batch of some tasks, in their order. ``native``: the device's functions for it, if any."""
        if isinstance(tasks, list | tuple) and not tasks:
            return NO_TASKS  # most decode steps
        if native is not None:
            found = native.of_tasks(tasks, Task, AdmittedRequest, TASK_NAMES, INT32, np.ndarray)
            if found is not None:
                return cls.__new__(cls)._fill(*found)
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
            check_tasks(tasks)
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
        kinds = [TaskKind.PREFILL] * len(slots)
        return cls(kinds, slots, requests, num_computed_tokens, num_scheduled_tokens, blocks)

    def __len__(self) -> int:
        return len(self.requests)

    def __repr__(self) -> str:
        pairs = zip(self.plain["kinds"], self.plain["slots"], strict=True)
        return f"TaskBatch({', '.join(f'{TaskKind(kind).name.lower()} -> {slot}' for kind, slot in pairs)})"


def _columns(columns: Sequence[Sequence[int]]) -> array[int]:
    """Return the columns but the first, one after the other, checked together; an error names the one that is wrong."""
    try:
        return int_column([*chain.from_iterable(columns)], "tasks")
    except InvalidValue:
        for name, column in zip(COLUMNS[1:], columns, strict=True):
            int_column(column, name)
        raise


def check_tasks(tasks: Any) -> None:  # noqa: ANN401 (whatever the caller gave)
    """Raise :class:`InvalidValue` for anything but a batch or tasks. Checked only after another error."""
    if isinstance(tasks, TaskBatch):
        return
    cure = "give a list of tasks, or a TaskBatch"
    # Neither: a single task. No size: an iterator, which can be read only once.
    if not isinstance(tasks, Iterable) or not isinstance(tasks, Sized):
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
