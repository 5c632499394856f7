"""CUDA graphs of a step's work: layers by size, with and without decoding rows, and sampling by what it needs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .plan import NOTHING, Size, packed
from .sampling import DRAWN, GREEDY, TRUNCATED, Want

if TYPE_CHECKING:
    from .steps import Steps


class Graphs:
    """Everything of :class:`hal_torch.steps.Steps` that can be captured, captured when this is made.

    All slots are empty then, so a capture changes nothing. The graphs take their memory from one pool: they run one
    after the other on the stream of the steps.
    """

    def __init__(self, steps: Steps, sizes: Sequence[Size], slots: int, device: torch.device) -> None:
        self.sizes = sizes
        self.plan = torch.zeros(max(size.numbers(slots) for size in sizes), dtype=torch.int32, device=device)
        self._device, self._graphs, self._pool = device, dict[Hashable, Any](), torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream(device)
        torch.cuda.synchronize(device)
        with torch.no_grad():
            for size, decodes in product((NOTHING, *sizes), (True, False)):
                if size != NOTHING or decodes:
                    self._layers(steps, size, slots, decodes=decodes)
            for draw, adjusts, logprobs in product((GREEDY, DRAWN, TRUNCATED), (False, True), (False, True)):
                want = Want(draw, adjusts, logprobs)
                self._capture(want, lambda want=want: steps.sample(want), warm=True)  # type: ignore[misc]
        torch.cuda.synchronize(device)

    def __len__(self) -> int:
        return len(self._graphs)

    def replay(self, key: Hashable) -> bool:
        """Launch a graph, if there is one: ``(size, decodes)`` of layers, or a :class:`Want` of sampling."""
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
        return graph is not None

    def _layers(self, steps: Steps, size: Size, slots: int, *, decodes: bool) -> None:
        plan: Tensor | None = None
        if size != NOTHING:
            empty = torch.zeros(size.numbers(slots), dtype=torch.int32)
            packed((), size, slots, empty.numpy())
            plan = self.plan[: len(empty)]
            plan.copy_(empty)
        # What is loaded or compiled at the first use of a kernel: of one token, and of many.
        warm = size == NOTHING or size in (self.sizes[0], self.sizes[-1])
        self._capture((size, decodes), lambda: steps.layers(plan, size, decodes=decodes), warm=warm)

    def _capture(self, key: Hashable, work: Callable[[], None], *, warm: bool) -> None:
        """Capture some work. The mode is the one that other threads' work on the device does not spoil."""
        if warm:
            self._side.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._side):
                work()
            self._side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"):
            work()
        self._graphs[key] = graph
