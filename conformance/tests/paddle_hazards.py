"""Probes of the four hazards of Paddle on the shared base of its devices, each run in a separate process.

python paddle_hazards.py NAME …    prints the answers as JSON, by name; on the simulated accelerator (adversarial mode)
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from typing import ClassVar

import numpy as np
from hal_core import Request, StateConfig, Task, TaskKind, admit
from hal_core.errors import HalError
from hal_core.memory.views import ByteRange
from hal_core.runtime.bound import bind
from hal_paddle import CustomDevicePlugin
from hal_sim.paddle_env import announce

PATIENCE = 30


class Hazardous(CustomDevicePlugin):
    """Our base on the accelerator, without any plugin's code."""

    name = kind = "hal_sim"
    cure = "install paddle-hal-sim"
    stand_ins: ClassVar[dict[str, str]] = {"sim": "hal_sim"}
    collective = ""


@contextlib.contextmanager
def opened(index=0):
    with bind(Hazardous.open(index, {"ring_start": 1 << 14, "ring_limit": 1 << 16})) as device:
        yield device


class Copies:
    """Every ``copy_`` of Paddle within the context: ``(target, source, blocking)`` as Paddle is asked for it."""

    def __enter__(self):
        import paddle

        self.made, self._true = [], paddle.Tensor.copy_

        def copy_(target, source, blocking=True):
            self.made.append(
                (target.is_contiguous(), str(target.place), source.data_ptr(), str(source.place), blocking)
            )
            return self._true(target, source, blocking)

        paddle.Tensor.copy_ = copy_
        return self

    def __exit__(self, *_):
        import paddle

        paddle.Tensor.copy_ = self._true


def field(device, state, name):
    """The bytes of a field, by one copy out."""
    place = state.layout.fields[name]
    copied = device.device.copy_out(
        state.memory, [ByteRange(place.offset, place.stride * state.sizes.num_slots)], device.default_stream
    )
    copied.wait(PATIENCE)
    return copied.data[0].view(place.field.dtype.storage).reshape(state.sizes.num_slots, place.width)


def views():
    """Strided and reversed targets, of state and of Paddle's own tensors, given lists, arrays and scalars."""
    import paddle

    wrong = []
    with opened() as device, Copies() as copies:
        state, stream = device.state(StateConfig(num_slots=6, max_model_len=16)), device.default_stream
        for name in ("token_ids", "block_tables", "stop_flags", "temperature"):
            view, should = state.view(name), field(device, state, name).copy()
            parts = [np.s_[::2], np.s_[::-1], np.s_[1:5, :1], np.s_[4:1:-1, ::3], np.s_[:, -1:]]
            for number, part in enumerate(parts):
                shape = should[part].shape
                value = (np.arange(np.prod(shape)).reshape(shape) + number) % 2
                given = value.astype(bool) if should.dtype == bool else value.astype(should.dtype)
                device.async_set_value(target=view[part], value=given, stream=stream)
                should[part] = given
            if not (field(device, state, name) == should).all():
                wrong.append(name)
        tensor = paddle.to_tensor(np.zeros((4, 6), np.float32), place=device.device.place)
        device.async_set_value(target=tensor[1:3, 2:5], value=[[1, 2, 3], [4, 5, 6]], stream=stream).wait(PATIENCE)
        should = np.zeros((4, 6), np.float32)
        should[1:3, 2:5] = [[1, 2, 3], [4, 5, 6]]
        if not (tensor.numpy() == should).all():
            wrong.append("a slice of a tensor")
    return {
        "wrong": wrong,
        "copies": len(copies.made),
        "strided": sum(not contiguous for contiguous, *_ in copies.made),
    }


def inside(device, address):
    """True for an address within the device's staging ring."""
    ring = device.device.staging
    blocks = [segment.block for segment in (*ring._draining, ring._segment)]
    return any(block.address <= address < block.address + len(block.buffer) for block in blocks)


def lifetime():
    """Values and batches that are changed and dropped while their stream is held, read when the copy runs."""
    outside, wrong, uploads = 0, [], 0
    with opened() as device, Copies() as copies:
        state, stream = device.state(StateConfig(num_slots=4, max_model_len=16)), device.default_stream
        device.default_stream.synchronize()
        copies.made.clear()
        with device.device.hold_stream(stream):
            value = np.arange(4, dtype=np.int64) + 100
            device.async_set_value(target=state.view("seed")[:, 0], value=value, stream=stream)
            value[:] = -1
            request = admit(Request("r", [5, 6, 7]), state.layout)
            tasks = [Task(TaskKind.PREFILL, 2, request, num_scheduled_tokens=3, blocks=[1])]
            ticket = device.insert_tasks(state=state, tasks=tasks, stream=stream)
            del value, tasks, request
            gc.collect()
            rubbish = [np.full(64, 0xCB, np.uint8) for _ in range(2000)]
            for _, to, address, of, blocking in copies.made:
                if "cpu" in of.lower() and "cpu" not in to.lower() and not blocking:
                    uploads += 1
                    outside += not inside(device, address)
        ticket.wait(PATIENCE)
        del rubbish
        if field(device, state, "seed")[[0, 1, 3], 0].tolist() != [100, 101, 103]:
            wrong.append("async_set_value")
        if field(device, state, "token_ids")[2, :3].tolist() != [5, 6, 7]:
            wrong.append("insert_tasks")
    return {"wrong": wrong, "uploads": uploads, "outside": outside}


def between():
    """A tensor of one device, with a write still pending, as a value for another: right, or refused."""
    import paddle

    queued = []
    true = paddle.Tensor._copy_to

    def copy_to(tensor, place, blocking):
        if not blocking and str(place) != str(tensor.place):
            queued.append(str(place))
        return true(tensor, place, blocking)

    paddle.Tensor._copy_to = copy_to
    try:
        with opened(0) as one, opened(1) as other:
            state = one.state(StateConfig(num_slots=4, max_model_len=16))
            source = paddle.to_tensor(np.zeros(4, np.int64), place=other.device.place)
            queued.clear()
            with other.device.hold_stream(other.default_stream):
                other.async_set_value(target=source, value=[5, 6, 7, 8], stream=other.default_stream)
            try:
                one.async_set_value(target=state.view("seed")[:, 0], value=source, stream=one.default_stream)
                text = "taken"
            except HalError as error:
                text = str(error)
            return {"said": text, "got": field(one, state, "seed")[:, 0].tolist(), "queued": queued}
    finally:
        paddle.Tensor._copy_to = true


if __name__ == "__main__":
    announce(Hazardous.kind)  # before Paddle is imported, which looks for devices then
    sys.stdout.write("\n" + json.dumps({name: globals()[name]() for name in sys.argv[1:]}) + "\n")
