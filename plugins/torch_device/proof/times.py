"""Host times of hooks on devices of one GPU: python plugins/torch_device/proof/times.py [DEVICE ...]

By default ``cuda`` and ``torch_cuda``, one after the other. The cases are those of
``plugins/cuda/proof/native_bench.py`` before the broadcast. Medians of 200 calls, us; the device is idle before each.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median

import hal

sys.path.insert(0, str(Path(__file__).parents[2] / "cuda" / "proof"))
import native_bench as bench

ROUNDS, LAST = 200, "copy out 1 MB"


def measured(device: str) -> dict[str, float]:
    """Return each case's median."""
    found: dict[str, float] = {}
    with hal.open_device(device) as bound:
        for name, prepare, act in bench.cases(bound):
            times = []
            for _ in range(ROUNDS + 5):
                given = prepare()
                begin = time.perf_counter_ns()
                act(given)
                times.append((time.perf_counter_ns() - begin) / 1e3)
            found[name] = median(times[5:])
            if name == LAST:  # the broadcast's needs a collective library
                break
    return found


def main(devices: list[str]) -> None:
    """Print the table."""
    tables = {device: measured(device) for device in devices or ["cuda", "torch_cuda"]}
    print("| host us, median |" + "".join(f" {device} |" for device in tables))
    print("|---|" + "---:|" * len(tables))
    for name in next(iter(tables.values())):
        print(f"| {name} |" + "".join(f" {table[name]:.1f} |" for table in tables.values()))


if __name__ == "__main__":
    main(sys.argv[1:])
