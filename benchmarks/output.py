"""The output path in whole: the hook on the caller's thread, large frames, the legacy queues beside them.

    python benchmarks/output.py [--samples 200] [--rounds 3]

Sender and reader are two processes, a frame each 2 ms. "One way" is from the first byte encoded to the record decoded.
The legacy messages need raised kernel limits; they run in an IPC namespace of their own where that may be made.
``benchmarks/frames.py`` has the small frames.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from hal_core.devices.cpu import CpuPlugin
from hal_core.frames.envelope import decode, encode
from hal_core.output.records import OutputRecord, assemble
from hal_core.runtime.bound import bind
from hal_core.slots.admission import Request, admit
from hal_core.slots.fields import StateConfig
from hal_core.slots.step import Step
from hal_core.slots.tasks import Task, TaskKind

from hal.reading import OutputReader, receiver
from hal.transport import open_sink, private_ipc_url, release_ipc, zmq_sink
from hal.transport.connection import Connection

PACE = 0.002  #: seconds between frames
ROWS, TOKENS, COLUMNS = 512, 6, 21  #: the most that the largest legacy message holds
Send = Callable[[str, Any, int], None]


def large() -> OutputRecord:
    """512 rows of 6 tokens with top-20 log-probabilities each."""
    count = ROWS * TOKENS
    ids = np.random.default_rng(0).integers(0, 150_000, (count, COLUMNS), np.int32)
    ones = np.ones(ROWS, np.uint8)
    return OutputRecord(
        0,
        tuple(f"req-{row:05d}" for row in range(ROWS)),
        ones,
        ones * 0,
        np.zeros(ROWS, np.int64),
        ones.astype(np.int32) * TOKENS,
        ids[:, 0].astype(np.int64),
        ones < 0,
        logprob_token_ids=ids,
        logprobs=np.random.default_rng(1).random((count, COLUMNS), np.float32),
        ranks=np.zeros(count, np.int32),
    )


class Stamped:
    """A pending output whose step is the time at which its encoding begins."""

    def __init__(self, source: OutputRecord) -> None:
        self.step, self.source = 0, source
        self.batch_ids, self.batch_size = range(len(source)), len(source)

    def resolve(self) -> OutputRecord:
        object.__setattr__(self.source, "step", time.monotonic_ns())  # a new record would be checked meanwhile
        return self.source

    def complete(self, error: BaseException | None) -> None:
        if error is not None:
            raise error


def hook(slots: int, samples: int, pause: float) -> None:
    """``save_output`` on the caller's thread, its output leaving by zmq, ``pause`` seconds after the one before."""
    bound = bind(CpuPlugin.open(0, {}))
    state, stream = bound.state(StateConfig(num_slots=slots, max_model_len=64)), bound.default_stream
    tasks = [
        Task(TaskKind.PREFILL, slot, admit(Request(f"req-{slot:05d}", [1]), state.layout), 0, 1, [slot])
        for slot in range(slots)
    ]
    bound.insert_tasks(state=state, tasks=tasks, stream=stream).wait()
    step = Step(0, {"target": np.arange(slots)})
    bound.update_inputs(state=state, step=step, stream=stream).wait()
    url = private_ipc_url()
    process = multiprocessing.get_context("spawn").Process(target=drain, args=(url,))
    process.start()
    sink, times = open_sink(url), []
    for _ in range(samples):
        start = time.perf_counter()
        ticket = bound.save_output(state=state, step=step, sink=sink, stream=stream)
        times.append(time.perf_counter() - start)
        ticket.wait(10)
        while time.perf_counter() - start < pause:  # awake, as a worker is: after a sleep any call takes longer
            time.sleep(0)
    sink.close(20)
    process.join()
    release_ipc(url)
    cuts = statistics.quantiles(times[samples // 10 :], n=100)
    when = f"{pause * 1e6:.0f} us after the last" if pause else "one after the other"
    print(f"save_output, cpu, {slots} slots, {when}   p50 {cuts[49] * 1e6:6.1f} us  p90 {cuts[89] * 1e6:6.1f} us")


def drain(url: str) -> None:
    with OutputReader(url, timeout=20) as reader:
        for _ in reader:
            pass


class New(Stamped):
    """Time the same with arrays that no reader has used yet, as those of a step."""

    def resolve(self) -> OutputRecord:
        values = {
            name: np.array(value) if name in _ALTERNATIVES else value for name, value in vars(self.source).items()
        }
        values["step"] = time.monotonic_ns()
        return assemble(values, checked=True)


_ALTERNATIVES = ("logprob_token_ids", "logprobs")


def send_records(url: str, pipe: Any, samples: int) -> None:  # noqa: ANN401  # a Connection
    sink, source = open_sink(url), New(large())
    pipe.recv()
    for _ in range(samples):
        sink.put(source)
        time.sleep(PACE)
    sink.close(20)


def send_raw(url: str, pipe: Any, samples: int) -> None:  # noqa: ANN401  # a Connection
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(url)
    source = encode(large(), session=1, sender=0, sequence=1)
    pipe.recv()
    for _ in range(samples):
        data = bytes(bytearray(source))  # new bytes, as a worker sends them
        socket.send_multipart([time.monotonic_ns().to_bytes(8, "little"), data], copy=False)
        time.sleep(PACE)
    context.destroy(linger=5000)


def started(target: Send, url: str, samples: int) -> Any:  # noqa: ANN401  # a Process
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=target, args=(url, there, samples))
    process.start()
    here.send("go")
    return process


def records(samples: int) -> list[float]:
    with OutputReader(timeout=20) as reader:
        process = started(send_records, reader.url, samples)
        found = [(time.monotonic_ns() - record.step) / 1000 for record in reader]
        process.join()
    return found


def raw(samples: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        context = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        url = f"ipc://{folder}/raw"
        socket.bind(url)
        process = started(send_raw, url, samples)
        found = []
        for _ in range(samples):
            _, stamp, _ = socket.recv_multipart(copy=False)
            found.append((time.monotonic_ns() - int.from_bytes(stamp.bytes, "little")) / 1000)
        process.join()
        context.destroy(linger=0)
    return found


def legacy(samples: int) -> list[float]:
    """Time hal's sysv sink and FastDeploy's reading; the stamp travels in a rank field that is unused here."""
    spec = importlib.util.spec_from_file_location(
        "reader", Path(__file__).parent.parent / "plugins/fastdeploy/tests/legacy_reader.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        queue = module.LegacyQueue(module.custom_ftok(folder, 1), "speculate_get_output_topk")
        process = started(send_legacy, f"sysv://{folder}?layout=speculative-topk", samples)
        while len(found) < samples:
            data = queue.receive(wait=True)
            stamp = np.frombuffer(data, np.int32, 2, 2060 + 1008).view(np.int64)[0]
            found.append((time.monotonic_ns() - int(stamp)) / 1000)
        process.join()
        queue.remove()
    return found


def send_legacy(url: str, pipe: Any, samples: int) -> None:  # noqa: ANN401  # a Connection
    source = large()
    sink = open_sink(url)
    pipe.recv()
    for _ in range(samples):
        sink.put(InRanks(source))
        time.sleep(PACE)
    sink.close(20)


class InRanks(Stamped):
    """The time in the first two ranks."""

    def resolve(self) -> OutputRecord:
        assert self.source.ranks is not None
        self.source.ranks[:2] = np.array([time.monotonic_ns()]).view(np.int32)
        return self.source


def timed(owner: object, name: str) -> list[float]:
    """Have the calls of a function keep how long they took, in seconds."""
    function, times = getattr(owner, name), []

    def call(*arguments: object, **more: object) -> object:
        start = time.perf_counter()
        result = function(*arguments, **more)
        times.append(time.perf_counter() - start)
        return result

    setattr(owner, name, call)
    return times


def in_us(times: list[float]) -> str:
    """The median."""
    return f"{statistics.median(times) * 1e6:.0f} us"


def send_timed(url: str, pipe: Any, samples: int) -> None:  # noqa: ANN401  # a Connection
    encoding, sending = timed(zmq_sink, "encode"), timed(Connection, "send")
    send_records(url, pipe, samples)
    frames = sorted(sending)[-len(encoding) :]  # the rest are heartbeats
    print(f"  within: encoded {in_us(encoding)}, handed over {in_us(frames)}")


def within(samples: int) -> None:
    """Time encoding, transfer and decoding of a large frame; and the same again with warm caches."""
    decoding = timed(receiver, "decode_frame")
    with OutputReader(timeout=20) as reader:
        process = started(send_timed, reader.url, samples)
        for _ in reader:
            pass
        process.join()
    print(f"  within: decoded {in_us(decoding)}")
    source, numbers = large(), {"session": 1, "sender": 0, "sequence": 1}
    frame = encode(source, **numbers)
    times = [
        timeit.timeit(call, number=100) / 100 for call in (lambda: encode(source, **numbers), lambda: decode(frame))
    ]
    print(f"  again and again: encoded {in_us(times[:1])}, decoded {in_us(times[1:])}")


def table(names: list[str], samples: int, rounds: int) -> None:
    """Medians of the rounds, taken in turn."""
    measures = {"frames, zmq": records, "raw bytes, zmq": raw, "legacy, sysv": legacy}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            cuts = statistics.quantiles(measures[name](samples)[samples // 10 :], n=100)
            found[name].append((cuts[49], cuts[98]))
    size = len(encode(large(), session=1, sender=0, sequence=1))
    for name, pairs in found.items():
        p50, p99 = (statistics.median(values) for values in zip(*pairs, strict=True))
        nbytes = 530_448 if "legacy" in name else size
        print(f"one way, {nbytes} bytes, {name:15} p50 {p50:7.1f} us  p99 {p99:7.1f} us")
    if "raw bytes, zmq" in found:
        within(samples)
        ratios = [f[0] / r[0] for f, r in zip(found["frames, zmq"], found["raw bytes, zmq"], strict=True)]
        print(f"frames / raw bytes: {statistics.median(ratios):.2f} (p50, median of {rounds} rounds)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--legacy-only", action="store_true", help="(in the IPC namespace)")
    options = parser.parse_args()
    if options.legacy_only:
        for name, value in (("msgmax", "1048576"), ("msgmnb", "268435456")):
            Path("/proc/sys/kernel", name).write_text(value)
        table(["legacy, sysv"], options.samples, options.rounds)
        return
    for slots, pause in ((8, 0.0), (128, 0.0), (128, PACE / 4)):
        hook(slots, 4 * options.samples, pause)
    table(["frames, zmq", "raw bytes, zmq"], options.samples, options.rounds)
    if shutil.which("unshare") and importlib.util.find_spec("sysv_ipc") and os.geteuid() == 0:
        arguments = ["--legacy-only", "--samples", str(options.samples), "--rounds", str(options.rounds)]
        subprocess.run(["unshare", "-i", sys.executable, __file__, *arguments], check=False)


if __name__ == "__main__":
    main()
