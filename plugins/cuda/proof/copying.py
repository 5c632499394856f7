"""What a copy out keeps its stream from: by a kernel in order on the stream, and by the copy engine beside it.

    python -m hal_cuda.building && python plugins/cuda/proof/copying.py [rounds]

Microseconds of the GPU, medians over the rounds, the two ways in turn: from the end of the work before the copy to the
end of a write behind it, of a word that the copy reads; without any copy in the first column. "host" is the call's.
"""

from __future__ import annotations

import statistics
import sys
import time

import native_bench
import numpy as np
from cuda.bindings import driver  # type: ignore[import-not-found]
from hal_core import ByteRange, View
from hal_core.devices import dtype_of
from hal_core.runtime.bound import BoundDevice
from hal_cuda import copies

SIZES = (64, 2 << 10, 9 << 10, 32 << 10, 64 << 10, 256 << 10, 1 << 20)
WAYS = {"no copy": 0, "kernel": 1 << 30, "engine": -1}


def measured(bound: BoundDevice, target: View, nbytes: int, limit: int) -> tuple[float, float]:
    """The stream's time and the host's."""
    stream, memory, spent = bound.device.stream(), target.memory, 0.0
    events = [driver.cuEventCreate(0)[1] for _ in range(2)]
    copies.BY_KERNEL = limit
    with bound.device.hold_stream(stream):
        driver.cuEventRecord(events[0], stream.handle)  # type: ignore[attr-defined]
        if limit:
            begin = time.perf_counter_ns()
            copy = bound.copy_out(memory=memory, parts=[ByteRange(0, nbytes)], stream=stream)
            spent = (time.perf_counter_ns() - begin) / 1e3
        bound.async_set_value(target=target, value=5, stream=stream)
        driver.cuEventRecord(events[1], stream.handle)  # type: ignore[attr-defined]
        time.sleep(0.0002)
    stream.synchronize()
    taken: float = driver.cuEventElapsedTime(*events)[1] * 1e3
    for event in events:
        driver.cuEventDestroy(event)
    if limit:
        assert (copy.data[0] == 5).sum() >= 4, "the write before this one"
    return taken, spent


def main(words: list[str]) -> None:
    """Measure in turn, and print."""
    rounds = int(next((word for word in words if word.isdigit()), "60"))
    print(f"{'us':>10s}" + "".join([f"{name:>20s}" for name in WAYS]))
    with native_bench.opened("native", stand_in=False) as bound:
        for nbytes in SIZES:
            whole = View.contiguous(bound.device.allocate(nbytes), 0, (nbytes // 4,), dtype_of("int32"))
            bound.async_set_value(
                target=whole, value=np.full(nbytes // 4, 0x05050505, np.int32), stream=bound.device.stream()
            ).wait()
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
            for _ in range(rounds + 5):
                for name, limit in WAYS.items():
                    found[name].append(measured(bound, whole[0], nbytes, limit))
            times = [[statistics.median(column) for column in zip(*found[name][5:], strict=True)] for name in WAYS]
            print(
                f"{nbytes:10d}" + "".join([f"{gpu:10.2f}{f'(host {host:.1f})':>14s}" for gpu, host in times]),
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
