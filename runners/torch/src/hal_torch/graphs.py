"""CUDA graphs of a step's parts, captured when the runner is made; one call launches all of a step.

Torch's own replay releases the GIL for each graph, and a busy Python thread then holds it for 5 ms.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import TYPE_CHECKING

import torch

from .plan import NOTHING, Size
from .sampling import DRAWN, GREEDY, TRUNCATED, Want
from .steps import UNDER_WAY, Draft, Feed, Layers, Part, Still, Tell

if TYPE_CHECKING:
    from hal_core import BoundDevice, Stream

    from .steps import Steps


class Graphs:
    """Every part of a step that can be captured (:data:`hal_torch.steps.Part`): layers by size, with and without
    decoding rows, sampling by what it needs, drafts.

    All slots are empty at construction, so a capture has no effect. The graphs take their memory from one pool: they
    run one after the other on the stream of the steps.
    """

    def __init__(self, steps: Steps, sizes: Sequence[Size], bound: BoundDevice, device: torch.device) -> None:
        self.sizes = sizes
        self._bound, self._steps, self._device = bound, steps, device
        self._graphs, self._pool = dict[Part, torch.cuda.CUDAGraph](), torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream(device)
        torch.cuda.synchronize(device)
        with torch.no_grad(), _no_garbage():
            for part in _parts(sizes, drafts=steps.each > 1):
                self._graphs[part] = self._captured(part)
        torch.cuda.synchronize(device)
        self._handles = {part: int(graph.raw_cuda_graph_exec()) for part, graph in self._graphs.items()}

    def __len__(self) -> int:
        return len(self._graphs)

    def launch(self, parts: Sequence[Part], stream: Stream) -> bool:
        """Launch a step's parts on ``stream``. Return False, without a launch, if one of them was not captured."""
        handles = [handle for part in parts if (handle := self._handles.get(part)) is not None]
        if len(handles) < len(parts):
            return False
        self._bound.launch_graphs(graphs=handles, stream=stream)
        return True

    def _captured(self, part: Part) -> torch.cuda.CUDAGraph:
        """The mode of the capture is the one that other threads' work on the device does not spoil."""
        # Run everything that is loaded or compiled at the first use of a kernel: for one token, and for many.
        if not isinstance(part, Layers) or part.size in (NOTHING, self.sizes[0], self.sizes[-1]):
            self._side.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._side):
                self._steps.run(part)
            self._side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"):
            self._steps.run(part)
        return graph


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Collect garbage first, and none within: graphs of a runner that was dropped cannot be destroyed in a capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _parts(sizes: Sequence[Size], *, drafts: bool) -> Iterator[Part]:
    for size, decodes in product((NOTHING, *sizes), (True, False)):
        if size != NOTHING or decodes:
            yield Layers(size, decodes)
    for draw, adjusts, logprobs in product((GREEDY, DRAWN, TRUNCATED), (False, True), (False, True)):
        yield Want(draw, adjusts, logprobs)
    yield from Still
    if drafts:
        yield Draft()
    for turn in range(UNDER_WAY):
        yield from (Feed(turn), Tell(turn))
