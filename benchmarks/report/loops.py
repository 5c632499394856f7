"""Two loops that serve the same requests by the same graphs: hal's engine, and one that is plain torch.

Both note when each step's tokens were on the host, and whose they were. Both admit a request when it is due.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from hal_core import OutputRecord, Request, SamplingParams
from hal_torch.plan import NOTHING, Piece, size_of
from hal_torch.sampling import Want
from hal_torch.steps import UNDER_WAY, Layers

from .node import Node


@dataclass(frozen=True)
class LoadRequest:
    """A request: when it is due (seconds from the beginning), its prompt, int32, and how many tokens it is given."""

    name: str
    prompt: np.ndarray[Any, np.dtype[np.int32]]
    tokens: int
    due: float = 0.0


class Given(Sequence[str]):
    """Requests that got a token by a record; looked up after the run."""

    def __init__(self, record: OutputRecord) -> None:
        self._record = record

    @cached_property
    def _names(self) -> list[str]:
        given = self._record.counts.tolist()
        return [name for name, count in zip(self._record.request_ids, given, strict=True) if count]

    def __len__(self) -> int:
        return int(self._record.counts.sum())

    def __getitem__(self, at: Any) -> Any:  # noqa: ANN401
        return self._names[at]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)


@dataclass
class Run:
    """Times at which each step's output was taken (seconds from the beginning), and the requests that got a token."""

    taken: list[tuple[float, Sequence[str]]] = field(default_factory=list)
    most_waiting: int = 0


MOST_PIECES = 32
"""Of prompts in a step of the plain loop: as many as the captured graphs have room for."""
Enough = Callable[[Run], bool]


def by_hal(node: Node, load: Sequence[LoadRequest], enough: Enough, *, overlap: bool = True) -> Run:
    """hal's engine. ``enough``: whether to stop; all requests have ended, or are ended then."""
    run, at = Run(), 0
    begin = time.perf_counter()

    def note(record: OutputRecord) -> None:
        run.taken.append((time.perf_counter() - begin, Given(record)))

    with node.engine(note, overlap=overlap) as engine:
        while not enough(run):
            now = time.perf_counter() - begin
            while at < len(load) and load[at].due <= now:
                one = load[at]
                engine.submit(Request(one.name, one.prompt, SamplingParams(max_tokens=one.tokens)))
                at += 1
            run.most_waiting = max(run.most_waiting, len(engine.scheduler.waiting))
            if engine.busy:
                engine.step()
            elif at < len(load):
                time.sleep(max(0.0, min(1e-3, load[at].due - now)))
            else:
                break
        over = len(run.taken)
        for one in load[:at]:
            engine.abort(one.name)
        for _ in engine.run():
            pass
        engine.withdraw()
        del run.taken[over:]
    return run


class Plain:
    """A loop in torch alone, for greedy requests that end by their length.

    Slots have fixed blocks, requests are written field by field, and what a step changes is torch's work, captured as a
    graph. It is one step ahead, unless told."""

    def __init__(self, node: Node) -> None:
        self._node, self._steps, self._graphs = node, node.runner._steps, node.runner.graphs
        state, slots = node.state, node.slots
        self._f = {name: state.tensor(name, "torch") for name in state.layout.fields}
        for name in ("sampled_token_ids", "next_tokens", "stop_flags", "step_idx"):
            self._f[name] = self._f[name][:, 0]
        for name in ("seq_lens_encoder", "seq_lens_decoder", "seq_lens_this_time"):
            self._f[name] = self._f[name][:, 0]
        device = self._f["stop_flags"].device
        self._on_gpu = device.type == "cuda"
        blocks = torch.arange(slots * state.sizes.max_blocks, dtype=torch.int32, device=device)
        self._f["block_tables"].copy_(blocks.view(slots, -1))
        self._f["stop_flags"].fill_(True)
        self._f["seq_lens_this_time"].zero_()
        self._host = [torch.zeros(slots, dtype=torch.int64, pin_memory=self._on_gpu) for _ in range(UNDER_WAY)]
        self._events = [torch.cuda.Event() if self._on_gpu else None for _ in range(UNDER_WAY)]
        self._after = self._captured() if self._on_gpu else self._update

    def _captured(self) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._update()
        return graph.replay

    def _update(self) -> None:
        f = self._f
        gives, encoder = f["sampled_token_ids"] >= 0, f["seq_lens_encoder"]
        f["seq_lens_decoder"].add_(torch.where(gives, torch.where(encoder > 0, encoder, 1), 0))
        f["seq_lens_this_time"].copy_(torch.where(gives, 1, f["seq_lens_this_time"]))
        f["next_tokens"].copy_(torch.where(gives, f["sampled_token_ids"], f["next_tokens"]))
        encoder.mul_(~gives)

    def _replay(self, part: Any) -> None:  # noqa: ANN401 (a part of a step)
        if self._graphs is None:
            self._steps.run(part)
        else:
            self._graphs._graphs[part].replay()

    def _enter(self, slot: int, one: LoadRequest) -> None:
        f, count = self._f, len(one.prompt)
        prompt = torch.from_numpy(one.prompt.astype(np.int64))
        if self._on_gpu:  # a copy of pageable memory, or of another type, waits for the stream
            prompt = prompt.pin_memory()
        f["token_ids"][slot, :count].copy_(prompt, non_blocking=True)
        f["seq_lens_encoder"][slot] = count
        f["seq_lens_decoder"][slot] = 0
        f["seq_lens_this_time"][slot] = count
        f["step_idx"][slot] = 0
        f["stop_flags"][slot] = False

    def serve(self, load: Sequence[LoadRequest], enough: Enough, *, overlap: bool = True) -> Run:
        """Serve the load."""
        run, at, number = Run(), 0, 0
        waiting: deque[LoadRequest] = deque()
        free, left = list(range(self._node.slots))[::-1], dict[int, tuple[LoadRequest, int]]()
        texts = self.texts = dict[str, list[int]]()
        before: tuple[int, list[tuple[int, str]]] | None = None
        sizes = () if self._graphs is None else self._graphs.sizes
        begin = time.perf_counter()
        while not enough(run):
            now = time.perf_counter() - begin
            while at < len(load) and load[at].due <= now:
                waiting.append(load[at])
                at += 1
            run.most_waiting = max(run.most_waiting, len(waiting))
            if not left and not waiting and before is None:
                if at == len(load):
                    break
                time.sleep(max(0.0, min(1e-3, load[at].due - now)))
                continue
            launched, turn = None, number % UNDER_WAY
            if left or waiting:
                decodes, pieces, room = bool(left), list[Piece](), self._node.chunk
                while waiting and free and len(waiting[0].prompt) <= room and len(pieces) < MOST_PIECES:
                    one, slot = waiting.popleft(), free.pop()
                    room -= len(one.prompt)
                    self._enter(slot, one)
                    left[slot], texts[one.name] = (one, one.tokens), []
                    pieces.append(Piece(slot, 0, len(one.prompt), True))
                if pieces:
                    self._replay(self._steps.plan(pieces, turn))
                self._replay(Layers(size_of(pieces, sizes) if pieces else NOTHING, decodes))
                self._replay(Want())
                self._after()
                self._host[turn].copy_(self._f["sampled_token_ids"], non_blocking=True)
                if (event := self._events[turn]) is not None:
                    event.record()
                launched = turn, [(slot, one.name) for slot, (one, _) in left.items()]
                number += 1
                self._count(left, free)
            before, due = (launched, before) if overlap else (None, launched)
            if due is not None:
                if (event := self._events[due[0]]) is not None:
                    event.synchronize()
                tokens = self._host[due[0]].tolist()
                for slot, name in due[1]:
                    texts[name].append(tokens[slot])
                run.taken.append((time.perf_counter() - begin, [name for _, name in due[1]]))
        self._f["stop_flags"].fill_(True)
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()
        return run

    def _count(self, left: dict[int, tuple[LoadRequest, int]], free: list[int]) -> None:
        """A step was launched that gives each a token: those that end with it leave."""
        ended = [slot for slot, (_, count) in left.items() if count == 1]
        for slot in left:
            left[slot] = left[slot][0], left[slot][1] - 1
        for slot in ended:
            del left[slot]
            free.append(slot)
            self._f["stop_flags"][slot] = True


def by_plain(node: Node, load: Sequence[LoadRequest], enough: Enough, *, overlap: bool = True) -> Run:
    """The plain loop."""
    with torch.no_grad():
        return Plain(node).serve(load, enough, overlap=overlap)


LOOPS = {"hal": by_hal, "plain": by_plain}
