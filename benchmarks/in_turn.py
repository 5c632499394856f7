"""Two trees of hal in turn, on the same machine in one run: does the newer one cost more?

    python benchmarks/in_turn.py --old TREE [--new TREE] [--rounds 20] [--only cpu,native,stand-in]

Three processes: the old tree twice (old against old is the error of the measurement) and the new one. Each round asks
every process for every case, the order turning with the round; from time to time all three are restarted, because two
processes of the same code differ by more than the effect to be measured. The table has medians over the rounds and the
ratio of the medians, new to old and old to old. ``native`` is the cases of plugins/cuda/proof/native_bench.py on the
native path of a GPU, ``stand-in`` the same over the tests' driver, without one; each tree needs its native part built.
A tree is a checkout, or its ``core/src``, ``plugins/cuda`` and ``benchmarks``.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SLOTS, WIDTH, PROMPT = 128, 8192, 64
FRESH = {"cpu": 1, "native": 5, "stand-in": 5}
"""Rounds after which the processes are restarted."""
CORE = 1
"""All run on one core, in turn: cores differ too."""
Case = Callable[[], float]


def microseconds(call: Callable[[], object], inner: int) -> float:
    """Mean of ``inner`` calls."""
    begin = time.perf_counter()
    for _ in range(inner):
        call()
    return (time.perf_counter() - begin) / inner * 1e6


def cpu_cases() -> dict[str, Case]:
    """Each hook on the cpu device; microseconds a call."""
    import hal_core as core
    import numpy as np
    from hal_core.devices.cpu import CpuPlugin
    from hal_core.output.sinks import MemorySink
    from hal_core.runtime.bound import bind

    bound = bind(CpuPlugin.open(0, {}))
    state, stream = bound.state(core.StateConfig(num_slots=SLOTS, max_model_len=WIDTH)), bound.default_stream
    sink, order, params = MemorySink(), np.arange(SLOTS), core.SamplingParams(seed=7, max_tokens=100)
    requests = [core.admit(core.Request(f"r{i}", list(range(PROMPT)), params), state.layout) for i in range(SLOTS)]
    cell, row = state.view("temperature")[3], state.view("token_ids")[3, :PROMPT]
    table, tokens = state.view("token_ids"), np.arange(PROMPT)
    megabytes = np.zeros((SLOTS, WIDTH), np.int64)

    def value(target: object, given: object) -> Callable[[], object]:
        return lambda: bound.async_set_value(target=target, value=given, stream=stream)

    def broadcast() -> object:
        return bound.broadcast_tokens(state=state, group=core.ALONE, stream=stream)

    def insertion(count: int) -> Case:
        slots, blocks = list(range(count)), [list(range(4)) for _ in range(count)]

        def once() -> float:
            taken = 0.0
            for _ in range(8):
                tasks = [core.Task(core.TaskKind.PREFILL, at, requests[at], 0, PROMPT, blocks[at]) for at in slots]
                begin = time.perf_counter()
                bound.insert_tasks(state=state, tasks=tasks, stream=stream).wait()
                taken += time.perf_counter() - begin
                state.release(slots)
            return taken / 8 * 1e6

        return once

    def step() -> dict[str, float]:
        """Update and save of eight steps with all slots filled."""
        blocks = [list(range(4)) for _ in range(SLOTS)]
        tasks = [core.Task(core.TaskKind.PREFILL, at, requests[at], 0, PROMPT, blocks[at]) for at in range(SLOTS)]
        bound.insert_tasks(state=state, tasks=tasks, stream=stream).wait()
        parts = {"update_inputs": 0.0, "save_output": 0.0}
        for number in range(8):
            one = core.Step(number, {"target": order})
            bound.async_set_value(target=state.view("sampled_token_ids"), value=number + 5, stream=stream)
            calls = {
                "update_inputs": lambda one=one: bound.update_inputs(state=state, step=one, stream=stream),
                "save_output": lambda one=one: bound.save_output(state=state, step=one, sink=sink, stream=stream),
            }
            for name, call in calls.items():
                begin = time.perf_counter()
                ticket = call()
                parts[name] += time.perf_counter() - begin
            state.take(ticket)
        sink.records.clear()
        state.release(range(SLOTS))
        return {name: taken / 8 * 1e6 for name, taken in parts.items()}

    cases: dict[str, Case] = {
        "async_set_value, a scalar": lambda: microseconds(value(cell, 0.5), 500),
        "async_set_value, a row of 64": lambda: microseconds(value(row, tokens), 500),
        "async_set_value, 8 MB": lambda: microseconds(value(table, megabytes), 5),
        "broadcast_tokens, a group of one": lambda: microseconds(broadcast, 500),
    }
    cases |= {f"insert_tasks, {count} x {PROMPT} tokens": insertion(count) for count in (1, 8, SLOTS)}
    return cases | {f"{name}, {SLOTS} slots": lambda name=name: step()[name] for name in step()}


def native_cases(*, stand_in: bool) -> dict[str, Case]:
    """Each case of the tree's own bench of the native path; medians of 20 calls, in microseconds."""
    sys.path.insert(0, str(Path.cwd() / "plugins" / "cuda" / "proof"))
    bench = importlib.import_module("native_bench")
    bound = bench.opened("native", stand_in=stand_in)

    def medians(prepare: Callable[[], Any], act: Callable[[Any], object]) -> float:
        times = []
        for _ in range(20):
            given = prepare()
            begin = time.perf_counter()
            act(given)
            times.append(time.perf_counter() - begin)
        return statistics.median(times) * 1e6

    return {name: lambda given=given: medians(*given) for name, *given in bench.cases(bound)}


def serve(kind: str) -> None:
    """Answer each line, a case's name, with its microseconds; the names first."""
    os.sched_setaffinity(0, {CORE})
    made = {
        "cpu": cpu_cases,
        "native": lambda: native_cases(stand_in=False),
    }
    cases = made.get(kind, lambda: native_cases(stand_in=True))()
    for case in cases.values():
        case()
    gc.collect()
    gc.freeze()
    gc.disable()
    print(json.dumps(list(cases)), flush=True)
    for line in sys.stdin:
        print(json.dumps(cases[line.rstrip("\n")]()), flush=True)


class Tree:
    """A process with one tree's code."""

    def __init__(self, root: Path, kind: str) -> None:
        parts = [root / "core" / "src", root / "plugins" / "cuda" / "src", root]
        path = os.pathsep.join([*map(str, parts), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", kind]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, cwd=root, env=os.environ | {"PYTHONPATH": path}
        )
        self.cases: list[str] = self._answer()

    def _answer(self) -> Any:  # noqa: ANN401 (JSON)
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"in_turn: a process ended with {self._process.wait()}")
        return json.loads(line)

    def ask(self, case: str) -> float:
        """Microseconds of one case."""
        assert self._process.stdin is not None
        self._process.stdin.write(case + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(kind: str, old: Path, new: Path, rounds: int) -> None:
    """Measure one kind in turn, and print its table."""
    trees = {"old": Tree(old, kind), "again": Tree(old, kind), "new": Tree(new, kind)}
    names = list(trees)
    found: dict[str, dict[str, list[float]]] = {case: {name: [] for name in names} for case in trees["new"].cases}
    for number in range(rounds):
        if number and number % FRESH[kind] == 0:
            for tree in trees.values():
                tree.close()
            trees = {name: Tree(new if name == "new" else old, kind) for name in trees}
        for case, times in found.items():
            for at in range(len(names)):
                name = names[(number + at) % len(names)]
                times[name].append(trees[name].ask(case))
    for tree in trees.values():
        tree.close()
    print(json.dumps(found), file=sys.stderr)
    print(f"\n{kind}, {rounds} rounds, medians in us | old | again | new | again/old | new/old | beyond")
    for case, times in found.items():
        first, again, last = (statistics.median(times[name]) for name in names)
        error, ratio = again / first, last / first
        beyond = ratio / max(error, 1 / error, 1.0)
        row = f"{first:.1f} | {again:.1f} | {last:.1f} | {error:.3f} | {ratio:.3f} | {beyond:.3f}"
        print(f"{case} | {row}", flush=True)


def main() -> None:
    """Compare, or be one of the processes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--old", type=Path)
    parser.add_argument("--new", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="cpu")
    parser.add_argument("--serve", default="")
    options = parser.parse_args()
    if options.serve:
        # Only the tree's own modules: this file's folder holds those of another one.
        sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
        serve(options.serve)
        return
    if options.old is None:
        parser.error("give --old TREE: git worktree add FOLDER COMMIT makes one")
    for kind in options.only.split(","):
        compare(kind, options.old.resolve(), options.new.resolve(), options.rounds)


if __name__ == "__main__":
    main()
