"""Host time of the parts of an engine's turn: 128 decoding slots, over the stand-in for the driver.

    python plugins/cuda/proof/turn_parts.py [overlap]

Medians of 150 turns, us. The stand-in executes copies and kernels at once, so a turn contains their time.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from statistics import median
from typing import Any

import numpy as np
from hal_core import Request, SamplingParams, StateConfig
from native_bench import opened

from hal.engine import Engine
from hal.stepping import Stepper

SLOTS, TURNS = 128, 150


class Given:
    """A runner that writes one value."""

    needs_host, vocab_size = "", 100

    def __init__(self, bound: Any) -> None:  # noqa: ANN401 (a device)
        self._bound = bound

    def check(self, request: Request) -> None:
        """Accept every request."""

    def launch(self, state: Any, step: Any, stream: Any) -> Any:  # noqa: ANN401
        self._bound.async_set_value(target=state.view("sampled_token_ids"), value=5, stream=stream)
        return step.step

    def propose(self, *_: object) -> None:
        """There are no drafts."""


class Kept:
    """A sink whose outputs are complete when the engine has taken them."""

    session = 1

    def __init__(self) -> None:
        self._pending: deque[Any] = deque()

    def put(self, pending: Any) -> None:  # noqa: ANN401
        self._pending.append(pending)

    def take(self, record: object) -> None:
        self._pending.popleft().complete(None)


def timed(owner: Any, name: str, times: dict[str, list[float]]) -> None:  # noqa: ANN401
    """Record the time of each call of a method."""
    real = getattr(owner, name)

    def call(*given: Any, **named: Any) -> Any:  # noqa: ANN401
        begin = time.perf_counter_ns()
        try:
            return real(*given, **named)
        finally:
            times.setdefault(name, []).append((time.perf_counter_ns() - begin) / 1e3)

    setattr(owner, name, call)


def main(*, overlap: bool) -> None:
    with opened("native", stand_in=True) as bound:
        bound.device.driver.api.library.stand_in_idle(0)  # type: ignore[attr-defined]
        sizes = StateConfig(SLOTS, 1024, 16, max_logprobs=0, max_eos=1, max_stop_sequences=1, max_bad_words=1)
        state, sink = bound.state(sizes), Kept()
        stepper = Stepper(bound, state, Given(bound), sink, blocks=SLOTS * sizes.max_blocks)  # type: ignore[arg-type]
        engine = Engine(stepper, chunk=1024, overlap=overlap, on_record=sink.take)
        for number in range(SLOTS):
            engine.submit(Request(f"r{number}", np.full(128, 5, np.int32), SamplingParams(max_tokens=800)))
        times: dict[str, list[float]] = {}
        for part in range(2):
            for _ in range(TURNS):
                begin = time.perf_counter_ns()
                engine.step()
                if part:
                    times.setdefault("a turn", []).append((time.perf_counter_ns() - begin) / 1e3)
            if not part:
                for name in ("schedule", "update"):
                    timed(engine.scheduler, name, times)
                for name in ("insert_tasks", "update_inputs", "save_output"):
                    timed(bound, name, times)
                timed(stepper, "launch", times)
                timed(stepper, "take", times)
        for name, found in times.items():
            print(f"{name:16}{median(found):8.1f}")


if __name__ == "__main__":
    main(overlap="overlap" in sys.argv)
