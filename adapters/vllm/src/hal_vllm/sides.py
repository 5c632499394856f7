"""vLLM's own slot state and that over hal, side by side.

Both sides run vLLM's own host code; what it launches is vLLM's kernels, interpreted by Triton, or those in their place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any

import numpy as np
import torch

from .buffers import CODES
from .kernels import GPU
from .stage import Stage

VOCABULARY = 197
LETTERS = 4
"""Tokens that are drawn often, so that n-grams, drafts and bad words match."""
WIDTH = 1100
"""Elements of a row that is written directly: more than one program of vLLM's kernel writes at a time."""
Tensors = dict[str, torch.Tensor]
ULP = {"noise": 2, "logprobs": 8}
"""Outputs that may differ by so many steps of their format, or of 1: a logarithm and the order of a sum are the
library's. All others are bytes."""


class Differs(AssertionError):
    """Two sides differ; ``what`` names the kernel or class."""

    def __init__(self, what: str, where: str, how: str) -> None:
        self.what = what
        super().__init__(f"{what} ({where}): {how}")


class Sides:
    """The names in vLLM's modules, as they are (``own``) and with hal's objects in their place."""

    def __init__(self, replaced: Mapping[int, Any]) -> None:
        """``replaced``: the id of each object of vLLM's to the one in its place."""
        tables = import_module(f"{GPU}.block_table").BlockTables
        owners: list[Any] = [module for name, module in sys.modules.items() if name.startswith(GPU + ".")]
        self.bindings = [
            (owner, name, value, replaced[id(value)])
            for owner in [*owners, tables]
            for name, value in list(vars(owner).items())
            if id(value) in replaced
        ]

    def play(self, hal: bool) -> None:
        """Let vLLM's code use one side's objects."""
        for owner, name, own, other in self.bindings:
            setattr(owner, name, other if hal else own)


class Direct:
    """Buffers that a sequence writes itself: vLLM's host code fills no row, writes none twice before an apply, and
    copies no first rows alone, but it may."""

    def __init__(self, device: torch.device) -> None:
        made = import_module(f"{GPU}.buffer_utils")
        self.tables = [made.StagedWriteTensor((2, WIDTH), dtype, device) for dtype in CODES]
        self.kept = made.UvaBackedTensor((6, 2), torch.int64)

    def write(self, runs: Iterable[tuple[int, int, int, list[int]]], kept: Iterable[int], rows: int | None) -> None:
        """Stage ``runs`` (table, row, start, values) and apply them; copy the first ``rows`` of what is ``kept``.

        Interpreted, vLLM's kernel writes them in their order, so that the last one wins.
        """
        for number, row, start, values in runs:
            given = list(values)
            self.tables[number].stage_write(row, start, given)
            given.clear()
            if len(values) == 2:
                self.tables[number].apply_write()
        self.kept.np.reshape(-1)[:] = list(kept)
        self.kept.copy_to_uva(rows)
        for table in self.tables:
            table.apply_write()


class Slots:
    """The slot state of one side, made by vLLM's own code."""

    def __init__(self, sizes: Mapping[str, int], device: torch.device, stage: Stage | None) -> None:
        rows, length, groups = sizes["rows"], sizes["length"], sizes["groups"]
        parts = {name: import_module(f"{GPU}.{name}") for name in ("states", "block_table", "sample.states")}
        self.device, self.stage, self.sizes = device, stage, sizes
        self.requests = parts["states"].RequestState(
            rows, length, sizes["tokens"], sizes["drafts"], VOCABULARY, device, use_dense_all_token_ids=True
        )
        self.tables = parts["block_table"].BlockTables(
            [16] * groups, rows, sizes["tokens"], [length // 16 + 1] * groups, device
        )
        self.sampling = parts["sample.states"].SamplingStates(rows, VOCABULARY)
        interface = import_module(f"{GPU}.sample.logits_processor.interface")
        shared = interface.LogitsProcRequestState.from_request_state(self.requests)
        made = {"penalties": "PenaltiesState", "logit_bias": "LogitBiasState", "bad_words": "BadWordsState"}
        classes = [getattr(import_module(f"{GPU}.sample.{at}"), name) for at, name in made.items()]
        self.processors = [one(None, shared) for one in classes]
        self.wanted = import_module(f"{GPU}.sample.logprob").LogprobTokenIdsState(rows, device)
        self.direct = Direct(device)

    def add(self, name: str, drawn: Mapping[str, Any]) -> None:
        """Put a request into a slot."""
        self.requests.add_request(name, drawn["prompt"], drawn["tokens"], drawn["done"], 5)
        row = self.requests.req_id_to_index[name]
        self.tables.append_block_ids(row, drawn["blocks"], overwrite=True)
        self.sampling.add_request(row, drawn["params"])
        for one in (*self.processors, self.wanted):
            one.add_request(row, drawn["params"])

    def apply(self, fresh: bool) -> int:
        """Apply what was staged, in the runner's order, and return how many tensors are left to submit: none."""
        if fresh:
            self.requests.apply_staged_writes()
        for one in (self.sampling, *self.processors, self.wanted, self.tables):
            one.apply_staged_writes()
        if self.stage is None:
            return 0
        self.stage.flush()
        return len(self.stage.pending)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor of the state, by its name."""
        for owner in (self.requests, self.tables, self.sampling, *self.processors, self.wanted, self.direct):
            for name, value in vars(owner).items():
                held = value if isinstance(value, list) else [value]
                for number, one in enumerate(held):
                    tensor = one if isinstance(one, torch.Tensor) else getattr(one, "gpu", None)
                    if isinstance(tensor, torch.Tensor) and tensor.dtype != torch.uint64:
                        yield f"{type(owner).__name__}.{name}[{number}]", tensor


def compare(what: str, where: str, own: Tensors, other: Tensors, ulp: int = 0) -> None:
    """Raise :class:`Differs` for the first tensors that are not the same bytes, or more than ``ulp`` steps apart."""
    for name, tensor in own.items():
        found = other[name].cpu()
        if tensor.dtype != found.dtype or tensor.shape != found.shape:
            how = f"{name} is {tensor.dtype} {tuple(tensor.shape)}, hal's {found.dtype} {tuple(found.shape)}"
            raise Differs(what, where, how)
        left, right = tensor.contiguous().numpy(), found.contiguous().numpy()
        if left.tobytes() == right.tobytes():
            continue
        if ulp and left.dtype.kind == "f":
            steps = left.dtype.str.replace("f", "i")
            apart = np.abs(left.view(steps).astype(np.float64) - right.view(steps).astype(np.float64))
            with np.errstate(invalid="ignore"):
                near = (
                    np.abs(left - right) <= ulp * np.finfo(left.dtype).eps
                )  # where a difference of logarithms nears 0
            if bool(((apart <= ulp) | near).all()):
                continue
        at = np.flatnonzero((left != right).reshape(-1))[:4]
        own_values, other_values = (values.reshape(-1)[at].tolist() for values in (left, right))
        raise Differs(what, where, f"{name} at {at.tolist()} is {own_values}, hal's {other_values}")
