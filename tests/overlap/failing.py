"""A runner for ``hal run`` that gives each request one token, and raises in the steps it is told."""

from __future__ import annotations

import os


class FailingRunner:
    needs_host = ""
    vocab_size = 512

    def __init__(self, setup):
        self._device = setup.device
        self._raises = {int(step) for step in os.environ["FAILING_STEPS"].split(",")}
        self._breaks = os.environ.get("FAILING_BREAKS") == "1"

    def check(self, request): ...

    def launch(self, state, step, stream):
        if step.step.number in self._raises:
            if self._breaks:
                self._device.close()
            raise RuntimeError("out of memory:\n 2 GiB were asked for")
        for slot in step.step.order(state.name).tolist():
            self._device.async_set_value(target=state.view("sampled_token_ids")[slot], value=300, stream=stream)
        return step.step

    def propose(self, state, step, stream): ...
