"""Serve a load with the engine, and report tokens a second, time per token, and the GPU's load."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hal_core import OutputRecord, Request, SlotState, Step, Stream

from hal.engine import Engine
from hal.stepping import PlannedStep, Runner

from .decode_node import Inserting
from .load import Arrival

UNCOUNTED = 1.0
"""Seconds at the beginning of a run that are left out: all slots are filled at once there."""
LEAST = 16
"""Tokens of a request inside the counted time, from which its own time per token is taken."""


class Timed:
    """A runner whose steps on the GPU are timed by events; the time that they take together is the model's."""

    def __init__(self, runner: Runner, event: Any) -> None:  # noqa: ANN401 (makes an event, or None)
        self._runner, self._event = runner, event
        self.spans: list[tuple[Any, Any]] = []

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (whatever the runner has)
        return getattr(self._runner, name)

    def launch(self, state: SlotState, step: PlannedStep, stream: Stream) -> Step:
        if self._event is None:
            return self._runner.launch(state, step, stream)
        begin, end = self._event(), self._event()
        begin.record()
        launched = self._runner.launch(state, step, stream)
        end.record()
        self.spans.append((begin, end))
        return launched

    def milliseconds(self) -> list[float]:
        """Of each step since the last call; all are over."""
        spans, self.spans = self.spans, []
        return [begin.elapsed_time(end) for begin, end in spans]


@dataclass
class Run:
    """One run: when each step's record was taken (seconds), and the records."""

    way: str
    seconds: float
    taken: list[tuple[float, OutputRecord]] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    inserted: list[tuple[int, int, float]] = field(default_factory=list)
    utilization: list[float] = field(default_factory=list)
    waited: int = 0
    """Most requests that waited for a slot."""


def serve(engine: Engine, load: Sequence[Arrival], requests: Sequence[Request], run: Run) -> None:
    """Submit each request when it is due, and step, for ``run.seconds``; then withdraw the requests that have not
    ended."""
    at, last = 0, None
    begin = time.perf_counter()
    while (now := time.perf_counter() - begin) < run.seconds:
        while at < len(load) and load[at].at <= now:
            engine.submit(requests[at])
            at += 1
        if engine.busy:
            engine.step()
            record = engine.worker.last  # type: ignore[attr-defined]
            if record is not None and record is not last:
                last = record
                run.taken.append((time.perf_counter() - begin, record))
        else:
            time.sleep(min(1e-3, max(0.0, load[at].at - now)) if at < len(load) else 1e-3)
        run.waited = max(run.waited, len(engine.scheduler.waiting))


def leave(engine: Engine, inserting: Inserting, names: Sequence[str]) -> None:
    """End all requests, hal's way, so that the next run finds every slot free."""
    inserting.way = "hal"
    for name in names:
        engine.abort(name)
    for _ in engine.run():
        pass
    engine.withdraw()  # the last step, for which no call waits, is taken: requests that ended in it leave their slots


@contextmanager
def watched(run: Run, index: int) -> Iterator[None]:
    """Note how busy ``nvidia-smi`` finds the GPU, five times a second."""
    if shutil.which("nvidia-smi") is None:
        yield
        return
    visible = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
    query = [
        "nvidia-smi",
        f"--id={visible[index] if visible else index}",
        "--query-gpu=utilization.gpu",
        "--format=csv,noheader,nounits",
        "-lms",
        "200",
    ]
    watcher = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield
    finally:
        watcher.terminate()
        said, _ = watcher.communicate(timeout=10)
        run.utilization = [float(line) for line in said.split() if line.strip().isdigit()]


@contextmanager
def undisturbed() -> Iterator[None]:
    """Exclude existing objects from garbage collection, which otherwise continues as in any worker."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def figures(run: Run) -> dict[str, Any]:
    """Return the results of a run, of its counted time."""
    counted = [(at, record) for at, record in run.taken if at >= UNCOUNTED]
    seconds = counted[-1][0] - counted[0][0]
    tokens = sum(int(record.counts.sum()) for _, record in counted[1:])
    times: dict[str, list[float]] = {}
    rows = 0
    for at, record in counted:
        given = record.counts.tolist()
        rows += sum(given)
        for name, count in zip(record.request_ids, given, strict=True):
            if count:
                times.setdefault(name, []).append(at)
    between = np.concatenate([np.diff(one) for one in times.values() if len(one) > 1]) * 1e3
    each = np.array([(one[-1] - one[0]) / (len(one) - 1) * 1e3 for one in times.values() if len(one) >= LEAST])
    skipped = len(run.step_ms) - len(counted)
    model = run.step_ms[max(0, skipped) :]
    entered = [us for new, _, us in run.inserted if new]
    grew = [us for new, _, us in run.inserted if not new]
    return {
        "way": run.way,
        "tokens_per_s": round(tokens / seconds, 1),
        "tpot_p50_ms": _part(each, 50),
        "tpot_p99_ms": _part(each, 99),
        "between_p50_ms": _part(between, 50),
        "between_p99_ms": _part(between, 99),
        "between_max_ms": _part(between, 100),
        "gpu_busy_pct": round(float(np.mean(run.utilization[6:])), 1) if len(run.utilization) > 6 else None,
        "model_pct": round(sum(model) / seconds / 10, 2) if model else None,
        "step_ms": _part(model, 50) if model else None,
        "steps": len(counted),
        "requests": len(times),
        "running": round(rows / len(counted), 1),
        "most_waiting": run.waited,
        "insert_us": _part(entered, 50),
        "insert_p99_us": _part(entered, 99),
        "insert_most": max((new for new, _, _ in run.inserted), default=0),
        "grow_us": _part(grew, 50),
    }


def _part(values: Any, percent: float) -> float | None:  # noqa: ANN401 (a list or an array)
    return round(float(np.percentile(values, percent)), 4) if len(values) else None
