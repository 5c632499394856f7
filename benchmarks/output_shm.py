"""Is a shared-memory transport worth it for large frames? The same frames through zmq and through iceoryx2, in one run.

    python benchmarks/output_shm.py [--samples 200] [--rounds 5]

It needs iceoryx2; docs/decisions/0010-system-v-and-shared-memory.md has the answer.

Both ways encode, move and decode the same record; over iceoryx2 nothing is acknowledged, counted or kept, so these
are the best numbers that a transport built on it could have. "one way" is from the first byte encoded to the record
decoded.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import statistics
import time
from multiprocessing import get_context
from typing import Any

import output
from hal_core.frames import decode, encode


def services(name: str) -> tuple[Any, Any, Any]:
    """A node, the service for the frames and the one that wakes the reader. The node must be kept."""
    import iceoryx2 as iox

    node = iox.NodeBuilder.new().create(iox.ServiceType.Ipc)
    frames = (
        node.service_builder(iox.ServiceName.new(name))
        .publish_subscribe(iox.Slice[ctypes.c_uint8])
        .subscriber_max_buffer_size(64)
        .open_or_create()
    )
    return node, frames, node.service_builder(iox.ServiceName.new(name)).event().open_or_create()


def send_shared(name: str, pipe: Any, samples: int) -> None:  # noqa: ANN401  # a Connection
    _node, frames, event = services(name)
    publisher = frames.publisher_builder().initial_max_slice_len(1 << 20).create()
    notifier, source = event.notifier_builder().create(), output.large()
    pipe.recv()
    time.sleep(0.2)
    for _ in range(samples):
        object.__setattr__(source, "step", time.monotonic_ns())
        frame = encode(source, session=1, sender=0, sequence=1)
        loan = publisher.loan_slice_uninit(len(frame))
        ctypes.memmove(loan.payload().as_ptr(), frame, len(frame))
        loan.assume_init().send()
        notifier.notify()
        time.sleep(output.PACE)
    time.sleep(0.5)


def shared(samples: int) -> list[float]:
    import iceoryx2 as iox

    name = f"hal-bench-{time.monotonic_ns()}"
    _node, frames, event = services(name)
    subscriber, listener = frames.subscriber_builder().create(), event.listener_builder().create()
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=send_shared, args=(name, there, samples))
    process.start()
    here.send("go")
    found: list[float] = []
    while len(found) < samples and process.is_alive():
        listener.timed_wait(iox.Duration.from_millis(100))
        while (sample := subscriber.receive()) is not None:
            view = sample.payload().as_memory_view().cast("B")
            record = decode(view).record
            found.append((time.monotonic_ns() - record.step) / 1000)
    process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if importlib.util.find_spec("iceoryx2") is None:
        print("iceoryx2 is not installed; nothing to compare")
        return
    found: dict[str, list[tuple[float, float]]] = {"zmq": [], "iceoryx2": []}
    for _ in range(options.rounds):
        for name, measure in (("zmq", output.records), ("iceoryx2", shared)):
            cuts = statistics.quantiles(measure(options.samples)[options.samples // 10 :], n=100)
            found[name].append((cuts[49], cuts[98]))
    for name, pairs in found.items():
        p50, p99 = (statistics.median(values) for values in zip(*pairs, strict=True))
        print(f"one way, 540 KB of log-probabilities, {name:9} p50 {p50:7.1f} us  p99 {p99:7.1f} us")
    ratio = statistics.median(z[0] / i[0] for z, i in zip(found["zmq"], found["iceoryx2"], strict=True))
    print(f"zmq / iceoryx2: {ratio:.2f} (p50, median of {options.rounds} rounds)")


if __name__ == "__main__":
    main()
