"""Faults that a writer of slot state could have. Written from vLLM's classes and ``hal_vllm.buffers`` before the tests
were read; each must be found by the 30 drawn sequences of ``test_in_vllm.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from hal_core import DONE, Ticket
from hal_vllm.buffers import CLASSES, FusedStagedWriter, StagedWriteTensor, UvaBackedTensor
from hal_vllm.stage import Place, Rows, Stage

Numbers = Iterable[int] | Iterable[float]
BLOCK = 1024
"""Elements that one program of vLLM's kernel writes at a time."""


class RowsEnd(StagedWriteTensor):
    """The last element of a row is never written by a run of several."""

    def stage_write(self, index: int, start: int, x: Numbers) -> None:
        values = list(x)
        full = len(values) > 1 and start + len(values) == self._width
        super().stage_write(index, start, values[:-1] if full else values)


class Appending(StagedWriteTensor):
    """A run in the row of the run before it goes behind that, wherever it should start."""

    def stage_write(self, index: int, start: int, x: Numbers) -> None:
        start = self._ends.get(index, start)
        super().stage_write(index, start, list(x)[: self._width - start])


class FirstWins(StagedWriteTensor):
    """Of two runs over the same elements the first one stays."""

    def stage_write(self, index: int, start: int, x: Numbers) -> None:
        end = self._ends.get(index, 0)
        super().stage_write(index, max(start, end), list(x)[max(0, end - start) :])


class OneBlock(StagedWriteTensor):
    """A run of more elements than one program writes ends there."""

    def stage_write(self, index: int, start: int, x: Numbers) -> None:
        super().stage_write(index, start, list(x)[:BLOCK])


class ZeroIsClear(StagedWriteTensor):
    """A zero is not written, as the memory was made of zeros: a row that was used before keeps its old value."""

    def stage_write(self, index: int, start: int, x: Numbers) -> None:
        for at, value in enumerate(x):
            if value:
                super().stage_write(index, start + at, (value,))


class Forgetful(StagedWriteTensor):
    """A row's last run replaces the runs that were staged for that row before."""

    def stage_write(self, index: int, start: int, x: Numbers) -> None:
        runs: dict[int, tuple[int, list[Any]]] = vars(self).setdefault("runs", {})
        runs[index] = (start, list(x))

    def apply_write(self) -> None:
        runs = vars(self).pop("runs", {})
        for index, (start, values) in runs.items():
            super().stage_write(index, start, values)
        super().apply_write()


class LastGroup(FusedStagedWriter):
    """Of three groups the last one waits for a step in which it is alone."""

    def apply(self, tensors: Any, output_ptrs: object, output_strides: object) -> None:
        busy = [one for one in tensors if one._rows.dst]
        super().apply(busy[:-1] if len(busy) > 2 else busy, output_ptrs, output_strides)


class FirstChange(UvaBackedTensor):
    """Of what changed only the first run of changed elements is sent."""

    def copy_to_uva(self, n: int | None = None) -> None:
        before = np.frombuffer(self._sent, self.np.dtype).reshape(self.np.shape)
        changed = np.flatnonzero(self.np != before)
        gaps = np.flatnonzero(np.diff(changed) > 1)
        wanted = self.np.copy()
        if len(gaps):
            behind = changed[gaps[0] + 1 :]
            self.np.reshape(-1)[behind] = before.reshape(-1)[behind]
        super().copy_to_uva(n)
        self._sent = wanted.tobytes()
        self.np[...] = wanted


class FirstRows(UvaBackedTensor):
    """After a copy of the first rows the others count as sent."""

    def copy_to_uva(self, n: int | None = None) -> None:
        super().copy_to_uva(n)
        self._sent = self.np.tobytes()


class FirstValue(UvaBackedTensor):
    """A value that returns to what it was at the start is not sent."""

    def copy_to_uva(self, n: int | None = None) -> None:
        if self.np.any():
            super().copy_to_uva(n)


class SameSum(UvaBackedTensor):
    """Changes that leave the sum as it was are not noticed."""

    def copy_to_uva(self, n: int | None = None) -> None:
        total = float(self.np.sum(dtype=np.float64))
        if total != vars(self).get("total", 0.0):
            super().copy_to_uva(n)
        vars(self)["total"] = total


class HalfWidth(UvaBackedTensor):
    """Numbers of 64 bits go through 32."""

    def copy_to_uva(self, n: int | None = None) -> None:
        wanted = self.np.copy()
        if self.np.dtype == np.int64:
            self.np[...] = self.np.astype(np.int32)
        super().copy_to_uva(n)
        self.np[...] = wanted


def _second_apply(stage: Stage, place: Place, rows: Rows) -> None:
    """What a tensor applied before a submission is replaced by what it applies next."""
    if place.rows is None:
        stage.pending.append(place)
    place.rows = rows


def _few_tensors(stage: Stage) -> Ticket:
    """A submission takes eight tensors; the others wait for the next one."""
    if len(stage.pending) <= FEW:
        return FLUSH(stage)
    waiting, stage.pending = stage.pending[FEW:], stage.pending[:FEW]
    FLUSH(stage)
    stage.pending = waiting
    return DONE


def _stale_reads(patch: Any) -> None:
    """Who reads a tensor before the step's submission gets what was there."""
    patch.setattr(StagedWriteTensor, "gpu", property(lambda one: one._gpu))
    patch.setattr(UvaBackedTensor, "gpu", property(lambda one: one._shown))


FEW = 8
FLUSH = Stage.flush
LIARS: dict[str, Callable[[Any], None]] = {
    one.__name__: lambda patch, one=one: patch.setitem(CLASSES, one.__bases__[0].__name__, one)  # type: ignore[misc]
    for one in (
        RowsEnd,
        Appending,
        FirstWins,
        OneBlock,
        ZeroIsClear,
        Forgetful,
        LastGroup,
        FirstChange,
        FirstRows,
        FirstValue,
        SameSum,
        HalfWidth,
    )
} | {
    "SecondApply": lambda patch: patch.setattr(Stage, "add", _second_apply),
    "StaleReads": _stale_reads,
    "FewTensors": lambda patch: patch.setattr(Stage, "flush", _few_tensors),
}
"""Name of each fault to a function that makes it, given pytest's ``monkeypatch``."""


def main(count: int) -> None:
    """Print for each fault the first of ``count`` drawn sequences that finds it, and what it finds; needs vLLM."""
    from hal_vllm.checking import check, interpreted

    interpreted()
    import pytest

    for name, made in LIARS.items():
        with pytest.MonkeyPatch.context() as patch:
            made(patch)
            for number in range(100, 100 + count):
                found = check("cpu", count=1, first=number).differing
                if found:
                    print(f"KILLED {name}: {next(iter(found.values()))}", flush=True)
                    break


if __name__ == "__main__":
    main(30)
