"""The kernel of ``update_inputs`` and its parameters, made once per state."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core.devices import STEP_FIELDS

from .driver import Driver
from .launching import Kernel, Kernels
from .structs import struct

if TYPE_CHECKING:
    from hal_core import SlotState

NUMBERS = ("slots", "max_tokens", "max_accept", "max_eos", "stop_sequences", "max_stop_length", "speculative", "unused")
STATE = struct(*[(name, "<u8") for name in STEP_FIELDS], *[(name, "<i4") for name in NUMBERS])
"""The kernel's struct ``State``: the addresses of ``STEP_FIELDS``, and sizes."""
THREADS = 32


class StepKernel:
    """Launches ``hal_update_inputs``; the parameters of each state are made once."""

    def __init__(self, driver: Driver, kernels: Kernels) -> None:
        self._kernel = Kernel(driver, kernels.steps, "hal_update_inputs", STATE)
        self._known: weakref.WeakKeyDictionary[Any, tuple[bytes, bytes]] = weakref.WeakKeyDictionary()

    def register_state(self, state: SlotState) -> None:
        """Describe a state, once."""
        params = self._describe(state)
        plain = params.tobytes()
        params["speculative"] = 1
        self._known[state] = plain, params.tobytes()

    def launch(self, state: SlotState, stream: int, *, speculative: bool) -> None:
        """Advance every slot of the state, in stream order."""
        self._kernel.load(self._known[state][speculative])
        self._kernel.launch(-(-state.sizes.num_slots // THREADS), THREADS, stream)

    def capture(self, state: SlotState, stream: int, *, speculative: bool) -> None:
        """Do the same into the graph that the stream is captured into."""
        self._kernel.load(self._known[state][speculative])
        self._kernel.capture(-(-state.sizes.num_slots // THREADS), THREADS, stream)

    @staticmethod
    def _describe(state: SlotState) -> np.ndarray[Any, Any]:
        sizes = state.sizes
        params = np.zeros(1, STATE)
        for name in STEP_FIELDS:
            params[name] = state.memory.address + state.layout.fields[name].offset
        params["slots"], params["max_tokens"], params["max_accept"] = (
            sizes.num_slots,
            sizes.max_model_len,
            sizes.max_accept,
        )
        params["max_eos"], params["stop_sequences"] = sizes.max_eos, sizes.max_stop_sequences
        params["max_stop_length"] = sizes.max_stop_length
        return params
