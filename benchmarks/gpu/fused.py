"""vLLM's present method, reimplemented: all fields of all requests by one kernel, from memory that it maps.

It follows its model runner v2 (pull requests 44944, 51334 and 55819 of vllm-project/vllm): rows are NumPy arrays until
the last moment, one launch writes every table, and the kernel reads destinations and values from pinned host memory, so
that no copy to the GPU precedes it. A ring of such memory keeps steps apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

BLOCK, DEPTH, ROOM = 1024, 4, 1 << 16


@triton.jit(do_not_specialize=["head", "contents", "n"])
def write_items(head, contents, n, size: tl.constexpr):  # noqa: ANN001, ANN201 (triton's own types)
    """Item ``i``: bytes ``head[n + i]`` to ``head[n + i + 1]`` of the contents, to address ``head[i]``; both addresses
    are the host's, which the GPU maps."""
    i = tl.program_id(0)
    table = head.to(tl.pointer_type(tl.int64))
    target, begin, end = tl.load(table + i), tl.load(table + n + i), tl.load(table + n + i + 1)
    if (end - begin) % 4 == 0:
        out, source, count = target.to(tl.pointer_type(tl.int32)), contents + begin, (end - begin) // 4
        words = source.to(tl.pointer_type(tl.int32))
        for at in range(0, count, size):
            places = at + tl.arange(0, size)
            tl.store(out + places, tl.load(words + places, mask=places < count), mask=places < count)
    else:
        few = tl.arange(0, 16)  # flags: one byte each
        given = (contents + begin).to(tl.pointer_type(tl.int8)) + few
        inside = few < end - begin
        tl.store(target.to(tl.pointer_type(tl.int8)) + few, tl.load(given, mask=inside), mask=inside)


class FusedWriter:
    """Collects writes to fields, and carries them out by one launch. Items of one launch must not overlap."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        """``tensors``: ``[slots, width]`` each, contiguous, on the current GPU."""
        self._places = {
            name: (t.data_ptr(), t.stride(0) * t.element_size(), np.dtype(str(t.dtype).removeprefix("torch.")))
            for name, t in tensors.items()
        }
        pinned = torch.cuda.is_available()
        self._ring = [torch.empty(ROOM, dtype=torch.uint8, pin_memory=pinned) for _ in range(DEPTH)]
        self._turn = 0
        self._clear()

    def _clear(self) -> None:
        self._targets: list[int] = []
        self._lengths: list[int] = []
        self._chunks: list[np.ndarray[Any, Any]] = []
        self._flags: list[tuple[int, int]] = []  # bytes, behind all else: the rest stays aligned

    def scalars(self, name: str, slots: Sequence[int], values: Sequence[float]) -> None:
        """One value each for some slots."""
        base, stride, dtype = self._places[name]
        if dtype.itemsize < 4:
            self._flags += [(base + slot * stride, int(value)) for slot, value in zip(slots, values, strict=True)]
            return
        self._targets += [base + slot * stride for slot in slots]
        self._lengths += [dtype.itemsize] * len(slots)
        self._chunks.append(np.array(values, dtype).view(np.uint8))

    def row(self, name: str, slot: int, values: np.ndarray[Any, Any], start: int = 0) -> None:
        """A row's values from element ``start`` on."""
        base, stride, dtype = self._places[name]
        chunk = np.ascontiguousarray(values, dtype).view(np.uint8)
        self._targets.append(base + slot * stride + start * dtype.itemsize)
        self._lengths.append(len(chunk))
        self._chunks.append(chunk)

    def apply(self) -> None:
        """Put all that was collected on the current stream."""
        targets = self._targets + [target for target, _ in self._flags]
        n = len(targets)
        if not n:
            return
        head = np.zeros(2 * n + 1, np.int64)
        head[:n] = targets
        np.cumsum(self._lengths + [1] * len(self._flags), out=head[n + 1 :])
        flags = np.array([value for _, value in self._flags], np.uint8)
        total = head.nbytes + int(head[-1])
        self._turn = (self._turn + 1) % DEPTH
        if self._ring[self._turn].numel() < total:
            self._ring[self._turn] = torch.empty(2 * total, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        block = self._ring[self._turn]
        host = block.numpy()
        host[: head.nbytes] = head.view(np.uint8)
        np.concatenate([*self._chunks, flags], out=host[head.nbytes : total])
        write_items[(n,)](block.data_ptr(), block.data_ptr() + head.nbytes, n, BLOCK)
        self._clear()
