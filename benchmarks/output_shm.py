"""Large frames through ZeroMQ (ipc://) and in shared memory (shm://), in one run.

    python benchmarks/output_shm.py [--samples 200] [--rounds 5] [--frames 2000]

It needs iceoryx2 (``pip install 'iceoryx2>=0.10,<0.11'``). docs/evidence/output.md has what it printed.

"one way" is from the first byte encoded to the record decoded, a frame each 2 ms. "raw bytes" are new each time and
nobody looks at them: through ZeroMQ, and in memory of iceoryx2 with a word through ZeroMQ. "iceoryx2 alone" is the same
frame over iceoryx2 with its own events, where nothing is acknowledged, counted or kept: what any transport built on it
could have at best. "burst" is as many as fit, acknowledged.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import output
import zmq
from hal_core.frames.envelope import decode, encode
from hal_core.output.records import OutputRecord

from hal.reading import OutputReader
from hal.transport import open_sink, private_ipc_url, release_ipc


def ours(samples: int, *, shared: bool) -> list[float]:
    """One way in us through a sink and a reader."""
    url = private_ipc_url(shared=shared)
    with OutputReader(url, timeout=20) as reader:
        process = output.started(output.send_records, url, samples)
        found = [(time.monotonic_ns() - record.step) / 1000 for record in reader]
        process.join()
        if shared and reader.counters()["shared"] < 0.9 * samples:
            raise RuntimeError(f"most frames came through the socket: {reader.counters()}")
    release_ipc(url)
    return found


class Fixed(output.Stamped):
    """The same record each time."""

    def resolve(self) -> OutputRecord:
        return self.source


def send_burst(url: str, pipe: Any, frames: int) -> None:  # noqa: ANN401  # a Connection
    sink, source = open_sink(url, capacity=8), Fixed(output.large())
    pipe.recv()
    sink.put(source)
    while sink.counters()["unacknowledged"] or not sink.counters()["frames"]:
        time.sleep(0.001)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(frames):
        sink.put(source)
    while sink.counters()["unacknowledged"] or sink.counters()["queued"]:
        time.sleep(0.001)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    sink.close(20)
    pipe.send((wall, cpu))


def burst(frames: int, *, shared: bool) -> tuple[float, float, float]:
    """Frames a second, and us of CPU a frame of worker and reader, all threads."""
    url = private_ipc_url(shared=shared)
    context = get_context("spawn")
    here, there = context.Pipe()
    with OutputReader(url, timeout=20) as reader:
        process = context.Process(target=send_burst, args=(url, there, frames))
        process.start()
        here.send("go")
        begun = resource.getrusage(resource.RUSAGE_SELF)
        got = sum(1 for _ in reader)
        ended = resource.getrusage(resource.RUSAGE_SELF)
        wall, cpu = here.recv()
        process.join()
    release_ipc(url)
    assert got == frames + 1
    reading = ended.ru_utime - begun.ru_utime + ended.ru_stime - begun.ru_stime
    return frames / wall, 1e6 * cpu / frames, 1e6 * reading / frames


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


def send_alone(name: str, pipe: Any, samples: int) -> None:  # noqa: ANN401  # a Connection
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


def alone(samples: int) -> list[float]:
    """One way in us over iceoryx2 and nothing else."""
    import iceoryx2 as iox

    name = f"hal-bench-{time.monotonic_ns()}"
    _node, frames, event = services(name)
    subscriber, listener = frames.subscriber_builder().create(), event.listener_builder().create()
    process = output.started(send_alone, name, samples)
    found: list[float] = []
    while len(found) < samples and process.is_alive():
        listener.timed_wait(iox.Duration.from_millis(100))
        while (sample := subscriber.receive()) is not None:
            view = sample.payload().as_memory_view().cast("B")
            record = decode(view).record
            found.append((time.monotonic_ns() - record.step) / 1000)
    process.join()
    return found


def send_raw_shared(address: str, pipe: Any, samples: int) -> None:  # noqa: ANN401  # a Connection
    name, url = address.split(" ")
    _node, frames, _event = services(name)
    publisher = frames.publisher_builder().initial_max_slice_len(1 << 20).create()
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(url)
    source = encode(output.large(), session=1, sender=0, sequence=1)
    pipe.recv()
    time.sleep(0.2)
    for _ in range(samples):
        data = bytes(bytearray(source))
        stamp = time.monotonic_ns()
        loan = publisher.loan_slice_uninit(len(data))
        ctypes.memmove(loan.payload().as_ptr(), data, len(data))
        loan.assume_init().send()
        socket.send(stamp.to_bytes(8, "little"))
        time.sleep(output.PACE)
    context.destroy(linger=5000)
    time.sleep(0.5)


def raw_shared(samples: int) -> list[float]:
    """One way in us of bytes in shared memory, the word about them through ZeroMQ."""
    name, found = f"hal-bench-{time.monotonic_ns()}", []
    _node, frames, _event = services(name)
    subscriber = frames.subscriber_builder().create()
    with tempfile.TemporaryDirectory() as folder:
        context = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        url = f"ipc://{folder}/raw"
        socket.bind(url)
        process = output.started(send_raw_shared, f"{name} {url}", samples)
        for _ in range(samples):
            _, stamp = socket.recv_multipart(copy=False)
            sample = subscriber.receive()
            assert sample.payload().as_memory_view().nbytes > 500_000
            found.append((time.monotonic_ns() - int.from_bytes(stamp.bytes, "little")) / 1000)
        process.join()
        context.destroy(linger=0)
    return found


def latencies(samples: int, rounds: int) -> None:
    measures: dict[str, Callable[[int], list[float]]] = {
        "zmq": lambda count: ours(count, shared=False),
        "shm": lambda count: ours(count, shared=True),
        "iceoryx2 alone": alone,
        "raw bytes, zmq": output.raw,
        "raw bytes, shm": raw_shared,
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            cuts = statistics.quantiles(measure(samples)[samples // 10 :], n=100)
            found[name].append((cuts[49], cuts[98]))
    for name, pairs in found.items():
        p50, p99 = (statistics.median(values) for values in zip(*pairs, strict=True))
        print(f"one way, 566 KB, {name:14} p50 {p50:7.1f} us  p99 {p99:7.1f} us")
    of_interest = [("zmq", "shm"), ("zmq", "iceoryx2 alone"), ("zmq", "raw bytes, zmq")]
    for one, other in [*of_interest, ("shm", "raw bytes, zmq"), ("shm", "raw bytes, shm")]:
        ratio = statistics.median(a[0] / b[0] for a, b in zip(found[one], found[other], strict=True))
        print(f"{one} / {other}: {ratio:.2f} (p50, median of {rounds} rounds)")


def bursts(frames: int, rounds: int) -> None:
    found: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
    for _ in range(rounds):
        for shared, results in found.items():
            results.append(burst(frames, shared=shared))
    for shared, results in found.items():
        rate, worker, reader = (statistics.median(values) for values in zip(*results, strict=True))
        name = "shm" if shared else "zmq"
        print(
            f"burst, 566 KB, {name} {rate:6.0f} frames/s  CPU a frame: worker {worker:.0f} us, reader {reader:.0f} us"
        )
    ratio = statistics.median(s[0] / z[0] for z, s in zip(found[False], found[True], strict=True))
    print(f"shm / zmq: {ratio:.2f} (frames/s, median of {rounds} rounds)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--frames", type=int, default=2000)
    options = parser.parse_args()
    if importlib.util.find_spec("iceoryx2") is None:
        print("iceoryx2 is not installed; nothing to compare")
        return
    latencies(options.samples, options.rounds)
    bursts(options.frames, options.rounds)


if __name__ == "__main__":
    main()
