"""Tasks: what ``insert_tasks`` puts into slots, one by one as :class:`Task` or in columns as :class:`TaskBatch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import Any

import numpy as np

from .errors import InvalidValue
from .layout import StateLayout
from .requests import AdmittedRequest

Int32s = np.ndarray[Any, np.dtype[np.int32]]


class TaskKind(IntEnum):
    """What happens to a slot.

    - ``PREFILL``: a new (or resumed) request takes the slot; the next step feeds its first ``length`` tokens.
    - ``CHUNK``: the next ``length`` tokens of the request that is in the slot (chunked prefill).
    - ``DECODE``: more KV blocks for the request that is decoding in the slot.
    - ``HANDOFF``: the decode role of a prefill/decode split: the request goes on after its first token.
    - ``PREEMPTED``: the request leaves the slot and will be resumed; reported once by the next output.
    - ``ABORTED``: the request leaves the slot for good; reported once by the next output.
    """

    PREFILL = 1
    CHUNK = 2
    DECODE = 3
    HANDOFF = 4
    PREEMPTED = 5
    ABORTED = 6


ENTERING = (TaskKind.PREFILL, TaskKind.HANDOFF)
LEAVING = (TaskKind.PREEMPTED, TaskKind.ABORTED)


@dataclass(frozen=True, slots=True)
class Task:
    """One request, one slot.

    - ``request``: needed by every kind; it names the request that the caller believes to be in the slot.
    - ``start``: tokens of it whose KV is in the cache before the next step (PREFILL with a cached prefix, CHUNK).
    - ``length``: tokens that the next step feeds (PREFILL, CHUNK).
    - ``blocks``: physical KV block ids to put into the block table from entry ``first_block`` on.
    - ``first_token``, ``drafts``: what the prefill node sampled (HANDOFF).
    """

    kind: TaskKind
    slot: int
    request: AdmittedRequest
    start: int = 0
    length: int = 0
    blocks: Sequence[int] = ()
    first_block: int = 0
    first_token: int = -1
    drafts: Sequence[int] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.kind, TaskKind):
            raise InvalidValue(f"kind {self.kind!r}", cure="give a TaskKind", argument="kind")
        if not isinstance(self.request, AdmittedRequest):
            raise InvalidValue(f"request {self.request!r}", cure="admit() the request first", argument="request")


_PREFILLS = np.int32(TaskKind.PREFILL).tobytes()


class TaskBatch:
    """Tasks in columns, in order; immutable. ``TaskBatch.of(tasks)``, or ``TaskBatch.prefill(…)`` without objects.

    Columns of length n: ``kinds``, ``slots``, ``starts``, ``lengths``, ``first_blocks``, ``block_counts``,
    ``first_tokens`` (int32 or int64), ``requests`` and ``drafts`` (tuples). ``blocks``: int32, all tasks' block
    ids one after the other.
    """

    __slots__ = (
        "block_counts",
        "blocks",
        "drafts",
        "first_blocks",
        "first_tokens",
        "kinds",
        "lengths",
        "packed_cache",
        "requests",
        "slots",
        "starts",
    )

    def __init__(
        self,
        kinds: Int32s,
        slots: Sequence[int],
        requests: Sequence[AdmittedRequest],
        starts: Sequence[int],
        lengths: Sequence[int],
        blocks: Sequence[Sequence[int] | Int32s],
        first_blocks: Sequence[int] | None = None,
        first_tokens: Sequence[int] | None = None,
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        n = len(slots)
        put = object.__setattr__
        put(self, "kinds", kinds)
        put(self, "slots", _column(slots, "slots", np.int32))
        put(self, "requests", tuple(requests))
        put(self, "starts", _column(starts, "starts", np.int32))
        put(self, "lengths", _column(lengths, "lengths", np.int32))
        put(self, "block_counts", np.array([len(ids) for ids in blocks], np.int32))
        put(self, "blocks", _flat_blocks(blocks))
        firsts = _zeros(n) if first_blocks is None else _column(first_blocks, "first_blocks", np.int32)
        put(self, "first_blocks", firsts)
        tokens = np.full(n, -1) if first_tokens is None else _column(first_tokens, "first_tokens", np.int64)
        put(self, "first_tokens", tokens)
        put(self, "drafts", ((),) * n if drafts is None else tuple([tuple(d) for d in drafts]))
        columns = (self.kinds, self.requests, self.starts, self.lengths, self.block_counts, self.first_blocks)
        if {len(column) for column in (*columns, self.first_tokens, self.drafts)} != {n}:
            raise InvalidValue("the columns of a batch differ in length", cure=f"give {n} of each", argument="tasks")
        for array in (self.kinds, self.slots, self.starts, self.lengths, self.block_counts, self.blocks):
            array.flags.writeable = False
        self.first_blocks.flags.writeable = self.first_tokens.flags.writeable = False

    @property
    def all_prefill(self) -> bool:
        """True when every task is a new request."""
        return self.kinds.tobytes() == _PREFILLS * len(self)

    def packed(self, layout: StateLayout) -> np.ndarray[Any, np.dtype[np.void]]:
        """What admission packed ``[n]`` (``layout.admission_dtype``), read-only.

        Raises :class:`InvalidValue` when a request was admitted for other sizes.
        """
        cached: tuple[StateLayout, np.ndarray[Any, np.dtype[np.void]]] | None = getattr(self, "packed_cache", None)
        if cached is not None and cached[0] is layout:
            return cached[1]
        joined = b"".join([request.packed for request in self.requests])
        dtype = layout.admission_dtype
        fits = len(joined) == len(self.requests) * dtype.itemsize
        packed = np.frombuffer(joined, dtype) if fits else np.zeros(0, dtype)
        if not fits or (packed["stamp"] != layout.admission_stamp).any():
            raise InvalidValue(
                "a request was admitted for a state of other sizes",
                cure="admit it with this state's layout",
                argument="tasks",
            )
        object.__setattr__(self, "packed_cache", (layout, packed))
        return packed

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"TaskBatch is immutable: {name}")

    @classmethod
    def of(cls, tasks: Sequence[Task]) -> TaskBatch:
        """The batch of some tasks, in their order."""
        return cls(
            np.fromiter((task.kind for task in tasks), np.int32, len(tasks)),
            [task.slot for task in tasks],
            [task.request for task in tasks],
            [task.start for task in tasks],
            [task.length for task in tasks],
            [task.blocks for task in tasks],
            [task.first_block for task in tasks],
            [task.first_token for task in tasks],
            [task.drafts for task in tasks],
        )

    @classmethod
    def prefill(
        cls,
        slots: Sequence[int],
        requests: Sequence[AdmittedRequest],
        lengths: Sequence[int],
        blocks: Sequence[Sequence[int] | Int32s],
        starts: Sequence[int] | None = None,
    ) -> TaskBatch:
        """New requests for some slots; the next step feeds the first ``lengths`` tokens of each."""
        n = len(slots)
        return cls(
            np.full(n, TaskKind.PREFILL, np.int32),
            slots,
            requests,
            [0] * n if starts is None else starts,
            lengths,
            blocks,
        )

    def __len__(self) -> int:
        return len(self.slots)

    def __repr__(self) -> str:
        kinds = ", ".join(f"{TaskKind(k).name.lower()} -> {s}" for k, s in zip(self.kinds, self.slots, strict=True))
        return f"TaskBatch({kinds})"


def _zeros(n: int) -> Int32s:
    return np.zeros(n, np.int32)


def _flat_blocks(blocks: Sequence[Sequence[int] | Int32s]) -> Int32s:
    """All tasks' block ids one after the other; int32 arrays are joined as they are."""
    if blocks and all(type(ids) is np.ndarray and ids.dtype == np.int32 for ids in blocks):
        joined: Int32s = np.concatenate(blocks)
        return joined
    column: Int32s = _column(list(chain.from_iterable(blocks)), "blocks", np.int32)
    return column


def _column(values: Sequence[int], name: str, dtype: type[np.signedinteger[Any]]) -> Any:  # noqa: ANN401 (int32 or int64)
    """A new integer array; floats and numbers out of range are refused, not rounded."""
    limits = _LIMITS[dtype]
    if type(values) is not np.ndarray:
        plain = list(values)
        if not plain or (set(map(type, plain)) == {int} and limits[0] <= min(plain) and max(plain) <= limits[1]):
            return np.array(plain, dtype)
    array = np.array(values)
    if array.size == 0:
        return np.zeros(0, dtype)
    if array.dtype == dtype and array.ndim == 1:
        return array
    fits = array.ndim == 1 and array.dtype.kind in "iu"
    if not fits or int(array.min()) < limits[0] or int(array.max()) > limits[1]:
        raise InvalidValue(f"{name} must be whole numbers that fit {np.dtype(dtype)}", argument=name)
    return array.astype(dtype)


_LIMITS = {kind: (int(np.iinfo(kind).min), int(np.iinfo(kind).max)) for kind in (np.int32, np.int64)}
