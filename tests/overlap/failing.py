"""Runners for ``hal run`` that give each request one token a step, and raise in the given steps, or in ``check``."""

import os

import numpy as np
from hal_core import InvalidValue
from hal_engine.sampling.rows import SUPPORTED


class FailingRunner:
    needs_host, drafts_on_device = "", True
    vocab_size, supports = 512, SUPPORTED

    def __init__(self, setup):
        self._device = setup.device
        self._raises = {
            method: {int(step) for step in os.environ.get(f"FAILING_{method.upper()}", "").split(",") if step}
            for method in ("steps", "drafts")
        }
        self._breaks = os.environ.get("FAILING_BREAKS") == "1"

    def check(self, request): ...

    def launch(self, state, step, stream):
        self._raise("steps", step.step)
        fields = {"accept_tokens": 300, "accept_num": 1} if state.speculative else {"sampled_token_ids": 300}
        for slot in step.step.order(state.name).tolist():
            for name, value in fields.items():
                self._device.async_set_value(target=state.view(name)[slot], value=value, stream=stream)
        return step.step

    def propose(self, state, step, stream):
        self._raise("drafts", step)

    def _raise(self, method, step):
        if step.number in self._raises[method]:
            if self._breaks:
                self._device.close()
            raise RuntimeError("out of memory:\n 2 GiB were asked for")


class CheckingRunner(FailingRunner):
    """Refuses requests by their lengths, and raises if a step would run one."""

    supports = SUPPORTED - {"logprobs"}

    def launch(self, state, step, stream):
        part = state.layout.groups["step_input"]
        (copied := self._device.copy_out(memory=state.memory, parts=[part], stream=stream)).wait()
        column = {name: values[:, 0] for name, values in state.columns(copied.data[0], part).items()}
        runs = (column["seq_lens_this_time"] > 0) & ~column["stop_flags"]
        refused = runs & np.isin(column["max_dec_len"], (9, 11))
        if refused.any():
            raise AssertionError(f"slots {np.flatnonzero(refused).tolist()} run a request that was refused")
        return super().launch(state, step, stream)

    def check(self, request):
        if request.params.max_tokens == 9:
            raise InvalidValue("nine", cure="ask for ten", argument="max_tokens")
        if request.params.max_tokens == 11 and not request.output:
            raise OSError("no table \udc80 for eleven")
        if request.output:
            raise InvalidValue("it has begun", cure="begin anew", argument="output")
