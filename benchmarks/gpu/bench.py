"""Cost of hal on a GPU, compared with the peers' methods in the same run: one table, JSON and a plot.

    python -m benchmarks.gpu.bench [--out docs/evidence] [--rounds 30] [--steps 30] [--only insertion,gap] [--ranks N]

With ``--ranks N`` only the decode gap is measured, on N GPUs whose ranks meet in an all-reduce each step. Needs torch,
triton and an NVIDIA GPU; without them it checks imports and planning on the cpu device, names the missing parts, and
ends with 0. ``PYTHONPATH=core/src:plugins/cuda/src:.`` where hal is not installed.

    python -m benchmarks.gpu.bench --only speed; python -m benchmarks.gpu.bench --only in-turn --ranks 2

is the speed table: each call quiet and beside a busy thread; and the gap of ranks one of which inserts at each step.

    python -m benchmarks.gpu.bench --only broadcast [--ranks 2] [--device cuda] [--rounds 200]

measures ``broadcast_tokens`` through Paddle alone (with ``--device cpu`` over gloo), without torch.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from hal_core.devices.paddle import probing

from . import report

SECTIONS = ("insertion", "single", "output", "stages", "gap", "soak")
STAGE_CASES = ((1, 1024), (16, 1024), (128, 1024))


def facts() -> dict[str, Any]:
    """Command, date, machine and versions."""
    versions = {}
    for name in ("numpy", "torch", "triton", "cuda-core", "cuda-bindings", "paddle-hal-core"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "from the source tree" if name == "paddle-hal-core" else "none"
    paddle = probing.installed_paddle()
    versions["paddle"] = "none" if paddle is None else f"{paddle.version} for {paddle.build}"
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    except (OSError, subprocess.CalledProcessError):
        gpus = []
    return {
        "command": f"python -m benchmarks.gpu.bench {' '.join(sys.argv[1:])}".strip(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "versions": versions,
        "gpus": gpus,
    }


def missing() -> str:
    """Return why no measurement is possible here, or ""."""
    from hal_cuda import CudaPlugin

    found = CudaPlugin.probe()
    if not found.available:
        return f"{found.reason}; {found.cure}"
    for name in ("torch", "triton"):
        try:
            version(name)
        except PackageNotFoundError:
            return f"{name} is not installed; the peers' ways are written with it"
    return ""


def check_planning() -> None:
    """Without a GPU: requests, batches and plans of the same sizes, written on the cpu device."""
    from hal_core.devices.cpu import CpuPlugin
    from hal_core.memory.packing import Packed
    from hal_core.runtime.bound import bind
    from hal_core.slots.admission import Request, admit
    from hal_core.slots.insertion import plan_insert
    from hal_core.slots.tasks import TaskBatch

    from .rig import PARAMS, SIZES, blocks_of

    with bind(CpuPlugin.open(0, {})) as device:
        state = device.state(SIZES)
        for count in (1, 8, 128):
            requests = [admit(Request(f"r{i}", np.arange(1024), PARAMS), state.layout) for i in range(count)]
            batch = TaskBatch.prefill(list(range(count)), requests, [1024] * count, blocks_of(count, 1024))
            packed = Packed.of(plan_insert(state, batch))
            device.insert_tasks(state=state, tasks=batch, stream=device.default_stream)
            state.release(range(count))
            print(f"planned {count} x 1024: {packed.writes} writes, {packed.records} records, {packed.nbytes} bytes")


def run(sections: list[str], rounds: int, steps: int) -> dict[str, Any]:
    """The measurements on one GPU."""
    from . import gap, insertion, single, speed, stages
    from .rig import Rig

    rig = Rig.open()
    work: dict[str, Callable[[], Any]] = {
        "insertion": lambda: insertion.measure(rig, rounds),
        "single": lambda: single.set_values(rig, rounds),
        "output": lambda: single.output(rig, rounds),
        "stages": lambda: {f"{n} x {t}": stages.stages(rig, n, t) for n, t in STAGE_CASES},
        "gap": lambda: gap.measure(rig, steps, gap.alone),
        "hal-gap": lambda: gap.measure(rig, steps, gap.alone, (5.0, 20.0), (gap.OURS,)),
        "soak": lambda: stages.soak(rig),
        "speed": lambda: speed.measure(rig, 4 * rounds, 30 * steps),
    }
    found = {}
    for name in sections:
        print(f"measuring {name} …", file=sys.stderr, flush=True)
        found[name] = work[name]()
    return found


def run_ranks(ranks: int, steps: int, *, in_turn: bool = False) -> dict[str, Any]:
    """Start one process a GPU; rank 0 prints the result as one line of JSON."""
    environment = os.environ | {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531"}
    command = [sys.executable, "-m", "benchmarks.gpu.bench", "--rank", "--steps", str(steps)]
    command += ["--only", "in-turn"] if in_turn else []
    processes = [
        subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    texts = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"a rank failed: {[process.returncode for process in processes]}")
    result: dict[str, Any] = json.loads(texts[0].splitlines()[-1])
    return result


def run_broadcast(device: str, ranks: int, rounds: int, out: Path) -> int:
    """The broadcast through Paddle: a table, and ``gpu-broadcast.json`` in ``out``."""
    from . import broadcast

    found = {"facts": facts(), **broadcast.run(device, ranks, rounds)}
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu-broadcast.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(broadcast.table(found))
    return 0


def run_speed(ranks: int, rounds: int, steps: int, out: Path) -> int:
    """The speed table of one GPU, or of several ranks in turn: ``gpu-speed.json`` or ``gpu-in-turn.json``, and text."""
    from . import speed

    name = "gpu-in-turn" if ranks else "gpu-speed"
    found = {"facts": facts()}
    if ranks:
        found |= run_ranks(ranks, 10 * steps, in_turn=True)
        lines = speed.in_turn(found["rows"], ranks)
    else:
        found |= run(["speed"], rounds, steps)
        lines = speed.table(found["speed"])
    text = "\n".join([f"{found['facts']['date']}  {found['facts']['gpus']}  {found['facts']['versions']}", *lines])
    (out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (out / f"{name}.txt").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


def main() -> int:
    """Run the requested measurements; write JSON, print the table, draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/evidence"))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=35)
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--device", default="cuda", help="for --only broadcast")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--plot", action="store_true", help="only draw what --out holds")
    chosen = parser.parse_args()
    if chosen.plot:
        report.plot(chosen.out)
        return 0
    if chosen.only == "broadcast":
        return run_broadcast(chosen.device, chosen.ranks or 2, chosen.rounds, chosen.out)
    why = missing()
    if why:
        print(f"nothing measured: {why}")
        check_planning()
        return 0
    if chosen.rank:
        from . import gap

        result = gap.on_ranks(chosen.steps, (5.0, 20.0), in_turn=chosen.only == "in-turn")
        if result is not None:
            print(json.dumps(result))
        return 0
    chosen.out.mkdir(parents=True, exist_ok=True)
    if chosen.only in ("speed", "in-turn"):
        return run_speed(
            2 if chosen.only == "in-turn" and not chosen.ranks else chosen.ranks,
            chosen.rounds,
            chosen.steps,
            chosen.out,
        )
    if chosen.ranks:
        name, found = "gpu-bench-ranks.json", run_ranks(chosen.ranks, chosen.steps)
    else:
        name, found = "gpu-bench.json", run(chosen.only.split(","), chosen.rounds, chosen.steps)
    found = {"facts": facts(), **found}
    (chosen.out / name).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(report.table(found))
    report.plot(chosen.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
