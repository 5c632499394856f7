"""Probes of the maca device on the simulated accelerator, in a separate process: Paddle loads devices at import.

python probe.py     prints the answers by name as JSON; HAL_MACA_PLACE=sim and the simulator's options are set
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
from hal_core import Request, SamplingParams, StateConfig, Task, TaskKind, admit
from hal_core.errors import HalError
from hal_core.memory.views import ByteRange
from hal_sim import Accelerator

import hal


def insertion(device: Any, state: Any, count: int, name: str) -> dict[str, Any]:
    """The cost of inserting ``count`` requests, by the device's own counters and by the simulator's."""
    params = SamplingParams(
        temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=7, repetition_penalty=1.1, frequency_penalty=0.2,
        presence_penalty=0.3, min_tokens=1, max_tokens=9, stop_sequences=((1, 2), (3,)), bad_words=(4, 5),
        eos_token_ids=(6,), logprobs=1,
    )  # fmt: skip
    requests = [admit(Request(f"{name}{i}", [5, 6, 7], params), state.layout) for i in range(count)]
    tasks = [
        Task(TaskKind.PREFILL, i, request, num_scheduled_tokens=3, blocks=[9]) for i, request in enumerate(requests)
    ]
    with device.device.hold_stream(device.default_stream):
        below, own = Accelerator(0).counters(), device.counters()
        ticket = device.insert_tasks(state=state, tasks=tasks, stream=device.default_stream)
        cost, held = device.counters() - own, ticket.done()
    now = Accelerator(0).counters()
    ticket.wait(20)
    state.release(range(count))
    seen = {key: now[key] - below[key] for key in ("submissions", "copies", "launches", "blocked_wait", "fallback")}
    return {"own": [cost.submissions, cost.uploads, cost.launches, cost.host_waits], "seen": seen, "held": held}


def insertions() -> Any:
    with hal.open_device("maca") as device:
        state = device.state(StateConfig(num_slots=128, max_model_len=32))
        insertion(device, state, 128, "first")
        return {
            "name": device.name,
            "costs": [insertion(device, state, count, f"of {count} ") for count in (1, 128)],
            "races": [str(race) for race in Accelerator(0).races()],
        }


def ring(fences: Any = nullcontext()) -> Any:  # noqa: B008 (it holds nothing)
    """A small ring is reused again and again, with the host's writes to it reported to the checker."""
    with hal.open_device("maca", options={"ring_start": 4096, "ring_limit": 4096}) as device:
        staging, stream = device.device.staging, device.default_stream
        take = staging.take

        def take_and_report(nbytes: int) -> Any:
            span = take(nbytes)
            Accelerator(0).host_write(span.address, nbytes)
            return span

        staging.take = take_and_report
        state = device.state(StateConfig(num_slots=8, max_model_len=64))
        Accelerator(0).synchronize()
        Accelerator(0).reset()
        with fences:
            for round_ in range(20):
                values = np.arange(512) + round_
                device.async_set_value(target=state.view("token_ids"), value=values, stream=stream)
        device.device.default_stream.raw.synchronize()
        copied = device.device.copy_out(state.memory, [_range(state, "token_ids")], stream)
        device.device.default_stream.copy_stream.raw.synchronize()
        return {
            "right": bool((copied.data[0].view(np.int64) == np.arange(512) + 19).all()),
            "waits": device.counters().ring_waits,
            "races": len(Accelerator(0).races()),
        }


def copies_apart() -> Any:
    """A copy of one stream is held; that of another is not."""
    with hal.open_device("maca") as device:
        own = device.device
        one, other, state = own.stream(), own.stream(), device.state(StateConfig(num_slots=2, max_model_len=8))
        block, part = own.allocate(4096), _range(state, "seed")
        with own.hold_stream(one):
            held, free = own.copy_out(block, [ByteRange(0, 4096)], one), own.copy_out(state.memory, [part], other)
            free.wait(60)
            early = held.done()
        held.wait(60)
        return {"held": early, "free": free.done(), "then": held.done()}


def closed_while_held() -> Any:
    """A device that is closed while a write waits on its stream: whether the write still has all that it reads."""
    bound = hal.open_device("maca", options={"deadline": 0.1})
    state, stream = bound.state(StateConfig(num_slots=8, max_model_len=16)), bound.device.stream()
    copied = bound.device.last
    with bound.device._simulator.Stream.adopt(stream.handle).held():
        bound.async_set_value(target=state.view("seed"), value=np.arange(8), stream=stream)
        known = stream.stream_key in copied
        if known:  # otherwise Paddle ends the process
            bound.close()
        return {"known": known, "kept": hasattr(bound.device, "upload_stream")}


def unfenced_ring() -> Any:
    """The same, with fences that are never waited for: the checker must find that."""
    from hal_core.devices.events import RecordedEvent

    return ring(patch.object(RecordedEvent, "done", lambda self: True))


def _range(state: Any, name: str) -> ByteRange:
    place = state.layout.fields[name]
    return ByteRange(place.offset, place.stride * state.sizes.num_slots)


def two_devices() -> Any:
    """Two in one process, their work interleaved; a tensor of one is refused by the other."""
    import contextlib

    with contextlib.ExitStack() as stack:
        devices = [stack.enter_context(hal.open_device("maca", index=i)) for i in (0, 1)]
        states = [device.state(StateConfig(num_slots=8, max_model_len=16)) for device in devices]
        for step in range(10):
            for device, state in zip(devices, states, strict=True):
                value = np.arange(8) * (device.device.index + 1) + step
                device.async_set_value(target=state.view("seed")[::-1], value=value, stream=device.default_stream)
        parts = [
            device.device.copy_out(state.memory, [_range(state, "seed")], device.default_stream)
            for device, state in zip(devices, states, strict=True)
        ]
        for part in parts:
            part.wait(20)
        return {
            "names": [device.name for device in devices],
            "values": [part.data[0].view(np.int64)[::-1].tolist() for part in parts],
            "races": [str(race) for race in Accelerator(0).races()],
            "refused": _refusals(devices, states),
        }


def _refusals(devices: Any, states: Any) -> list[str]:
    import paddle

    stream = devices[0].default_stream
    targets = [
        states[1].view("seed"),
        paddle.to_tensor(np.zeros(4), place=paddle.CustomPlace("metax_gpu", 1)),
        paddle.to_tensor(np.zeros(4), place=paddle.CPUPlace()),
    ]
    messages = []
    for target in targets:
        try:
            devices[0].async_set_value(target=target, value=1, stream=stream)
            messages.append("taken")
        except HalError as error:
            messages.append(str(error))
    return messages


def bad_input() -> Any:
    messages = []
    for call in (
        lambda: hal.open_device("maca:7"),
        lambda: hal.open_device("maca", options={"colour": 1}),
        lambda: _other_kind().open(0, {}),
    ):
        try:
            call()
            messages.append("opened")
        except HalError as error:
            messages.append(str(error))
    return messages


def _other_kind() -> Any:
    from hal_paddle import CustomDevicePlugin
    from hal_paddle.custom_device import CustomDevice

    class Other(CustomDevicePlugin):
        name, kind, cure = "other", "no_such_gpu", "install its plugin"

        @classmethod
        def open(cls, index: int, options: Any) -> Any:
            return CustomDevice(cls, index, options)

    return Other


if __name__ == "__main__":
    answers = {}
    for probe in (
        insertions,
        ring,
        copies_apart,
        two_devices,
        bad_input,
        closed_while_held,
        unfenced_ring,
    ):  # the last leaves races behind
        answers[probe.__name__] = probe()
        Accelerator(0).synchronize()
        Accelerator(0).reset()
    sys.stdout.write("\n" + json.dumps(answers) + "\n")
