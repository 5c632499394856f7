"""Write plans as torch operations: long runs are copies and fills, the rest one scatter for each element width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hal_core.devices import WIDTHS, Elements, ScatterColumns, WritePlan, elements

from .primitives import INTEGERS, Move

LONG = 32 << 10
"""Bytes from which on a run is an operation of its own: its indices would be as many bytes, or more."""
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class StagedMoves:
    """The bytes to upload for some plans, and the moves that read them. Memories of one storage share their scatters.

    ``widths``: those of which the backend has a scatter.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths, self.nbytes = widths, 0
        self.moves: list[Move] = []
        self._parts: list[tuple[int, Elements | Bytes, int]] = []
        self._elements: dict[int, tuple[torch.Tensor, dict[int, Elements]]] = {}

    def add(self, plan: WritePlan, storage: torch.Tensor, shift: int, columns: ScatterColumns | None) -> None:
        """Add a plan for the memory ``shift`` bytes into ``storage``."""
        plan = self._long_runs(plan, storage, shift)
        if plan.empty:
            return
        _, together = self._elements.setdefault(storage.data_ptr(), (storage, {}))
        for width, part in elements(plan, shift, max(self.widths), columns).items():
            fits = max(one for one in self.widths if one <= width)
            into, parts = together.setdefault(fits, Elements(fits)), width // fits
            for places in part.indices if parts == 1 else [_split(piece, parts) for piece in part.indices]:
                into.add(places, [])
            into.values += part.values

    def close(self) -> StagedMoves:
        """Lay the elements out, once all plans are added."""
        for storage, together in self._elements.values():
            for width in [width for width in WIDTHS if width in together]:
                part = together[width]
                indices, values = self._take(part.count * 8), self._take(part.count * width)
                target = storage[: storage.numel() // width * width].view(INTEGERS[width])
                self.moves.append(Move(target, values=values, indices=indices, count=part.count))
                self._parts.append((indices, part, values))
        return self

    def copy(self, target: torch.Tensor, data: Bytes) -> None:
        """Add a copy of host bytes to a tensor of any strides."""
        values = self._take(data.nbytes)
        self.moves.append(Move(target, values=values))
        self._parts.append((values, data, 0))

    def _long_runs(self, plan: WritePlan, storage: torch.Tensor, shift: int) -> WritePlan:
        """Add the long runs, and return the plan without them."""
        long = plan.writes["nbytes"] >= LONG
        if not long.any():
            return plan
        for dst, source, nbytes, pattern in plan.writes[long].tolist():
            at, cycle = dst + shift, source.to_bytes(8, "little")
            target = storage[at : at + nbytes]
            if pattern and at % pattern == 0 and nbytes % pattern == 0:
                value = int.from_bytes(cycle[:pattern], "little", signed=pattern > 1)
                self.moves.append(Move(target.view(INTEGERS[pattern]), value))
            elif pattern:
                self.copy(target, np.frombuffer((cycle * (nbytes // 8 + 1))[:nbytes], np.uint8))
            else:
                self.copy(target, plan.payload[source : source + nbytes])
        return WritePlan(plan.memory, plan.writes[~long], [plan.payload], plan.records)

    def _take(self, nbytes: int) -> int:
        at, self.nbytes = self.nbytes, self.nbytes + -(-nbytes // 16) * 16
        return at

    def fill(self, buffer: Bytes) -> None:
        """Write the bytes."""
        for at, part, values in self._parts:
            if isinstance(part, Elements):
                where = buffer[at : at + part.count * 8].view(np.int64)
                part.fill(where, buffer[values : values + part.count * part.width])
            else:
                buffer[at : at + part.nbytes] = part


def _split(places: Any, parts: int) -> Any:  # noqa: ANN401 (indices)
    """Return the indices of the narrower elements of wider ones."""
    return (places.reshape(-1, 1) * parts + np.arange(parts)).reshape(-1)
