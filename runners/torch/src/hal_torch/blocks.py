"""The paged cache as blocks of bytes, which move with their requests to another worker (``--split``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from hal_core import DONE, Ticket
from hal_core.devices import poll
from torch import Tensor

if TYPE_CHECKING:
    from .model import Decoder

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class CacheBlocks:
    """A :class:`hal_core.handover.BlockCache`. A block is ``[layers, 2, block_size, kv_heads, head_dim]`` in the type
    of the cache: of each layer its keys, then its values.

    ``on_steps``: makes the stream of the steps torch's current one.
    """

    def __init__(self, decoder: Decoder, blocks: int, on_steps: Callable[[], AbstractContextManager[object]]) -> None:
        self._pairs, self._on_steps = list(zip(decoder.keys, decoder.values, strict=True)), on_steps
        self._one, self._dtype = decoder.keys[0].shape[1:], decoder.dtype
        self._device = decoder.device
        self._upload = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self.blocks = blocks
        self.block_bytes = 2 * len(self._pairs) * self._one.numel() * self._dtype.itemsize
        size, kv_heads, width = self._one
        self._facts = {
            "dtype": str(self._dtype).removeprefix("torch."),
            "block size": str(size),
            "layers": str(len(self._pairs)),
            "kv heads": str(kv_heads),
            "head dim": str(width),
            "layout": "tokens, heads; keys turned by halves",
        }

    def facts(self) -> Mapping[str, str]:
        """See :class:`hal_core.handover.BlockCache`."""
        return self._facts

    def read(self, blocks: Sequence[int]) -> Bytes:
        """See :class:`hal_core.handover.BlockCache`. Waits for the steps that were launched before."""
        with torch.no_grad(), self._on_steps():
            index = self._index(blocks)
            found = torch.stack([torch.stack([one[index] for one in pair], 1) for pair in self._pairs], 1)
            data: Bytes = found.flatten(1).cpu().view(torch.uint8).numpy()
        return data

    def write(self, blocks: Sequence[int], data: Bytes) -> Ticket:
        """See :class:`hal_core.handover.BlockCache`. In the order of the steps, for which the host does not wait."""
        with torch.no_grad(), torch.cuda.stream(self._upload):  # None: the current one, or no GPU
            index, given = self._index(blocks), torch.from_numpy(data).to(self._device, copy=True)
        with torch.no_grad(), self._on_steps():
            if self._upload is not None:
                torch.cuda.current_stream(self._device).wait_stream(self._upload)
            rows = given.view(self._dtype).view(len(blocks), len(self._pairs), 2, *self._one)
            for number, pair in enumerate(self._pairs):
                for which, one in enumerate(pair):
                    one.index_copy_(0, index, rows[:, number, which])
            if self._upload is None:
                return DONE
            return _Written(torch.cuda.current_stream(self._device).record_event(), index, given)

    def _index(self, blocks: Sequence[int]) -> Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self._device)


class _Written(Ticket):
    """End of a write. It keeps the write's source, whose memory belongs to the upload stream."""

    mode = "async"

    def __init__(self, event: torch.cuda.Event, *kept: Tensor) -> None:
        super().__init__()
        self._event, self._kept = event, kept

    def done(self) -> bool:
        return bool(self._event.query())

    def _block(self, timeout: float | None) -> bool:
        if timeout is not None:  # torch has no wait with a limit
            return poll(self.done, timeout)
        self._event.synchronize()
        return True

    def failure(self) -> BaseException | None:
        return None
