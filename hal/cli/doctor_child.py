"""Checks one plugin in a process of its own: import, probe, opening, and one step. The answer names the stage."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .opened import answer, described

if TYPE_CHECKING:
    from hal_core import BoundDevice

Tell = Callable[..., None]
"""Called with the stage that begins, "" when the check is over, and the findings of the last one: a child that dies
leaves the stage in which it died."""
SELECTION = "selection"
"""The first argument where no plugin is checked, but the choice without a name."""
PLUGIN = "plugin"
UPDATE_WAITS = "waits for the device first (no async_update; for the kit: update_waits in the Support)"
"""How ``update_inputs`` ran, of a device whose ticket alone would call it "async"."""


def check(name: str, *, step: bool, tell: Tell) -> None:
    """Check the plugin of a device. Its own errors are part of the answer."""
    from hal_core import HalError

    from hal.discovery import installed, load, probe

    (entry,) = [one for one in installed() if one.name == name and one.allowed]
    try:
        tell("its import")
        began = time.perf_counter()
        plugin = load(entry)
        tell("its probe", import_seconds=time.perf_counter() - began)
        found = probe(entry, plugin)
    except HalError as error:
        tell("", status="broken", reason=error.what, cure=error.cure)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    printed = os.fstat(sys.stdout.fileno()).st_size > 0  # the file that takes both streams
    status = "available" if found.available else "unavailable"
    tell("its opening", status=status, reason=found.reason, cure=found.cure, printed=printed)
    if not found.available:
        tell("")
        return
    from hal import open_device
    from hal.unwritten import named_unwritten

    before, began = locked_kilobytes(), time.perf_counter()
    try:
        device = open_device(name)
    except HalError as error:
        tell("", status="not opened", reason=error.what, cure=error.cure)
        return
    opened = {"seconds": time.perf_counter() - began, **described(device)}
    tell("its locked memory", opened=opened)
    try:
        with named_unwritten(device), contextlib.closing(device):
            tell("its step", locked=locked(device, before))
            if step:
                try:
                    with named_unwritten(device):
                        one_step(device, tell)
                except HalError as error:
                    tell("", step_error=" ".join(str(error).split()))
            tell("its closing")
    except HalError as error:
        tell("", status="broken", reason=error.what, cure=error.cure)
        return
    tell("")


def locked_kilobytes() -> int:
    """Return VmLck of this process: the memory counted as locked. A driver may lock memory that is not in it."""
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="utf-8") as status:
        return next((int(line.split()[1]) for line in status if line.startswith("VmLck:")), 0)
    return 0


def locked(device: BoundDevice, before: int) -> str:
    """Return whether host memory of the device is page-locked: "yes: …", "no: …", "unknown: …" or "not claimed"."""
    if not device.capabilities.pinned_host:
        return "not claimed"
    primitives: Any = getattr(device.device, "primitives", None)
    address = primitives.allocate_host(4096) if primitives is not None else None
    try:
        is_locked = _driver_says(device, address) if address else None
        grown = locked_kilobytes() - before
    finally:
        if address:
            primitives.free_host(address)
    if is_locked is not None:
        return "yes: the driver says so" if is_locked else "no: the driver says that its host memory is pageable"
    return (
        f"yes: VmLck grew by {grown} kB" if grown > 0 else "unknown: the driver cannot be asked, and VmLck is the same"
    )


def _driver_says(device: BoundDevice, address: int) -> bool | None:
    from hal.discovery import installed_in, load_and_make

    name = device.name.partition(":")[0].partition(" ")[0]
    entry = next((one for one in installed_in("hal.conformance") if one.name == name), None)
    if entry is None:
        return None
    support: Any = load_and_make(entry)
    found: bool | None = support.is_locked(device.device, address)
    return found


def one_step(device: BoundDevice, tell: Tell) -> None:
    """Run one prefill with each hook, and compare the record's token."""
    import numpy as np
    from hal_core import ALONE, MemorySink, PluginError, Request, SamplingParams, StateConfig, Step, Task, TaskKind

    token, modes, stream = 7, {}, device.default_stream
    state = device.state(StateConfig(num_slots=2, max_model_len=64, block_size=16, max_logprobs=0, vocab_size=100))
    request = state.admit(Request("doctor", [5, 6], SamplingParams(max_tokens=1)))
    task = Task(TaskKind.PREFILL, slot=1, request=request, num_scheduled_tokens=2, blocks=[1])
    step, sink = Step(0, {state.name: np.array([1], np.int32)}), MemorySink()
    tokens = np.array([[-1], [token]], np.int64)
    calls: dict[str, Callable[[], Any]] = {
        "insert_tasks": lambda: device.insert_tasks(state=state, tasks=[task], stream=stream),
        "async_set_value": lambda: device.async_set_value(
            target=state.view("sampled_token_ids"), value=tokens, stream=stream
        ),
        "broadcast_tokens": lambda: device.broadcast_tokens(state=state, group=ALONE, stream=stream),
        "update_inputs": lambda: device.update_inputs(state=state, step=step, stream=stream),
        "save_output": lambda: device.save_output(state=state, step=step, sink=sink, stream=stream),
    }
    ticket: Any = None
    for hook, call in calls.items():
        tell(hook)
        ticket = call()
        ticket.wait()
        modes[hook] = ticket.mode
        if hook == "update_inputs" and ticket.mode == "async" and not device.capabilities.async_update:
            modes[hook] = UPDATE_WAITS
    rows = [*state.take(ticket).rows()]
    found = [row.tokens.tolist() for row in rows]
    if found != [[token]]:
        raise PluginError(f"one step gave the tokens {found}, not {[[token]]}", cure="hal conform says which hook")
    tell("its closing", step=modes)


def selection() -> dict[str, Any]:
    """Return the device chosen without a name, or the reason that none is, and the devices passed over."""
    from hal_core import HalError

    from hal.selection import select

    passed: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            passed.append(record.getMessage().removesuffix("; trying the next device"))

    log = logging.getLogger("hal")
    log.setLevel(logging.INFO)
    log.addHandler(Kept())
    log.propagate = False
    try:
        choice = select()
    except HalError as error:
        return {"selected": None, "why": " ".join(str(error).split()), "passed_over": passed}
    why = "HAL_DEVICE names it" if os.environ.get("HAL_DEVICE", "").strip() else "the best priority that can be used"
    return {"selected": choice.entry.name, "why": why, "passed_over": passed}


def main(what: str, name: str, step: str, path: str) -> None:
    """Write the answer to a file, again after each stage."""
    if what == SELECTION:
        answer(path, {"stage": "the choice of a device"})
        answer(path, {"stage": "", **selection()})
        return
    found: dict[str, Any] = {}

    def tell(stage: str, **more: object) -> None:
        found.update(stage=stage, **more)
        answer(path, found)

    check(name, step=bool(step), tell=tell)


if __name__ == "__main__":
    main(*sys.argv[1:5])
