"""vLLM's classes of slot state over a :class:`hal_vllm.stage.Stage`.

What a caller can see of it: no address ever changes (vLLM's ``UvaBackedTensor.gpu`` goes round a ring of pinned
buffers, and the depth of that ring alone protects it from a step that still reads); only what changed is written; of
two staged writes to one place the last wins (vLLM leaves it open); a write past a row's end is refused (vLLM writes
into the next row). Applied rows are submitted when a step has applied its block tables, or by the first read of
``gpu``.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from hal_core import InvalidValue

from .stage import Rows, Stage

CODES = {torch.int32: "i", torch.int64: "q", torch.float32: "f"}
"""The dtypes that can be staged, and their type codes of :mod:`array`."""


class StagedWriteTensor:
    """A device tensor ``[rows]`` or ``[rows, width]``, int32, int64 or float32, whose rows the host writes in parts."""

    stage: ClassVar[Stage]
    own: ClassVar[Any] = None
    """vLLM's class, for the tensors that stay in pinned host memory; None: there are none."""

    def __new__(
        cls,
        size: int | Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        max_concurrency: int | None = None,
        uva_instead_of_gpu: bool = False,
    ) -> Any:  # noqa: ANN401 (vLLM's own class where the tensor stays in pinned memory)
        if uva_instead_of_gpu and cls.stage.uva and cls.own is not None:
            return cls.own(size, dtype, device, max_concurrency, uva_instead_of_gpu)
        return super().__new__(cls)

    def __init__(
        self,
        size: int | Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        max_concurrency: int | None = None,
        uva_instead_of_gpu: bool = False,
    ) -> None:
        if dtype not in CODES:
            cure = f"give one of {', '.join(map(str, CODES))}"
            raise InvalidValue(f"{dtype} cannot be staged", cure=cure, argument="dtype")
        shape = (size,) if isinstance(size, int) else tuple(size)
        self.num_rows, self.dtype, self.device = shape[0], dtype, device
        self._width, self._item, self._code = math.prod(shape[1:]), dtype.itemsize, CODES[dtype]
        self._gpu, self._place = self.stage.allocate(shape, dtype)
        self.clear_staged_writes()

    @property
    def gpu(self) -> torch.Tensor:
        """The tensor; applied rows are submitted first."""
        if self._place.rows is not None:
            self.stage.flush()
        return self._gpu

    def stage_write(self, index: int, start: int, x: Iterable[int] | Iterable[float]) -> None:
        """Stage the elements ``x`` for row ``index`` from ``start`` on; ``x`` may change at once.

        :raises InvalidValue: for elements outside the row, or out of the dtype's range; none is staged.
        """
        if not x:
            return
        before = len(self._values)
        try:
            self._values.extend(x)  # type: ignore[arg-type]  # of the dtype
        except (TypeError, OverflowError) as error:
            del self._values[before:]
            cure = f"give numbers of {self.dtype}"
            raise InvalidValue(f"row {index}: {error}", cure=cure, argument="x") from error
        count = len(self._values) - before
        if not (0 <= index < self.num_rows and start >= 0 and start + count <= self._width):
            del self._values[before:]
            what = f"elements {start} to {start + count} of row {index}: there are {self.num_rows} rows"
            cure = "write inside the row: the next one belongs to another request"
            raise InvalidValue(f"{what} of {self._width}", cure=cure, argument="start")
        rows, item = self._rows, self._item
        if self._ends.get(index, 0) > start:
            rows.overlapping = True
        self._ends[index] = start + count
        rows.dst.append(self._place.offset + (int(index) * self._width + int(start)) * item)
        rows.nbytes.append(count * item)

    def stage_write_elem(self, index: int, x: int) -> None:
        """Stage the first element of row ``index``."""
        self.stage_write(index, 0, (x,))

    def apply_write(self) -> None:
        """Give the staged rows to the step's submission."""
        rows = self._rows
        if rows.dst:
            rows.pieces.append(memoryview(self._values).cast("B"))
            self.stage.add(self._place, rows)
            self.clear_staged_writes()

    def clear_staged_writes(self) -> None:
        """Forget the staged rows that are not applied."""
        self._rows = Rows()
        self._values = array(self._code)
        self._ends: dict[int, int] = {}


class UvaBackedTensor:
    """An array that the host keeps (``np``, ``cpu``) and the device's copy of it (``gpu``)."""

    stage: ClassVar[Stage]

    def __init__(self, size: int | Sequence[int], dtype: torch.dtype, max_concurrency: int | None = None) -> None:
        shape = (size,) if isinstance(size, int) else tuple(size)
        self.dtype = dtype
        self.cpu = torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=False)
        self.np = self.cpu.numpy()
        self._gpu, self._place = self.stage.allocate(shape, dtype)
        self._shown = self._gpu
        self._sent = self.np.tobytes()
        self._low, self._high = len(self._sent), 0

    @property
    def gpu(self) -> torch.Tensor:
        """The device's copy as it was applied last; that is submitted first."""
        if self._place.rows is not None:
            self.stage.flush()
        return self._shown

    def copy_to_uva(self, n: int | None = None) -> None:
        """Give what changed since the last call to the step's submission; of the first ``n`` rows, which ``gpu`` has
        then.

        It returns nothing, as a tensor returned here would not be written yet: read ``gpu``.
        """
        now = self.np.tobytes()
        if n is not None:
            cut = self.np[:n].nbytes
            now = now[:cut] + self._sent[cut:]
        self._shown = self._gpu if n is None else self._gpu[:n]
        if now == self._sent:
            return
        step = 4 if len(now) % 4 == 0 else 1
        word = f"u{step}"
        changed = np.flatnonzero(np.frombuffer(now, word) != np.frombuffer(self._sent, word))
        low, high = int(changed[0]) * step, int(changed[-1] + 1) * step
        pending = self._place.rows
        if pending is not None:
            low, high = min(low, self._low), max(high, self._high)
        self._sent, self._low, self._high = now, low, high
        rows = Rows() if pending is None else pending
        rows.dst, rows.nbytes, rows.pieces = [self._place.offset + low], [high - low], [memoryview(now)[low:high]]
        if pending is None:
            self.stage.add(self._place, rows)


class FusedStagedWriter:
    """The staged writes of several tensors at once: no different here from those of one."""

    stage: ClassVar[Stage]

    def __init__(self, device: torch.device, max_writes: int, max_concurrency: int | None = None) -> None:
        pass

    def apply(self, tensors: Sequence[StagedWriteTensor], output_ptrs: object, output_strides: object) -> None:
        """Give the staged rows of each tensor to the step's submission."""
        for one in tensors:
            one.apply_write()


CLASSES: dict[str, type[Any]] = {one.__name__: one for one in (StagedWriteTensor, UvaBackedTensor, FusedStagedWriter)}


def classes_over(stage: Stage, own: type[Any] | None = None) -> dict[str, type[Any]]:
    """Return the three classes over ``stage``. ``own``: vLLM's StagedWriteTensor, for tensors in pinned memory."""
    members = {"stage": stage, "own": own}
    return {name: type(name, (one,), members) for name, one in CLASSES.items()}
