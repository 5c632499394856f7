"""The engine's host work between two steps that do not overlap: from a step's output to the next launch.

    python benchmarks/engine_turns.py
    python benchmarks/in_turn.py --old TREE --only engine       # beside an older tree

Steps on the cpu device, whose runner writes tokens at once; hooks before the launch (the insertion) are in what is
measured, those after it are not.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import count
from typing import Any

from hal_core import MemorySink, Request, SamplingParams, StateConfig
from hal_core.devices.cpu import CpuPlugin
from hal_core.runtime.bound import bind

from hal.engine import Engine
from hal.stepping import Stepper

STEPS, WARM = 40, 10


class Runner:
    """Gives each slot a token, at once, and notes when a step is launched."""

    vocab_size, needs_host = 50_000, ""

    def __init__(self, sampled: Any) -> None:  # noqa: ANN401 (the field, as an array)
        self._sampled, self.launched = sampled, 0.0

    def check(self, request: Request) -> None:
        """Every request can run."""

    def launch(self, state: object, step: Any, stream: object) -> Any:  # noqa: ANN401 (a PlannedStep, a Step)
        self.launched = time.perf_counter()
        self._sampled[:] = 1000
        return step.step


class Timed(Stepper):
    """Notes when a step's output is there."""

    taken = 0.0

    def take(self, launched: Any) -> Any:  # noqa: ANN401
        launched.ticket.record()
        self.taken = time.perf_counter()
        return super().take(launched)


def cases(slots: int) -> dict[str, Callable[[], float]]:
    """Medians over some steps, in microseconds."""
    bound, names = bind(CpuPlugin.open(0, {})), count()
    state = bound.state(StateConfig(num_slots=slots, max_model_len=1024))
    runner = Runner(state.tensor("sampled_token_ids", "numpy"))
    sink = MemorySink()
    stepper = Timed(bound, state, runner, sink, blocks=slots * 64)  # type: ignore[arg-type]

    def between(entering: int, tokens: int) -> float:
        engine, spent = Engine(stepper, chunk=1 << 20), []
        for number in range(STEPS):
            for name in [f"r{next(names)}" for _ in range(entering if number else slots)]:
                engine.submit(Request(name, [1, 2], SamplingParams(max_tokens=tokens)))
            begin, before = time.perf_counter(), stepper.taken
            engine.step()
            told = time.perf_counter()
            spent.append(runner.launched - begin + (told - stepper.taken))  # the first and the last parts of a step
            assert before < stepper.taken
        for generation in [*engine.scheduler.running, *engine.scheduler.waiting]:
            engine.abort(generation.request_id)
        for _ in engine.run():
            pass
        sink.records.clear()
        return statistics.median(spent[WARM:]) * 1e6

    return {
        f"between two steps, {slots} requests decode": lambda: between(0, 900),
        f"between two steps, 16 of {slots} end and 16 enter": lambda: between(16, slots // 16),
    }


if __name__ == "__main__":
    for what, case in cases(128).items():
        print(f"{what}: {statistics.median([case() for _ in range(5)]):.0f} us")
