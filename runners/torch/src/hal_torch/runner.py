"""The decoder as a runner: the state's fields are torch's tensors, and a step is work of the device alone."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial, reduce
from operator import or_
from typing import TYPE_CHECKING

import torch
from hal_core import Request, SlotState, Step, Stream
from hal_engine.engine import DEFAULT_CHUNK
from hal_engine.model.config import read_config
from hal_engine.model.loading import checked_entries
from hal_engine.model.split import Shard, check_split
from hal_engine.sampling import SUPPORTED

from .attention import Kernels, TorchKernels, TritonKernels, packs
from .blocks import CacheBlocks
from .graphs import Graphs
from .model import Decoder
from .plan import CHUNK, NOTHING, Piece, captured_sizes, pieces_of, size_of
from .ranks import meet
from .sampling import TROUBLES, Want
from .steps import UNDER_WAY, Draft, Layers, Part, Steps, Still, Tell
from .support import check_room, check_sees, computing_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hal_engine.stepping import PlannedStep, RunnerSetup


class TorchRunner:
    """Generates in torch on the state's device (:class:`hal_engine.stepping.Runner`), without the host between two
    steps.

    A step is one run of the layers over all pieces of prompts and all slots that decode, and one sampling. On cuda each
    is a graph that was captured when the runner was made, if the step's size was captured. A slot that does not run
    writes to a block that no request has, and its result is dropped. A request with invalid logits is stopped by the
    step itself, whose record has the error. On several ranks of one host each has its part of the heads and of the MLP,
    and all sample the same. With drafts each slot feeds as many rows as it may have tokens in a step, and the step
    accepts the drafts that it samples itself (:mod:`hal_torch.drafting`). ``cache``: the blocks in which its requests
    move to another worker.
    """

    needs_host, drafts_on_device = "", True
    supports = SUPPORTED
    chunk: int
    """Most prompt tokens of a step: on a GPU as many as its attention needs to use all multiprocessors."""

    def __init__(
        self,
        setup: RunnerSetup,
        *,
        decoder: Decoder | None = None,
        captures: bool | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        """``decoder``: a loaded model; by default the checkpoint of ``setup`` is loaded. ``captures``, ``kernels``: use
        CUDA graphs and the Triton kernels; by default on cuda only."""
        state, group = setup.state, setup.group
        check_sees(setup.device)
        self._device = state.tensor("token_ids", "torch").device
        self._on_cuda = self._device.type == "cuda"
        self.chunk = CHUNK if self._on_cuda else DEFAULT_CHUNK
        shard = Shard(group.ranks.index(group.rank), group.size)
        with self._on(setup.device.default_stream):
            if group.size > 1:
                check_split(read_config(setup.model), group.size)
            self.decoder = decoder or self._load(setup, shard)
            if group.size > 1:
                meet(setup, shard)
            self.decoder.allocate_cache(max(1, setup.blocks), state.sizes.block_size)
            kernels = kernels or self._kernels()
            self._steps = Steps(state, self.decoder, kernels)
        self.cache = CacheBlocks(self.decoder, setup.blocks, partial(self._on, setup.device.default_stream))
        self.vocab_size = self.decoder.config.vocab_size
        self._wants: dict[int, Want] = {}
        self._decodes: object = None  # of the step before, and its parts
        self._parts: tuple[Part, Part] = Still.NO_LAYERS, Still.NO_TOKENS
        self.graphs: Graphs | None = None
        if self._on_cuda if captures is None else captures:
            sizes = captured_sizes(state.sizes.num_slots, state.sizes.max_model_len)
            self.graphs = Graphs(self._steps, sizes, setup.device, self._device)

    @property
    def note(self) -> str:
        """Type and place of its computations."""
        where = torch.cuda.get_device_name(self._device) if self._on_cuda else "torch's CPU, which is for tests"
        return f"{str(self.decoder.dtype).removeprefix('torch.')} on {where}"

    def check(self, request: Request) -> None:
        """Accept every request that fits the state."""

    def launch(self, state: SlotState, step: PlannedStep, stream: Stream) -> Step:
        """Put the layers and the sampling on ``stream``. If all of it was captured, one call does so, which keeps the
        GIL."""
        turn, pieces = step.step.number % UNDER_WAY, pieces_of(step, self._wants)
        if pieces or step.decodes is not self._decodes:
            self._decodes, self._parts = step.decodes, self._planned(state, step, pieces)
        feed = [self._steps.plan(pieces, turn)] if pieces else []
        self._put([*feed, *self._parts, Tell(turn)], stream)
        taken, planned = self._steps.codes_of_turn[turn], step.step

        def errors() -> dict[int, str]:
            codes = bytes(taken)
            return {slot: TROUBLES[code] for slot, code in enumerate(codes) if code} if any(codes) else {}

        if self._parts[1] is Still.NO_TOKENS and planned.logprobs is not None:
            planned = replace(planned, logprobs=None)
        return planned.again(planned.number, errors)

    def _planned(self, state: SlotState, step: PlannedStep, pieces: Sequence[Piece]) -> tuple[Part, Part]:
        """Return how a step runs its layers, and samples. A later step that only decodes the same slots has the same
        ``decodes``, and is not planned again."""
        decoding = step.step.order(state.name)[step.decodes].tolist()
        giving = [*decoding, *(piece.slot for piece in pieces if piece.gives)]
        layers: Part = Still.NO_LAYERS
        if pieces or decoding:
            size = size_of(pieces, () if self.graphs is None else self.graphs.sizes) if pieces else NOTHING
            layers = Layers(size, bool(decoding))
        # The step reports log-probabilities if any of its slots wants them, even one without a token.
        reports = Want(logprobs=step.step.logprobs is not None)
        wants = {id(want): want for want in map(self._wants.__getitem__, giving)}
        return layers, reduce(or_, wants.values(), reports) if giving else Still.NO_TOKENS

    def propose(self, state: SlotState, step: Step, stream: Stream) -> None:
        """Look up drafts in each slot's own tokens."""
        self._put([Draft()], stream)

    def _put(self, parts: Sequence[Part], stream: Stream) -> None:
        if self.graphs is None or not self.graphs.launch(parts, stream):
            with torch.no_grad(), self._on(stream):
                for part in parts:
                    self._steps.run(part)

    def _kernels(self) -> Kernels:
        if not self._on_cuda:
            return TorchKernels()
        return TritonKernels(packs=packs(self.decoder.dtype, self.decoder.config.head_dim, self._device))

    def _load(self, setup: RunnerSetup, shard: Shard) -> Decoder:
        """Return the checkpoint's decoder, if its type and its size suit the device."""
        config = read_config(setup.model)
        stored = checked_entries(setup.model, config)["model.embed_tokens.weight"].dtype
        dtype = computing_dtype(setup.dtype, stored, self._device)
        check_room(config, dtype, setup.blocks * setup.state.sizes.block_size, self._device, shard.size)
        if dtype == torch.float32:  # the tokens must equal those of the cpu device
            torch.backends.cuda.matmul.allow_tf32 = False
        return Decoder.load(setup.model, str(self._device), dtype, shard)

    def _on(self, stream: Stream) -> AbstractContextManager[object]:
        """Make torch's work go on the step's stream."""
        if not self._on_cuda:
            return nullcontext()
        own = None if stream.handle in (0, 1) else torch.cuda.ExternalStream(stream.handle, self._device)
        context: AbstractContextManager[object] = torch.cuda.stream(own or torch.cuda.default_stream(self._device))
        return context
