"""A program of a user's, checked as one that has hal installed: strict mypy (`make lint`, `make dist`) and pyright."""

# pyright: strict

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

import numpy as np
from hal_core import (
    ByteRange,
    Device,
    MemorySink,
    Plugin,
    Probe,
    Request,
    SamplingParams,
    SlotState,
    StateConfig,
    StateField,
    Step,
    Stream,
    Task,
    TaskKind,
)
from hal_engine.sampling import SUPPORTED, SamplingRows, sample
from hal_engine.stepping import PlannedStep, Runner, RunnerSetup

import hal


class ChipPlugin(Plugin):
    """A vendor's."""

    name = "chip"

    @classmethod
    def probe(cls) -> Probe:
        return Probe.absent("there is no chip", "buy one")

    @classmethod
    def open(cls, index: int, options: Mapping[str, object]) -> Device:
        raise NotImplementedError


class Constant:
    """An integrator's runner: each token is the first."""

    needs_host, vocab_size = "", 10
    supports: Collection[str] = SUPPORTED

    def __init__(self, setup: RunnerSetup) -> None:
        self._device = setup.device

    def check(self, request: Request) -> None:
        assert request.params.max_tokens

    def launch(self, state: SlotState, step: PlannedStep, stream: Stream) -> Step:
        tokens = np.zeros((state.sizes.num_slots, 1), np.int64)
        self._device.async_set_value(target=state.view("sampled_token_ids"), value=tokens, stream=stream)
        return step.step

    def propose(self, state: SlotState, step: Step, stream: Stream) -> None: ...


def made(setup: RunnerSetup) -> Runner:
    """The maker that ``--runner`` names."""
    return Constant(setup)


def first_token(logits: np.ndarray[tuple[int, int], np.dtype[np.float32]], rows: SamplingRows) -> int:
    """Sample."""
    return int(sample(logits, rows, logprobs=None).tokens[0])


def worker() -> list[int]:
    """A worker's calls."""
    with hal.open_device("cpu") as device:
        fields = [StateField("bias", "int64", value="extra")]
        state = device.state(StateConfig(num_slots=2, max_model_len=64), fields=fields)
        request = state.admit(Request("r", [1, 2], SamplingParams(max_tokens=2), extra={"bias": 1}))
        task = Task(TaskKind.PREFILL, slot=0, request=request, num_scheduled_tokens=2, blocks=[0])
        device.insert_tasks(state=state, tasks=[task], stream=device.default_stream).wait()
        step = Step(0, {state.name: np.zeros(1, np.int32)})
        device.update_inputs(state=state, step=step, stream=device.default_stream)
        record = state.take(device.save_output(state=state, step=step, sink=MemorySink(), stream=device.default_stream))
        place = ByteRange(state.view("token_ids")[0].offset, 16)
        copied = device.copy_out(memory=state.memory, parts=[place], stream=device.default_stream)
        copied.wait()
        return [*copied.data[0].view("int64").tolist(), *(len(row.tokens) for row in record.rows())]


async def text() -> str:
    """A server's calls."""
    async with hal.AsyncEngine(device="cpu", executor=hal.Ranks(tp=2)) as engine:
        return "".join([part.text async for part in engine.generate("def", {"max_tokens": 2})])


if __name__ == "__main__":
    print(worker(), hal.generate("def main(", max_tokens=2), asyncio.run(text()))
