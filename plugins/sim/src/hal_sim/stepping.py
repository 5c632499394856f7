"""The kernel of ``advance`` (``native/advance.cc``): what it is told of a state, once."""

from __future__ import annotations

import weakref
from struct import Struct
from typing import TYPE_CHECKING

from hal_sim.accelerator import Accelerator

if TYPE_CHECKING:
    from hal_core import SlotState
    from hal_core.devices import AsyncStream

POINTERS = (
    *("sampled_token_ids", "accept_tokens", "prompt_lens", "min_dec_len", "max_dec_len", "eos_num", "eos_token_ids"),
    *("stop_seqs_num", "stop_seqs_len", "stop_seqs", "split_role"),
    *("accept_num", "step_idx", "stop_flags", "stop_reason"),
    *("seq_lens_decoder", "seq_lens_encoder", "seq_lens_this_time", "next_tokens", "draft_num", "token_ids"),
)
"""Fields in the order of the kernel's struct ``Arguments``."""
ARGUMENTS = Struct(f"<{len(POINTERS)}Q7i")
"""Their addresses, then slots, max_tokens, max_accept, max_eos, stop_sequences, max_stop_length, speculative."""


class StepKernel:
    """Launches ``hal_advance``; the arguments of each state are made once."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._known: weakref.WeakKeyDictionary[SlotState, tuple[bytes, bytes]] = weakref.WeakKeyDictionary()

    def launch(self, state: SlotState, stream: AsyncStream, *, speculative: bool) -> None:
        """Advance every slot of the state, in stream order."""
        arguments = self._known.get(state)
        if arguments is None:
            arguments = self._known[state] = (_describe(state, False), _describe(state, True))
        self._accelerator.launch("hal_advance", arguments[speculative], stream.raw)


def _describe(state: SlotState, speculative: bool) -> bytes:
    sizes = state.sizes
    addresses = [state.memory.address + state.layout.fields[name].offset for name in POINTERS]
    return ARGUMENTS.pack(
        *addresses,
        sizes.slots,
        sizes.max_tokens,
        sizes.max_accept,
        sizes.max_eos,
        sizes.max_stop_sequences,
        sizes.max_stop_length,
        speculative,
    )
