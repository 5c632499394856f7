"""``HAL_CHECK_RANKS=1``: after each step all ranks of a group compare a digest of their whole slot state.

All fields count, companions included, except the alternatives (``topk_…``), which only the sampling rank writes and
only the first rank reads. Admission ids count from the first one of the run, because each rank numbers its own.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
from hal_core import ByteRange, StateUnusable
from hal_core.devices import HOST, opened

from hal_engine.options import CHECK_RANKS

if TYPE_CHECKING:
    from hal_engine.stepping import Stepper

VARIABLE = "HAL_CHECK_RANKS"
_APART = ("topk_token_ids", "topk_logprobs", "topk_ranks")
_ADMISSION_IDS = ("request_serial", "last_preempted", "last_aborted")
Columns = dict[str, np.ndarray[Any, Any]]


class StateCheck:
    """Compares one worker's state with those of the other ranks of its group. All of them call :meth:`compare`."""

    def __init__(self, worker: Stepper) -> None:
        self._worker, self._opened = worker, opened(worker.group, backend=HOST)
        self.first_admission_id = 0
        """First admission id of this run; 0 before there is one."""

    def compare(self, step: int) -> None:
        """Raise :class:`StateUnusable` on every rank, with the first field and slot that differ, unless all are
        equal."""
        columns = self._columns()
        digest = hashlib.sha256()
        for column in columns.values():
            digest.update(column.tobytes())
        if len(set(self._exchanged(np.frombuffer(digest.digest(), np.int64)))) == 1:
            return
        sums = np.array([[crc32(bytes(row)) for row in column] for column in columns.values()], np.int64)
        every = [np.frombuffer(data, np.int64).reshape(sums.shape) for data in self._exchanged(sums)]
        differs = np.argwhere(np.any([one != every[0] for one in every[1:]], axis=0))
        members = self._worker.group.ranks
        field, slot = differs[0].tolist()
        others = [rank for rank, one in zip(members, every, strict=True) if one[field, slot] != every[0][field, slot]]
        raise StateUnusable(
            f"after step {step} the ranks of group {members} differ in {len(differs)} field(s) of slots, first in "
            f"field {list(columns)[field]!r} of slot {slot}: rank(s) {others} from rank {members[0]}",
            cure=f"report it: ranks that run the same steps must agree ({CHECK_RANKS}=1 compares them)",
            argument="state",
        )

    def _columns(self) -> Columns:
        state = self._worker.state
        part = ByteRange(0, state.memory.nbytes)  # companions lie behind it
        copied = self._worker.device.copy_out(memory=state.memory, parts=(part,), stream=self._worker.stream)
        copied.wait()
        columns: Columns = {}
        for one in (state, *state.companions):
            for name, column in one.columns(copied.data[0], part).items():
                if name not in _APART:
                    if name in _ADMISSION_IDS and self.first_admission_id:
                        column = np.where(column > 0, column - self.first_admission_id + 1, 0)
                    columns[name if one is state else f"{one.name}: {name}"] = column
        return columns

    def _exchanged(self, numbers: np.ndarray[Any, Any]) -> list[bytes]:
        """Return the numbers of each rank, in their order."""
        mine = numbers.tobytes()
        found = bytearray(len(mine) * self._worker.group.size)
        self._opened.watched(self._opened.process_group.all_gather, memoryview(mine), memoryview(found))
        return [bytes(found[at : at + len(mine)]) for at in range(0, len(found), len(mine))]
