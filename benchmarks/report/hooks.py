"""What hooks and admission cost the host: hot, cold, and beside one and four busy threads; and torch's ``fill_``.

The cases are those of ``plugins/cuda/proof/native_bench.py``. An insertion is from the tasks to its ticket; what its
requests' admission takes is a row of its own, and the last rows are both together. Cold: 48 MB were touched and 1 ms
was slept before each call.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from hal_core import AdmittedRequest, Request, Step, Task, TaskKind
from hal_core.output.ticket import OutputTicket
from hal_core.runtime.policy import Outbox

from .node import busy_threads

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "cuda" / "proof"))
import native_bench as bench

HOT, FEW = 200, 60
_TOUCHED = np.zeros(48 << 20, np.uint8)
Case = tuple[str, Callable[[], Any], Callable[[Any], object]]
WAYS = (("hot", 0), ("cold", 0), ("busy 1", 1), ("busy 4", 4))


def admitting(bound: Any) -> Iterator[Case]:  # noqa: ANN401 (a device)
    """Admission from arrays and lists, alone and with the insertion."""
    state, stream = bound.state(bench.SIZES, name="admitting"), bound.device.stream()
    drawn = np.random.default_rng(1).integers(10, 30_000, (128, bench.TOKENS))
    kept: list[Any] = []

    def before() -> None:
        stream.synchronize()
        state.release(range(bench.SIZES.num_slots))
        kept.clear()

    for name, prompts in (("int32", drawn.astype(np.int32)), ("int64", drawn), ("list", drawn.tolist())):

        def admit(_: object, prompts: Any = prompts) -> None:  # noqa: ANN401
            kept.append(state.admit(Request("r", prompts[0], bench.PARAMS)))

        yield f"admit 1 x {bench.TOKENS} from {name}", before, admit

    def prefills(requests: list[AdmittedRequest], blocks: Any) -> list[Task]:  # noqa: ANN401
        given = enumerate(zip(requests, blocks, strict=True))
        return [Task(TaskKind.PREFILL, at, request, 0, bench.TOKENS, own) for at, (request, own) in given]

    each = bench.TOKENS // bench.BLOCK
    for count in (1, 128):
        slots, prompts = list(range(count)), drawn.astype(np.int32)
        blocks = [np.arange(each, dtype=np.int32) + at * each for at in slots]

        def both(_: object, slots: list[int] = slots, blocks: Any = blocks, prompts: Any = prompts) -> None:  # noqa: ANN401
            kept.extend(state.admit(Request(f"r{at}", prompts[at], bench.PARAMS)) for at in slots)
            bound.insert_tasks(state=state, tasks=prefills(kept, blocks), stream=stream)

        def all_at_once(_: object, slots: list[int] = slots, prompts: Any = prompts) -> None:  # noqa: ANN401
            kept.extend(state.admit_all([Request(f"r{at}", prompts[at], bench.PARAMS) for at in slots]))

        def all_inserted(_: object, slots: list[int] = slots, blocks: Any = blocks, prompts: Any = prompts) -> None:  # noqa: ANN401
            all_at_once(None, slots, prompts)
            bound.insert_tasks(state=state, tasks=prefills(kept, blocks), stream=stream)

        def one_by_one(_: object, slots: list[int] = slots, prompts: Any = prompts) -> None:  # noqa: ANN401
            kept.extend(state.admit(Request(f"r{at}", prompts[at], bench.PARAMS)) for at in slots)

        yield f"admit int32 and insert {count} x {bench.TOKENS}", before, both
        if count > 1:
            yield f"admit {count} x {bench.TOKENS} from int32, one by one", before, one_by_one
            yield f"admit_all {count} x {bench.TOKENS} from int32", before, all_at_once
            yield f"admit_all int32 and insert {count} x {bench.TOKENS}", before, all_inserted


def of_save_output(bound: Any) -> Iterator[Case]:  # noqa: ANN401 (a device)
    """Parts of ``save output``, each in those before it."""
    device, state, stream = bound.device, bound.state(bench.SIZES, name="target"), bound.device.stream()
    step, part = Step(1, {"target": np.arange(bench.SIZES.num_slots)}), state.output_range(topk=False)
    copies, own, kept = device.copies, device.working(stream), device.copy_out(state.memory, [part], stream)
    block, event = device.blocks.take(part.nbytes), device.events.take(own)
    given = (
        block.address,
        device.address_of(state.memory) + part.offset,
        part.nbytes,
        own.raw,
        copies._function,
        event.raw,
    )

    def before() -> None:
        bound.async_set_value(target=state.view("temperature")[3], value=0.5, stream=stream)
        stream.synchronize()

    yield "save output's device hook", before, lambda _: device.save_output(device, state, step, Outbox(), stream)
    yield "... its copy out", before, lambda _: device.copy_out(state.memory, [part], stream)
    yield "... ... launch and event, by C", before, lambda _: copies._write(*given)
    yield "... its ticket and snapshot", before, lambda _: OutputTicket(state, step, kept, part)


def of_torch() -> Iterator[Case]:
    """A scalar by torch, as ``set scalar`` by hal."""
    import torch

    one = torch.zeros(128, device="cuda")[3:4]
    yield "torch fill_ of a scalar", torch.cuda.synchronize, lambda _: one.fill_(0.5)
    host = torch.zeros(64, dtype=torch.int64).pin_memory()
    row = torch.zeros((128, 64), dtype=torch.int64, device="cuda")[3]
    yield "torch copy_ of 64 pinned tokens", torch.cuda.synchronize, lambda _: row.copy_(host, non_blocking=True)


def _timed(case: Case, rounds: int, *, cold: bool) -> list[float]:
    _, prepare, act = case
    times = []
    for _ in range(rounds + 5):
        given = prepare()
        if cold:
            _TOUCHED.__iadd__(1)
            time.sleep(1e-3)
        begin = time.perf_counter_ns()
        act(given)
        times.append((time.perf_counter_ns() - begin) / 1e3)
    return times[5:]


def measure(*, stand_in: bool = False) -> dict[str, Any]:
    """Median and 99th percentile of each case, us, on the native path."""
    rows: dict[str, dict[str, list[float]]] = {}
    with bench.opened("native", stand_in=stand_in) as bound:
        cases = [*bench.cases(bound), *of_save_output(bound), *admitting(bound), *([] if stand_in else of_torch())]
        for way, threads in WAYS:
            with busy_threads(threads):
                for case in cases:
                    times = _timed(case, HOT if way == "hot" else FEW, cold=way == "cold")
                    rows.setdefault(case[0], {})[way] = [median(times), float(np.percentile(times, 99))]
            print(f"{way} done", file=sys.stderr, flush=True)
        given_up = bound.device.driver.native.calls.given_up()  # type: ignore[attr-defined]
    return {"rows": rows, "lock_given_up": given_up}
