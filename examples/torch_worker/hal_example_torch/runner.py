"""The decoder as a runner: the state's fields are torch's tensors, the decode step is a graph of the device's work."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
from hal_core import InvalidValue, Request, SamplingParams, SlotState, Step, Stream, TaskKind
from torch import Tensor, distributed

from hal.model.config import read_config
from hal.model.split import Shard, check_split
from hal.stepping import PlannedStep, RunnerSetup

from .attention import Attention, FusedAttention, Tokens, attend
from .model import Decoder
from .sampling import DRAWN, GREEDY, TRUNCATED, sample

_READ = (
    *("next_tokens", "seq_lens_this_time", "seq_lens_encoder", "seq_lens_decoder", "stop_flags"),
    *("step_idx", "temperature", "top_p", "seed"),
)
_UNHEARD = (
    *("top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("min_tokens", "bad_words", "logprobs"),
)
_FEEDING = (TaskKind.PREFILL, TaskKind.PREFILL_CHUNK)
_UNDER_WAY = 3
"""Steps whose outcome may not have been read yet: a record is made before the next step but one is launched."""
_USELESS = "logits of this request were NaN, infinite, or all minus infinity"


class TorchRunner:
    """Generates in torch on the state's device (:class:`hal.stepping.Runner`). It needs nothing of the host.

    Decoding slots are one run of all slots, on cuda a graph captured when it is made, one for each way to sample; who
    does not decode writes to a block that is nobody's, and what comes of it is dropped. A piece of a prompt is a run of
    its own. A request whose logits are no use is stopped by the step itself, whose record tells the error. On several
    ranks of one host each has its part of the heads and of the MLP, and all sample the same.
    """

    needs_host = ""

    def __init__(
        self,
        setup: RunnerSetup,
        *,
        decoder: Decoder | None = None,
        dtype: torch.dtype = torch.float32,
        captures: bool | None = None,
        attention: Attention | None = None,
    ) -> None:
        """``decoder``: a model that is there already, else the checkpoint of ``setup`` is loaded as ``dtype``.
        ``captures``, ``attention``: on cuda graphs and the Triton kernel, elsewhere neither, unless told."""
        state, group = setup.state, setup.group
        if state.speculative:
            what, cure = "TorchRunner knows no drafts, and the state has room for some", "run it without --speculate"
            raise InvalidValue(what, cure=cure, argument="--runner")
        self._state, self._size = state, state.sizes.block_size
        self._fields = {name: state.tensor(name, "torch")[:, 0] for name in (*_READ, "sampled_token_ids")}
        self._tokens, self._tables = state.tensor("token_ids", "torch"), state.tensor("block_tables", "torch")
        self._device = self._tokens.device
        on_cuda = self._device.type == "cuda"
        shard = Shard(group.ranks.index(group.rank), group.size)
        with self._on(setup.device.default_stream):
            if group.size > 1:
                check_split(read_config(setup.model), group.size)
                self._meet(setup, shard)
            self.decoder = decoder or Decoder.load(setup.model, str(self._device), dtype, shard)
        self.decoder.allocate_cache(max(1, setup.blocks), self._size)
        self.vocab_size = self.decoder.config.vocab_size
        self._attention = attention or (FusedAttention() if on_cuda else attend)
        slots = state.sizes.num_slots
        self._kinds = np.full(slots, GREEDY)  # by slot, what its request needs
        self._useless = torch.zeros(slots, dtype=torch.bool, device=self._device)
        self._known = [torch.zeros(slots, dtype=torch.bool, pin_memory=on_cuda) for _ in range(_UNDER_WAY)]
        self._graphs: dict[int, Any] = {}
        if on_cuda if captures is None else captures:
            self._capture()

    def check(self, request: Request) -> None:
        """Refuse what it does not sample by."""
        plain = SamplingParams()
        for name in _UNHEARD:
            if (given := getattr(request.params, name)) != getattr(plain, name):
                what = f"{name} = {given!r}, which TorchRunner does not sample by"
                raise InvalidValue(what, cure="leave it out; temperature, top_p and seed are heard", argument=name)

    def launch(self, state: SlotState, step: PlannedStep, stream: Stream) -> Step:
        """Pieces of prompts first, then all that decode, all on ``stream``."""
        known = self._known[step.step.number % _UNDER_WAY]
        with torch.no_grad(), self._on(stream):
            self._useless.zero_()
            self._prefill(step)
            kinds = self._kinds[step.step.order(state.name)[step.decodes]]
            if len(kinds):
                kind = int(kinds.max())
                self._graphs[kind].replay() if kind in self._graphs else self._decode(kind)
            known.copy_(self._useless, non_blocking=True)
        seen = known.numpy()
        return replace(step.step, late_errors=lambda: dict.fromkeys(seen.nonzero()[0].tolist(), _USELESS))

    def propose(self, state: SlotState, step: Step, stream: Stream) -> None:
        """There are no drafts."""

    def _on(self, stream: Stream) -> AbstractContextManager[object]:
        """Torch's work goes on the stream of the step."""
        if self._device.type != "cuda":
            return nullcontext()
        own = None if stream.handle in (0, 1) else torch.cuda.ExternalStream(stream.handle, self._device)
        return torch.cuda.stream(own or torch.cuda.default_stream(self._device))

    def _prefill(self, step: PlannedStep) -> None:
        """Feed the pieces of prompts that the step brings; the last of a prompt gives a token."""
        tasks = step.tasks.plain
        columns = (tasks["kinds"], tasks["slots"], step.tasks.requests)
        counts = (tasks["num_computed_tokens"], tasks["num_scheduled_tokens"])
        for kind, slot, request, start, length in zip(*columns, *counts, strict=True):
            params = request.params
            if kind in (TaskKind.PREFILL, TaskKind.REMOTE_PREFILL):
                drawn = TRUNCATED if params.top_p < 1 else DRAWN
                self._kinds[slot] = drawn if params.temperature > 0 else GREEDY
            if kind not in _FEEDING:
                continue
            positions = torch.arange(start, start + length, device=self._device)[None]
            tables = self._tables[slot : slot + 1, : -(-(start + length) // self._size)]
            places = self._places(tables, positions)[0]
            tokens = Tokens(self._tokens[slot : slot + 1, start : start + length], positions, places, tables)
            hidden = self.decoder.run(tokens, attend)
            part = slice(slot, slot + 1)
            if start + length >= request.total:
                self._give(hidden[:, -1], part, int(self._kinds[slot]), ~self._stopped(part))
            else:
                self._fields["sampled_token_ids"][part] = -1

    def _decode(self, kind: int) -> None:
        """One token of each slot that decodes."""
        field, every = self._fields, slice(None)
        runs = (field["seq_lens_this_time"] > 0) & (field["seq_lens_encoder"] == 0) & ~self._stopped(every)
        positions = torch.where(runs, field["seq_lens_decoder"], -1).long()[:, None]
        ids = torch.where(runs, field["next_tokens"], 0).clamp(0, self.vocab_size - 1)[:, None]
        places = self._places(self._tables, positions).flatten()
        hidden = self.decoder.run(Tokens(ids, positions, places, self._tables), self._attention)
        self._give(hidden[:, 0], every, kind, runs)

    def _give(self, hidden: Tensor, part: slice, kind: int, runs: Tensor) -> None:
        """Write the tokens that follow ``hidden`` ``[n, hidden]``, of those of ``part`` that run."""
        rows = {name: self._fields[name][part] for name in ("temperature", "top_p", "seed", "step_idx")}
        tokens, sampled = sample(self.decoder.logits(hidden), kind, rows), self._fields["sampled_token_ids"]
        useless = runs & (tokens < 0)
        self._useless[part] |= useless
        self._fields["stop_flags"][part] |= useless  # update_inputs leaves it as it is
        sampled[part] = torch.where(runs, tokens.clamp(min=0), sampled[part])

    def _places(self, tables: Tensor, positions: Tensor) -> Tensor:
        """Where the cache has these positions ``[rows, queries]``; below 0, in the block that is nobody's."""
        block = tables.gather(1, positions.clamp(min=0) // self._size).long()
        nobody = self.decoder.keys[0].shape[0] - 1
        block = torch.where((positions < 0) | (block < 0), nobody, block)
        return block * self._size + positions.clamp(min=0) % self._size

    def _stopped(self, part: slice) -> Tensor:
        return self._fields["stop_flags"][part] != 0

    def _meet(self, setup: RunnerSetup, shard: Shard) -> None:
        """Open torch's own group of these ranks: where its first one listens, hal's broadcast tells the others."""
        told, first = setup.state.tensor("sampled_token_ids", "torch"), setup.group.is_first
        within = {"timeout": timedelta(seconds=30)}  # in vain on another host
        if first:
            store = distributed.TCPStore("127.0.0.1", 0, shard.size, True, wait_for_workers=False, **within)
            told[0] = store.port
        setup.device.broadcast_tokens(state=setup.state, group=setup.group, stream=setup.device.default_stream).wait()
        if not first:
            store = distributed.TCPStore("127.0.0.1", int(told[0]), shard.size, **within)
        told.fill_(-1)  # as of empty slots
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        distributed.init_process_group(backend, store=store, rank=shard.index, world_size=shard.size)

    def _capture(self) -> None:
        """Capture the decode step once for each way to sample. All slots are empty, so it changes nothing. The mode is
        the one that other threads' work on the device does not spoil."""
        torch.cuda.synchronize(self._device)
        side, pool = torch.cuda.Stream(self._device), None
        with torch.no_grad():
            for kind in (GREEDY, DRAWN, TRUNCATED):
                with torch.cuda.stream(side):
                    self._decode(kind)  # what is loaded or compiled at the first use
                side.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                    self._decode(kind)
                self._graphs[kind], pool = graph, graph.pool()
        torch.cuda.synchronize(self._device)


bfloat16 = partial(TorchRunner, dtype=torch.bfloat16)
"""The same in half the memory; tokens are then those of no other device."""
