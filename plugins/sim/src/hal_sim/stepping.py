"""The kernel of ``update_inputs`` (``native/update_inputs.cc``) and its arguments, made once per state."""

from __future__ import annotations

import weakref
from struct import Struct
from typing import TYPE_CHECKING

from hal_core.devices import STEP_FIELDS

from hal_sim.accelerator import Accelerator

if TYPE_CHECKING:
    from hal_core import SlotState
    from hal_core.devices import AsyncStream

ARGUMENTS = Struct(f"<{len(STEP_FIELDS)}Q7i")
"""The kernel's struct ``Arguments``: the addresses of ``STEP_FIELDS``, then
slots, max_tokens, max_accept, max_eos, stop_sequences, max_stop_length, speculative."""


class StepKernel:
    """Launches ``hal_update_inputs``; the arguments of each state are made once."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._known: weakref.WeakKeyDictionary[SlotState, tuple[bytes, bytes]] = weakref.WeakKeyDictionary()

    def launch(self, state: SlotState, stream: AsyncStream, *, speculative: bool) -> None:
        """Advance every slot of the state, in stream order."""
        arguments = self._known.get(state)
        if arguments is None:
            arguments = self._known[state] = (_describe(state, False), _describe(state, True))
        self._accelerator.launch("hal_update_inputs", arguments[speculative], stream.raw)


def _describe(state: SlotState, speculative: bool) -> bytes:
    sizes = state.sizes
    addresses = [state.memory.address + state.layout.fields[name].offset for name in STEP_FIELDS]
    return ARGUMENTS.pack(
        *addresses,
        sizes.num_slots,
        sizes.max_model_len,
        sizes.max_accept,
        sizes.max_eos,
        sizes.max_stop_sequences,
        sizes.max_stop_length,
        speculative,
    )
