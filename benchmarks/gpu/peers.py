"""The peers' ways of putting requests into slots, written with torch; each field is a tensor ``[slots, width]``.

- ``synchronous``: an assignment for each field of each request.
- ``per field``: for each field of each request one asynchronous copy (rows, from pinned memory) or a fill and a device
  copy (scalars), which is what FastDeploy's ``async_set_value`` does.
- ``staged``: rows are collected for each field as lists of numbers, then one upload and one kernel a field, which is
  what vLLM's model runner v2 does.
- ``fused``: the same as it does it today: NumPy rows, one kernel for all fields, which reads mapped host memory.
- ``staged numpy``: ``staged`` with rows that are NumPy arrays already, stacked and written with ``index_copy_``. No
  peer does so; it is here to show how much of ``staged`` is its lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from hal_core.slots.admission import AdmittedRequest
from hal_core.slots.fields import ROW_FIELDS
from hal_core.slots.layout import StateLayout

from .fused import FusedWriter

Array = np.ndarray[Any, Any]
Tensors = dict[str, torch.Tensor]
BLOCK = 1024


@dataclass(frozen=True)
class Inputs:
    """What one request writes: numbers, rows as arrays, and the same rows as lists (made before any timing)."""

    scalars: dict[str, float]
    rows: dict[str, Array]
    lists: dict[str, list[float]]

    @classmethod
    def of(cls, layout: StateLayout, request: AdmittedRequest, length: int, blocks: Array) -> Inputs:
        """From an admitted request that enters a slot with ``length`` tokens to prefill."""
        record = np.frombuffer(request.packed, layout.admission_dtype)["record"][0]
        scalars: dict[str, float] = {}
        rows: dict[str, Array] = {}
        for name in layout.record_dtype.names or ():
            if layout.fields[name].width == 1:
                scalars[name] = record[name].item()
            else:
                rows[name] = record[name].copy()
        scalars |= {"seq_lens_this_time": length, "seq_lens_encoder": length, "blocks_num": len(blocks)}
        for name, data in zip(ROW_FIELDS, request.rows, strict=True):
            storage = layout.fields[name].field.dtype.storage
            row = blocks if name == "block_tables" else np.frombuffer(data, storage).copy()
            if len(row):
                rows[name] = row
        return cls(scalars, rows, {name: row.tolist() for name, row in rows.items()})


def empty_tensors(layout: StateLayout) -> Tensors:
    """All fields at their reset values, on the current GPU."""
    return {
        name: torch.full(
            (layout.sizes.num_slots, place.width),
            place.field.reset,
            dtype=getattr(torch, place.field.dtype.name),
            device="cuda",
        )
        for name, place in layout.fields.items()
    }


def synchronous(tensors: Tensors, slots: Sequence[int], inputs: Sequence[Inputs]) -> None:
    """An assignment a field a request; rows come from pageable memory, so each waits for the stream."""
    for slot, one in zip(slots, inputs, strict=True):
        for name, value in one.scalars.items():
            tensors[name][slot] = value
        for name, row in one.rows.items():
            tensors[name][slot, : len(row)] = torch.from_numpy(row)


def pinned(row: Array) -> torch.Tensor:
    """A copy in pinned memory, where there is a GPU that it matters to."""
    tensor = torch.from_numpy(row)
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


def per_field(tensors: Tensors, slots: Sequence[int], inputs: Sequence[Inputs]) -> None:
    """One asynchronous copy or fill a field a request."""
    for slot, one in zip(slots, inputs, strict=True):
        for name, value in one.scalars.items():
            target = tensors[name][slot]
            target.copy_(torch.full_like(target, value), non_blocking=True)
        for name, row in one.rows.items():
            tensors[name][slot, : len(row)].copy_(pinned(row), non_blocking=True)


@triton.jit
def _write_rows(out, stride, head, contents, n, size: tl.constexpr):  # noqa: ANN001, ANN202 (triton's own types)
    """Row ``i`` of the contents, from ``head[n + i]`` to ``head[n + i + 1]``, goes to slot ``head[i]``."""
    i = tl.program_id(0)
    slot = tl.load(head + i)
    begin = tl.load(head + n + i)
    end = tl.load(head + n + i + 1)
    for at in range(begin, end, size):
        places = at + tl.arange(0, size)
        inside = places < end
        tl.store(out + slot * stride + places - begin, tl.load(contents + places, mask=inside), mask=inside)


def staged(tensors: Tensors, slots: Sequence[int], inputs: Sequence[Inputs]) -> None:
    """Rows collected in lists for each field; one upload and one launch a field."""
    for name, tensor in tensors.items():
        indices: list[int] = []
        contents: list[float] = []
        ends = [0]
        for slot, one in zip(slots, inputs, strict=True):
            if name in one.scalars:
                contents.append(one.scalars[name])
            elif name in one.lists:
                contents.extend(one.lists[name])
            else:
                continue
            indices.append(slot)
            ends.append(len(contents))
        if indices:
            _apply(tensor, indices, ends, contents)


def _apply(tensor: torch.Tensor, indices: list[int], ends: list[int], contents: list[float]) -> None:
    target = tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor
    head = np.array(indices + ends, np.int64)
    data = np.array(contents, str(target.dtype).removeprefix("torch."))
    pinned = torch.empty(head.nbytes + data.nbytes, dtype=torch.uint8, pin_memory=True)
    block = pinned.numpy()
    block[: head.nbytes] = head.view(np.uint8)
    block[head.nbytes :] = data.view(np.uint8)
    there = pinned.to("cuda", non_blocking=True)
    rows = there[head.nbytes :].view(target.dtype)
    n = len(indices)
    _write_rows[(n,)](target, target.stride(0), there[: head.nbytes].view(torch.int64), rows, n, BLOCK)


def staged_numpy(tensors: Tensors, slots: Sequence[int], inputs: Sequence[Inputs]) -> None:
    """Rows of equal lengths stacked by NumPy for each field; one upload and one launch a field."""
    chosen = torch.tensor(slots, pin_memory=True).to("cuda", non_blocking=True)
    for name in inputs[0].scalars:
        values = torch.tensor([one.scalars[name] for one in inputs], dtype=tensors[name].dtype).pin_memory()
        tensors[name].index_copy_(0, chosen, values.to("cuda", non_blocking=True)[:, None])
    for name in inputs[0].rows:
        values = torch.from_numpy(np.stack([one.rows[name] for one in inputs])).pin_memory()
        tensors[name][:, : values.shape[1]].index_copy_(0, chosen, values.to("cuda", non_blocking=True))


_writers: dict[int, tuple[Tensors, FusedWriter]] = {}


def writer_of(tensors: Tensors) -> FusedWriter:
    """The writer of these tensors, the same one each time: its ring is what keeps steps apart."""
    if id(tensors) not in _writers:
        _writers[id(tensors)] = tensors, FusedWriter(tensors)
    return _writers[id(tensors)][1]


def fused(tensors: Tensors, slots: Sequence[int], inputs: Sequence[Inputs]) -> None:
    """Rows as arrays, one launch for all fields."""
    writer = writer_of(tensors)
    for name in inputs[0].scalars:
        writer.scalars(name, slots, [one.scalars[name] for one in inputs])
    for slot, one in zip(slots, inputs, strict=True):
        for name, row in one.rows.items():
            writer.row(name, slot, row)
    writer.apply()


FUSED = "(c) fused, as today"
Way = Callable[[Tensors, Sequence[int], Sequence[Inputs]], None]
WAYS: dict[str, Way] = {
    "(a) synchronous": synchronous,
    "(b) per field": per_field,
    "(c) staged": staged,
    FUSED: fused,
    "(c') staged numpy": staged_numpy,
}
