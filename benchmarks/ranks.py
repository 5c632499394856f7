"""Ranks of one host against one process: `hal run --tp 2` of the model that ships, and collectives on the host.

Both commands generate the same tokens of the same prompts in turn, on the same two cores; their closing lines are
compared. Then two and four ranks sum and broadcast 4 KB to 64 MB over hal's own collectives and over Paddle's gloo, in
turn. python benchmarks/ranks.py [rounds]; no rounds (0) leave the commands out.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from hal_conformance.ranks.processes import RankPool

PROMPTS, TOKENS = 8, 200
SIZES = {4 << 10: 600, 256 << 10: 150, 4 << 20: 30, 64 << 20: 5}
"""Bytes, and the turns of each."""
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


def collectives(rank: Any, ranks: tuple[int, ...]) -> dict[tuple[str, int, str], tuple[float, float]]:  # noqa: ANN401
    """In a rank: microseconds elapsed (the median) and of processor time (the mean) of each kind, size and way."""
    import paddle
    from hal_core import Group
    from hal_core.devices import dtype_of, open_groups, opened
    from hal_paddle.process_groups import PaddleGroup, make_group

    open_groups([ranks])
    own, core = opened(Group(ranks, rank.rank)).process_group, paddle.base.core

    def make(*arguments: Any) -> PaddleGroup:  # noqa: ANN401
        return make_group(core.ProcessGroupGloo.create, *arguments)

    open_groups([ranks], backend="Paddle's gloo", make=make)
    gloo = opened(Group(ranks, rank.rank), backend="Paddle's gloo").process_group.group
    found: dict[tuple[str, int, str], tuple[float, float]] = {}
    for nbytes, turns in SIZES.items():
        tensor, dtype, add = paddle.ones([nbytes // 4]), dtype_of("float32"), core.ReduceOp.SUM
        bytes_of = memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")
        ways: dict[tuple[str, str], Callable[[], object]] = {
            ("sum", "hal's own"): partial(own.all_reduce, bytes_of, dtype),
            ("sum", "gloo"): partial(_paddles, gloo.all_reduce, tensor, add),
            ("broadcast", "hal's own"): partial(own.broadcast, bytes_of, 0),
            ("broadcast", "gloo"): partial(_paddles, gloo.broadcast, tensor, 0),
        }
        times: dict[tuple[str, str], list[tuple[float, float]]] = {way: [] for way in ways}
        for _ in range(turns):
            for way, call in ways.items():
                began, used = time.perf_counter(), time.process_time()
                call()
                times[way].append((1e6 * (time.perf_counter() - began), 1e6 * (time.process_time() - used)))
        for (kind, library), values in times.items():
            elapsed, processor = zip(*values, strict=True)
            found[kind, nbytes, library] = median(elapsed), sum(processor) / turns
    return found


def _paddles(call: Callable[..., Any], *arguments: object) -> None:
    call(*arguments, True).wait()


def main(rounds: int = 5) -> None:
    """Measure, and print."""
    from run import versions  # beside this file, which ranks import from elsewhere

    cores = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, cores)
    print(f"{versions()}; cores {cores}, load {os.getloadavg()[0]:.1f}, {rounds} rounds in turn")
    speeds: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, more in WAYS.items():
            speeds[name].append(speed(*more))
    if rounds:
        for name, values in speeds.items():
            print(f"{name:16} {median(values):8.1f} tokens/s ({min(values):.1f} to {max(values):.1f})")
        ratios = [two / one for one, two in zip(*speeds.values(), strict=True)]
        print(f"{'ratio':16} {median(ratios):8.2f} of each round ({min(ratios):.2f} to {max(ratios):.2f})")
    for size in (2, 4):
        with RankPool(size) as pool:
            answers = pool.run(collectives, tuple(range(size)), timeout=600.0)
        for key in answers[0]:
            elapsed, processor = (median(answer[key][at] for answer in answers.values()) for at in (0, 1))
            kind, nbytes, library = key
            print(
                f"{size} ranks, {kind:9} {nbytes >> 10:6} KB {library:10} {elapsed:9.0f} us, processor {processor:9.0f}"
            )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(*map(int, sys.argv[1:]))
