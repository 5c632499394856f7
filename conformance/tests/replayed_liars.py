"""Liars that the replay of a recording kills, and the profile quick does not: factories of devices."""

from __future__ import annotations

import zlib

import numpy as np
from hal_conformance.harness.lies import Lie, lay_over
from hal_core import DONE, hookimpl
from hal_core.devices.cpu.device import CpuDevice
from hal_core.slots.tasks import ENTERING


class StepZeroIsWarmUp(Lie):
    """Takes step 0 for a warm-up and does not advance the state; the kit's own steps count from 1."""

    def update_inputs(self, state, step, stream):
        return super().update_inputs(state, step, stream) if step.number else DONE


class RowsByRequestId(Lie):
    """Keeps a state's tokens in a table by request id: a resumed request misses the tokens generated since."""

    known = np.zeros((64, 2), np.int64)

    def register_state(self, state):
        self.known[...] = 0
        super().register_state(state)

    @hookimpl
    def insert_tasks(self, device, state, tasks, stream):
        ticket = super().insert_tasks(device, state, tasks, stream)
        for kind, slot, request in zip(tasks.plain["kinds"], tasks.plain["slots"], tasks.requests, strict=True):
            if kind in ENTERING:
                key = zlib.crc32(f"{state.name} {request.request_id}".encode())
                held, before = self.known[key % 64].tolist()
                if held != key:
                    self.known[key % 64] = key, request.total
                elif before < request.total:
                    late = state.view("token_ids")[slot, before : request.total]
                    self.async_set_value(device, late, late.dtype.storage.type(-1), stream)
        return ticket


def warm_up():
    return lay_over(CpuDevice(0, {}), StepZeroIsWarmUp)


def by_id():
    RowsByRequestId.known[...] = 0
    return lay_over(CpuDevice(0, {}), RowsByRequestId)
