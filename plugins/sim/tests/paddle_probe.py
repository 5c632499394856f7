"""Probes that need a Paddle with the simulated device, in a separate process; prints their answers as JSON.

python paddle_probe.py NAME,NAME,…
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from hal_sim import Accelerator, options, paddle_env

NAME = os.environ.get("HALSIM_NAME", "hal_sim")
PLACE = paddle.CustomPlace(NAME, 0)
device = Accelerator(0)


def changes(call: Callable[[], Any]) -> dict[str, int]:
    """The counters that a call changes."""
    before = device.counters()
    call()
    return {k: v - before[k] for k, v in device.counters().items() if v != before[k]}


def tensors() -> Any:
    data = np.arange(12, dtype=np.float32).reshape(3, 4)
    t = paddle.to_tensor(data, place=PLACE)
    view = t[1:3, 1:3]
    return {
        "types": paddle.device.get_all_custom_device_type(),
        "count": paddle.device.device_count(NAME) if hasattr(paddle.device, "device_count") else None,
        "place": str(t.place),
        "device memory": device._native.is_device_memory(t.data_ptr()),
        "round trip": bool((t.numpy() == data).all()),
        "bytes": device.peek(t.data_ptr(), 48) == data.tobytes(),
        "view shares": view.data_ptr() - t.data_ptr(),
        "view": view.numpy().tolist(),
        "contiguous": view.contiguous().numpy().tolist(),
        "races": [str(r) for r in device.races()],
    }


def held_stream() -> Any:
    """Paddle's own current stream, held: asynchronous calls return, and no work has run yet."""
    stream = paddle_env.current_stream(name=NAME)
    t = paddle.to_tensor(np.zeros(4, np.float32), place=PLACE)
    source = paddle.to_tensor(np.ones(4, np.float32), place=paddle.CPUPlace())
    address = t.data_ptr()
    with stream.held():
        t.copy_(source, False)
        before = np.frombuffer(device.peek(address, 16), np.float32).tolist()
        pending = stream.pending
    after = t.numpy().tolist()
    return {"before": before, "pending": pending, "after": after, "address kept": t.data_ptr() == address}


def host_source() -> Any:
    """Paddle does not keep the host source alive: with pageable memory read late, a change of it arrives."""
    with options(mode=2, staged=0):
        t = paddle.to_tensor(np.zeros(4, np.float32), place=PLACE)
        source = paddle.to_tensor(np.ones(4, np.float32), place=paddle.CPUPlace())
        t.copy_(source, False)
        device.host_write(source.data_ptr(), 16)
        # Paddle 3.1 crashes in copy_ without its second argument, on every place.
        source.copy_(paddle.to_tensor(np.full(4, 9, np.float32), place=paddle.CPUPlace()), True)
        return {"seen": t.numpy().tolist(), "races": len(device.races())}


def kernels() -> Any:
    """The operators that are ours: asynchronous, one launch, no fallback."""
    paddle.set_device(f"{NAME}:0")
    t = paddle.to_tensor(np.arange(12, dtype=np.float32).reshape(3, 4))
    index = paddle.to_tensor(np.array([2, 0]))
    rows = paddle.to_tensor(np.array([[1.0] * 4, [2.0] * 4], np.float32))
    twice = paddle.to_tensor(np.array([1, 1]))
    halves = [paddle.full([3], 0.1, dtype).astype("float32").numpy().tolist() for dtype in ("float16", "bfloat16")]
    strided = paddle.to_tensor(np.zeros((3, 4), np.float32))
    return {
        "version": paddle.__version__,
        "full": changes(lambda: paddle.full([4], 3, "int64")),
        "assign": changes(lambda: paddle.assign(t)),
        "contiguous": changes(lambda: t[:, 1:3].contiguous()),
        "fill_": changes(lambda: strided.fill_(5)),
        "fill of a slice": changes(lambda: strided[1:2].fill_(7)),
        "filled": strided.numpy()[:, 0].tolist(),
        "copy into a view": changes(lambda: strided[0:1, 1:3].copy_(rows[0:1, 0:2], False)),
        "copied": strided.numpy()[0].tolist(),
        "scatter": paddle.scatter(t, index, rows).numpy()[:, 0].tolist(),
        "scatter adds": paddle.scatter(t, twice, rows, overwrite=False).numpy()[:, 0].tolist(),
        "scatter_": changes(lambda: paddle.scatter_(t, index, rows)),
        "scattered": t.numpy()[:, 0].tolist(),
        "full of each type": [
            paddle.full([2], 3, dtype).cpu().astype("float32").numpy().tolist()
            for dtype in (
                "bool",
                "uint8",
                "int8",
                "int16",
                "int32",
                "int64",
                "float16",
                "bfloat16",
                "float32",
                "float64",
            )
        ],
        "halves": halves,
        "races": [str(r) for r in device.races()],
    }


def streams() -> Any:
    """A kernel on stream B read through stream A: a race without an event, and none with it."""
    paddle.set_device(f"{NAME}:0")
    answers = {}
    with options(mode=2):
        for ordered in (False, True):
            t = paddle.to_tensor(np.zeros(4, np.float32))
            device.reset()
            side = paddle.device.Stream(f"{NAME}:0")
            with paddle.device.stream_guard(side):
                t.fill_(5)
            event = side.record_event()
            if ordered:
                paddle.device.current_stream(f"{NAME}:0").wait_event(event)
            seen = t.numpy().tolist()
            paddle.device.synchronize(f"{NAME}:0")
            answers[str(ordered)] = {"seen": seen, "races": sorted({r.first.kind for r in device.races()})}
    return answers


def fallback() -> Any:
    """An operator without a kernel falls back to the CPU, visible as synchronous copies; or is refused with the flag
    off.
    """
    paddle.set_device(f"{NAME}:0")
    t = paddle.to_tensor(np.ones(4, np.float32))
    moved = changes(lambda: paddle.cos(t))
    plain = changes(lambda: paddle.to_tensor(np.ones(4, np.float32)))
    paddle.set_flags({"FLAGS_enable_api_kernel_fallback": False})
    try:
        paddle.cos(t)
        refused = ""
    except Exception as error:  # noqa: BLE001 - Paddle's error types differ between versions
        refused = str(error)
    return {"moved": moved, "plain copy": plain, "refused": "cos" in refused and "not registered" in refused}


def out_of_memory() -> Any:
    with options(memory_mb=1):
        try:
            paddle.to_tensor(np.zeros(4 << 20, np.uint8), place=PLACE)
        except Exception as error:  # noqa: BLE001 - see above
            text = str(error)
    t = paddle.to_tensor(np.zeros(4, np.float32), place=PLACE)
    return {"named": "out of memory" in text.lower() or "ResourceExhausted" in text, "works on": t.numpy().tolist()}


def device_fault() -> Any:
    """A kernel that goes wrong makes Paddle's next wait fail, once."""
    t = paddle.to_tensor(np.zeros(4, np.float32), place=PLACE)
    device.fill(t.data_ptr() + (1 << 30), 4, 0, 4, paddle_env.current_stream(name=NAME))
    try:
        t.numpy()
        text = ""
    except Exception as error:  # noqa: BLE001 - see above
        text = str(error)
    return {"named": "CustomDevice error" in text or "error code" in text, "then": t.numpy().tolist()}


def run(name: str) -> Any:
    try:
        return globals()[name]()
    except Exception:  # noqa: BLE001 - the other probes still run; the test shows the text
        return traceback.format_exc()
    finally:
        device._native.device_wait(0, -1)
        device.reset()


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps({name: run(name) for name in sys.argv[1].split(",")}) + "\n")
