"""Frames and the zmq transport against pickled objects over zmq, in one run.

    python benchmarks/frames.py [--frames 100000] [--rounds 5] [--samples 400]

Sender and reader are two processes. "One way" is from the first byte encoded to the record decoded, checksum included.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import zmq
from hal_core.frames.envelope import decode, encode
from hal_core.output.records import OutputRecord

from hal.reading import OutputReader
from hal.transport import open_sink
from hal.transport.zmq_sink import ZmqSink

PACE = 0.001  #: seconds between frames whose latency is taken


def record(rows: int, columns: int = 0) -> OutputRecord:
    """A step of plain decoding, with top log-probabilities if there are columns for them."""
    optional = {}
    if columns:
        ids = np.random.default_rng(0).integers(0, 150_000, (rows, columns), np.int32)  # as the hooks make them
        ids[:, 0] = np.arange(rows)
        optional = {
            "logprob_token_ids": ids,
            "logprobs": np.random.default_rng(1).random((rows, columns), np.float32),
            "ranks": np.zeros(rows, np.int32),
        }
    ones, order = np.ones(rows, np.uint8), np.arange(rows)
    names = tuple(f"req-{row:05d}" for row in range(rows))
    return OutputRecord(0, names, ones, ones * 0, order, ones.astype(np.int32), order, ones < 0, **optional)


FOUR_KILOBYTES = record(128)


class Prepared:
    """A pending output whose record is there; ``step`` of the record is the time at which its encoding begins."""

    def __init__(self, source: OutputRecord) -> None:
        self.step, self.source = 0, source

    def ready(self) -> bool:
        return True

    def resolve(self) -> OutputRecord:
        return self.source

    def complete(self, error: BaseException | None) -> None:
        if error is not None:
            raise error


class Stamped(Prepared):
    def resolve(self) -> OutputRecord:
        object.__setattr__(self.source, "step", time.monotonic_ns())  # a new record would be checked meanwhile
        return self.source


def microseconds(call: Callable[[], object], calls: int, rounds: int = 15) -> float:
    """Best of the rounds' means: the machine is shared, and other load only adds time."""
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
    return best * 1e6


def codec() -> None:
    """Encoding and decoding alone, and the caller's side of put."""
    large, numbers = record(512, 21), {"session": 1, "sender": 0, "sequence": 1}
    for name, source, calls in (("128 rows", FOUR_KILOBYTES, 1000), ("512 rows, top 20", large, 100)):
        frame = encode(source, **numbers)
        encoding = microseconds(lambda source=source: encode(source, **numbers), calls)
        decoding = microseconds(lambda frame=frame: decode(frame), calls)
        print(f"{name:18} {len(frame):7} bytes   encode {encoding:6.1f} us   decode {decoding:6.1f} us")


def send_paced(url: str, pipe: Connection, samples: int) -> None:
    """Worker process: our sink, one frame each millisecond."""
    sink = open_sink(url)
    assert isinstance(sink, ZmqSink)
    pipe.recv()
    for _ in range(samples):
        sink.put(Stamped(FOUR_KILOBYTES))
        time.sleep(PACE)
    sink.close(10)


def send_pickled(url: str, pipe: Connection, samples: int) -> None:
    """Worker process: the same through send_pyobj, as FastDeploy's zmq path does."""
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(url)
    pipe.recv()
    source = FOUR_KILOBYTES
    for _ in range(samples):
        parts = [source.request_ids, source.status, source.finish, source.positions, source.counts, source.tokens]
        socket.send_pyobj([time.monotonic_ns(), *parts, source.first_token])
        time.sleep(PACE)
    context.destroy(linger=5000)


def send_burst(url: str, pipe: Connection, count: int) -> None:
    """Worker process: as many as fit; reports the caller's and the sender thread's share."""
    sink = open_sink(url)
    output = Prepared(FOUR_KILOBYTES)
    pipe.recv()
    assert isinstance(sink, ZmqSink)
    clock = time.pthread_getcpuclockid(sink._thread.ident or 0)
    begun = time.clock_gettime(clock)
    start, process, caller = time.perf_counter(), time.process_time(), time.thread_time()
    for _ in range(count):
        sink.put(output)
    caller = time.thread_time() - caller
    while sink.counters()["unacknowledged"] or sink.counters()["queued"]:
        time.sleep(0.001)
    wall, sender = time.perf_counter() - start, time.clock_gettime(clock) - begun
    sink.close(60)
    pipe.send((wall, caller, sender, time.process_time() - process - caller - sender))


def started(target: Callable[[str, Connection, int], None], url: str, number: int) -> tuple[object, Connection]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=target, args=(url, there, number))
    process.start()
    return process, here


def latencies_of_ours(samples: int) -> list[float]:
    with OutputReader(timeout=10) as reader:
        process, pipe = started(send_paced, reader.url, samples)
        pipe.send("go")
        found = [(time.monotonic_ns() - record.step) / 1000 for record in reader]
        process.join()
    return found[samples // 10 :]


def latencies_of_pickles(samples: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        context = zmq.Context()
        socket = context.socket(zmq.PULL)
        url = f"ipc://{Path(folder) / 'pickled'}"
        socket.bind(url)
        process, pipe = started(send_pickled, url, samples)
        pipe.send("go")
        found = [(-socket.recv_pyobj()[0] + time.monotonic_ns()) / 1000 for _ in range(samples)]
        process.join()
        context.destroy(linger=0)
    return found[samples // 10 :]


def latency(samples: int, rounds: int) -> None:
    found: dict[str, list[tuple[float, float]]] = {"hal": [], "send_pyobj": []}
    for _ in range(rounds):
        for name, measure in (("hal", latencies_of_ours), ("send_pyobj", latencies_of_pickles)):
            cuts = statistics.quantiles(measure(samples), n=100)
            found[name].append((cuts[49], cuts[98]))
    for name, pairs in found.items():
        p50, p99 = (statistics.median(values) for values in zip(*pairs, strict=True))
        spread = f"[{min(p for p, _ in pairs):.0f}..{max(p for p, _ in pairs):.0f}]"
        print(f"one way, 4 KB, ipc   {name:10} p50 {p50:6.1f} us {spread:12} p99 {p99:6.1f} us")


def throughput(count: int, rounds: int) -> None:
    for _ in range(rounds):
        with OutputReader(timeout=30) as reader:
            process, pipe = started(send_burst, reader.url, count)
            reader.read(0.5)  # lets it connect
            cpu = time.thread_time()
            pipe.send("go")
            got = sum(1 for _ in reader)
            cpu = time.thread_time() - cpu
            wall, *shares = pipe.recv()
            process.join()
        caller, sender, theirs, reading = (1e6 * seconds / count for seconds in (*shares, cpu))
        print(
            f"{got} of {count} frames in {wall:.2f} s; CPU us a frame: put {caller:.1f}, sender thread {sender:.1f}, "
            f"ZeroMQ's own {theirs:.1f}, reader {reading:.1f}"
        )


def put_alone(count: int = 2000) -> None:
    """The caller's share when the sender thread sleeps between frames."""
    with OutputReader() as reader:
        sink = open_sink(reader.url)
        drain = threading.Thread(target=lambda: [None for _ in reader])
        drain.start()
        times = []
        for _ in range(count):
            output = Prepared(FOUR_KILOBYTES)
            start = time.perf_counter()
            sink.put(output)
            times.append(time.perf_counter() - start)
            time.sleep(PACE / 4)
        sink.close(10)
        drain.join()
    print(f"put() on the caller's thread, waking the sender: p50 {statistics.median(times) * 1e6:.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=400)
    options = parser.parse_args()
    gc.freeze()
    codec()
    put_alone()
    latency(options.samples, options.rounds)
    throughput(options.frames, 3)


if __name__ == "__main__":
    main()
