"""The lines that a vendor writes into the packages of ``hal new-plugin``, over the runtime of ``examples/queue``."""

from __future__ import annotations

from pathlib import Path

RUNTIME = Path(__file__).parents[1] / "examples/queue/hal_example_queue/runtime.py"
"""Streams that are worker threads, their events, and memory; it is installed as the module ``memory_runtime``."""

MOST = 60
"""Lines that finishing a package may take."""

ASYNC = {
    "import_above": """
        import ctypes
        import threading
        from collections import Counter
        from contextlib import contextmanager
        from functools import partial
        import numpy as np
        from memory_runtime import Mark, Queue, at
    """,
    "stream_create": "return Queue(Counter())",
    "stream_destroy": "stream.put(None)",
    "stream_wait": "stream.put(event.passed.wait)",
    "event_create": "return Mark()",
    "event_destroy": "pass",
    "event_record": "event.record(stream)",
    "event_query": "return event.passed.is_set()",
    "allocate": """
        block = np.empty(nbytes + 64, np.uint8)
        address = -(-block.ctypes.data // 64) * 64
        MEMORY[address] = block
        return address
    """,
    "free": "del MEMORY[address]",
    "copy_in": "stream.put(partial(ctypes.memmove, target, source, nbytes))",
    "copy_out": "stream.put(partial(ctypes.memmove, target, source, nbytes))",
    "copy_within": """
        to, source = array(target), array(value)
        own.raw.put(lambda: np.copyto(to, source.reshape(to.shape).copy()))
    """,
    "at_the_end": """
        MEMORY = {}


        def array(view):
            memory = at(view.memory.address, view.memory.nbytes)
            return np.ndarray(view.shape, view.dtype.storage, memory, view.offset, view.strides)
    """,
    "in_the_device": """
        @contextmanager
        def hold_stream(self, stream):
            gate = threading.Event()
            self.own_stream(stream).raw.put(gate.wait)
            try:
                yield
            finally:
                gate.set()
    """,
}
"""A runtime with streams: each primitive, copies between views, and the latch that shows asynchrony."""

SYNC = {
    "import_above": """
        from hal_core.devices import apply_to_host
        from memory_runtime import at
    """,
    "_allocate": """
        block = np.empty(nbytes + 64, np.uint8)
        self.block = block
        return -(-block.ctypes.data // 64) * 64
    """,
    "submit": "apply_to_host(plan, at(plan.memory.address, plan.memory.nbytes))",
    "_read": "return at(memory.address, memory.nbytes)[part.offset : part.end].copy()",
}
"""A runtime without streams."""

WRITTEN = {"async": ASYNC, "sync": SYNC, "paddle": {}, "torch": {}}


def finish(kind: str, package: Path) -> int:
    """Write the missing lines into a made package; return their number."""
    written = dict(WRITTEN[kind])
    if not written:
        return 0
    init = package / "__init__.py"
    text = init.read_text(encoding="utf-8")
    (probe,) = [line for line in text.splitlines() if "its probe is not written yet" in line]
    init.write_text(text.replace(probe, '        return Probe.yes("worker threads")'), encoding="utf-8")
    device = package / "device.py"
    text, count = device.read_text(encoding="utf-8"), 1
    above, end, within = (written.pop(name, "") for name in ("import_above", "at_the_end", "in_the_device"))
    for name, body in written.items():
        mark = f'        raise NotImplementedError("{name}")\n'
        assert text.count(mark) == 1, name
        text = text.replace(mark, indented(body, 8))
        count += lines(body)
    assert "NotImplementedError(" not in text
    first = "from hal_core import"
    text = text.replace(first, indented(above, 0) + first, 1) + "\n" + indented(within, 4) + "\n" + indented(end, 0)
    if within:
        text = text.replace("can_hold_stream=False", "can_hold_stream=True")
        count += 1
    device.write_text(text, encoding="utf-8")
    return count + lines(above) + lines(end) + lines(within)


def lines(text: str) -> int:
    """The lines of a text that are not blank."""
    return sum(bool(line.strip()) for line in text.splitlines())


def indented(text: str, columns: int) -> str:
    """The lines of a text, the first of them at a column."""
    given = [line for line in text.splitlines() if line.strip()]
    least = min([len(line) - len(line.lstrip()) for line in given], default=0)
    return "".join(" " * columns + line[least:] + "\n" for line in given)
