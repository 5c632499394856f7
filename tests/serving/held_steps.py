"""A runner for `hal serve` whose steps run one by one: each waits for a permit, a byte of a pipe of the test.

The folder of `HELD_STEPS` has the pipe `permits` and the file `steps`, a line for each launched step: the admission ids
of its requests. The permit `.` is for one step; `a` too, after which no step is launched until an abort has been
received; `x` ends the process, in order; `*` is for all further steps.
"""

import os
import sys
from pathlib import Path

from hal_engine.distributed.control_messages import Abort
from hal_engine.generation.process import CallerEnd
from hal_engine.sampling.rows import SUPPORTED

HANGS = 120


class HeldRunner:
    needs_host, vocab_size, supports = "", 512, SUPPORTED

    def __init__(self, setup):
        folder = Path(os.environ["HELD_STEPS"])
        self._device, self._steps = setup.device, folder / "steps"
        self._permits = os.open(folder / "permits", os.O_RDONLY)
        self._held, self._awaits_abort = True, False
        CallerEnd.receive = self._receive_abort_first(CallerEnd.receive)

    def _receive_abort_first(self, receive):
        def received(channel, timeout):
            message = receive(channel, HANGS if self._awaits_abort else timeout)
            if isinstance(message, Abort):
                self._awaits_abort = False
            return message

        return received

    def check(self, request): ...

    def propose(self, state, step, stream): ...

    def launch(self, state, step, stream):
        slots = step.step.order(state.name).tolist()
        with self._steps.open("a", encoding="utf-8") as file:
            file.write(" ".join(str(state.host_table.admission_ids[slot]) for slot in slots) + "\n")
        if self._held:
            permit = os.read(self._permits, 1)
            self._held, self._awaits_abort = permit != b"*", permit == b"a"
            if permit == b"x":
                sys.exit(143)
        for slot in slots:
            self._device.async_set_value(target=state.view("sampled_token_ids")[slot], value=300, stream=stream)
        return step.step
