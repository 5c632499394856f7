"""Ranks of one host against one process: `hal run --tp 2` of the model that ships, and a sum of 4 KB.

Both commands generate the same tokens of the same prompts in turn, on the same two cores; their closing lines are
compared. Then two ranks sum 4 KB over their own connections and over Paddle's gloo, in turn, with each other busy for
50 us before, as a layer is. python benchmarks/ranks.py [rounds]
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from hal_conformance.ranks.processes import RankPool

PROMPTS, TOKENS, SUMS = 8, 200, 300
WAYS = {"one process": (), "--tp 2": ("--tp", "2")}
_SPEED = re.compile(r"\(([\d.]+) tokens/s\)")


def speed(*more: str) -> float:
    """Return the tokens a second in a command's closing line."""
    prompts = [part for number in range(PROMPTS) for part in ("--prompt", f"def main{number}(")]
    command = [sys.executable, "-c", "from hal.cli import main; main()", "run", "--device", "cpu", *prompts, *more]
    command += [
        "--slots",
        str(PROMPTS),
        "--temperature=0",
        "--max-tokens",
        str(TOKENS),
        "--min-tokens",
        str(TOKENS),
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = _SPEED.search(done.stderr)
    assert found is not None, done.stderr
    return float(found[1])


def sums(rank: Any) -> dict[str, list[float]]:  # noqa: ANN401 (a rank of the pool)
    """In a rank: microseconds of each sum, by its way."""
    import paddle
    from hal_core.devices import open_groups
    from hal_core.devices.paddle.places import paddle_core
    from hal_core.devices.paddle.ranks.groups import opened
    from hal_core.group import Group

    open_groups([(0, 1)])
    direct: Any = opened(Group((0, 1), rank.rank)).process_group
    tensor, add = paddle.ones([8, 128]), paddle_core().ReduceOp.SUM
    found: dict[str, list[float]] = {"own connections": [], "gloo": []}
    for _ in range(SUMS):
        for name, group in zip(found, (direct, direct._gloo), strict=True):
            busy = time.perf_counter() + 50e-6
            while time.perf_counter() < busy:
                pass
            began = time.perf_counter()
            group.all_reduce(tensor, add, True).wait()
            found[name].append(1e6 * (time.perf_counter() - began))
    return found


def main(rounds: int = 5) -> None:
    """Measure, and print."""
    from run import versions  # beside this file, which ranks import from elsewhere

    cores = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, cores)
    print(f"{versions()}; cores {cores}, load {os.getloadavg()[0]:.1f}, {rounds} rounds in turn")
    told: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, more in WAYS.items():
            told[name].append(speed(*more))
    for name, values in told.items():
        print(f"{name:16} {median(values):8.1f} tokens/s ({min(values):.1f} to {max(values):.1f})")
    ratios = [two / one for one, two in zip(*told.values(), strict=True)]
    print(f"{'ratio':16} {median(ratios):8.2f} of each round ({min(ratios):.2f} to {max(ratios):.2f})")
    with RankPool(2) as pool:
        for name, values in pool.run(sums, timeout=300.0)[0].items():
            low, middle, high = np.percentile(values[SUMS // 10 :], [10, 50, 90])
            print(f"sum of 4 KB over {name:16} {middle:7.0f} us ({low:.0f} to {high:.0f})")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(*map(int, sys.argv[1:]))
