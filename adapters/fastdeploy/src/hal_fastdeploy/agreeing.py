"""What tensor-parallel ranks agree on after sampling: the four tensors of a speculative step, by one collective.

FastDeploy's runners broadcast ``accept_tokens``, ``accept_num``, ``step_idx`` and ``stop_flags`` one after the other.
Here the four lie in one block of memory, and one slice is broadcast. Move them before graphs are captured: graphs hold
addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hal_core import BoundDevice, ByteRange, Group, InvalidValue, Stream, Ticket, View

NAMES = ("accept_tokens", "accept_num", "step_idx", "stop_flags")
ALIGNMENT = 64
"""Bytes; each tensor begins on a cache line."""


class Agreement:
    """The tensors ``names`` of a runner's batch in one block, with their values, and the broadcast of it.

    ``batches``: ``share_inputs``, and a proposer's inputs that hold some of the tensors by reference, as mappings or as
    objects with dict-style access to their attributes. In each of them a tensor is replaced by the moved one.
    """

    def __init__(
        self,
        device: BoundDevice,
        batches: Sequence[Any],
        *,
        tensor_parallel_size: int,
        rank: int,
        data_parallel_rank: int = 0,
        names: Sequence[str] = NAMES,
        stream: Stream | None = None,
    ) -> None:
        first = data_parallel_rank * tensor_parallel_size  # the source, as upstream's
        if not 0 <= rank < tensor_parallel_size:
            cure = "give the rank within its tensor-parallel group"
            raise InvalidValue(f"rank {rank} of {tensor_parallel_size}", cure=cure, argument="rank")
        self.device, self.stream = device, device.default_stream if stream is None else stream
        self.group = Group(tuple(range(first, first + tensor_parallel_size)), first + rank)
        old = {name: batches[0][name] for name in names}
        views = {name: device.device.resolve(tensor) for name, tensor in old.items()}
        begins, end = [], 0
        for view in views.values():
            begins.append(end)
            end += -(-view.size * view.dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self.memory, self.part = device.device.allocate(end), ByteRange(0, end)
        self.batch, self.moved = batches[0], dict[str, object]()
        for (name, view), begin in zip(views.items(), begins, strict=True):
            moved = View.contiguous(self.memory, begin, view.shape, view.dtype)
            device.async_set_value(target=moved, value=view, stream=self.stream).wait()
            self.moved[name] = self._replace(batches, old[name], moved)

    def __call__(self) -> Ticket:
        """Make the tensors equal to those of the group's first rank. Raises :class:`GroupLost` if a rank is lost, and
        :class:`InvalidValue` for a replaced tensor: the block has no longer what the runner computes with."""
        if replaced := [name for name, tensor in self.moved.items() if self.batch[name] is not tensor]:
            what = f"{', '.join(replaced)}: replaced since the block was made"
            raise InvalidValue(what, cure="make the Agreement again, before graphs are captured", argument="batches")
        return self.device.device.communicator(self.group).broadcast(self.memory, self.part, self.stream)

    def _replace(self, batches: Sequence[Any], old: object, moved: View) -> object:
        new = moved if isinstance(old, View) else self.device.device.tensor(moved)
        for batch in batches:
            held = batch if isinstance(batch, Mapping) else vars(batch)
            for name in [name for name, tensor in held.items() if tensor is old]:
                batch[name] = new
        return new
