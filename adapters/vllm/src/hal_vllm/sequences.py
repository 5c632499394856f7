"""Drawn sequences of requests on vLLM's own slot state and on that over hal: after every call the same bytes.

Both sides run vLLM's own host code; what it launches is vLLM's kernels, interpreted by Triton, or those in their place.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

import numpy as np
import torch

from .kernels import GPU
from .stage import Stage

VOCABULARY = 197
Tensors = dict[str, torch.Tensor]
ULP = {"gumbel": 2, "logprobs": 4, "fp64": 4}
"""Outputs that may differ by so many steps of their format: a logarithm is the library's. All others are bytes."""


class Differs(AssertionError):
    """Two sides differ; ``what`` names the kernel or class."""

    def __init__(self, what: str, where: str, own: torch.Tensor, other: torch.Tensor) -> None:
        self.what = what
        super().__init__(f"{what} ({where}): vLLM's own {own.tolist()}, hal's {other.tolist()}")


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
        self.processors = [getattr(import_module(f"{GPU}.sample.{at}"), name)(None, shared) for at, name in made.items()]
        self.wanted = import_module(f"{GPU}.sample.logprob").LogprobTokenIdsState(rows, device)

    def add(self, name: str, drawn: Mapping[str, Any]) -> None:
        """Put a request into a slot."""
        self.requests.add_request(name, drawn["prompt"], drawn["tokens"], drawn["done"], 5)
        row = self.requests.req_id_to_index[name]
        self.tables.append_block_ids(row, drawn["blocks"], overwrite=True)
        self.sampling.add_request(row, drawn["params"])
        for one in (*self.processors, self.wanted):
            one.add_request(row, drawn["params"])

    def apply(self, fresh: bool) -> None:
        """Apply what was staged, in the runner's order."""
        if fresh:
            self.requests.apply_staged_writes()
        for one in (self.sampling, *self.processors, self.wanted, self.tables):
            one.apply_staged_writes()
        if self.stage is not None:
            self.stage.flush()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor of the state, by its name."""
        for owner in (self.requests, self.tables, self.sampling, *self.processors, self.wanted):
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
            raise Differs(what, f"{where}: {name}, {tensor.dtype} against {found.dtype}", tensor, found)
        left, right = tensor.contiguous().numpy(), found.contiguous().numpy()
        if left.tobytes() == right.tobytes():
            continue
        if ulp and left.dtype.kind == "f":
            steps = left.dtype.str.replace("f", "i")
            apart = np.abs(left.view(steps).astype(np.float64) - right.view(steps).astype(np.float64))
            near = np.abs(left - right) <= ulp * np.finfo(left.dtype).eps  # where a difference of logarithms nears 0
            if bool(((apart <= ulp) | near).all()):
                continue
        at = (left != right).reshape(-1)
        raise Differs(what, f"{where}: {name} at {np.flatnonzero(at)[:4].tolist()}", tensor, found)


class Sequence:
    """One drawn sequence of steps on both sides."""

    def __init__(self, seed: int, sides: Sides, stage: Stage, counts: Counter[str], most_rows: int, longest: int) -> None:
        self.draw, self.seed, self.sides, self.counts = random.Random(seed), seed, sides, counts
        draw = self.draw
        self.sizes = {
            "rows": draw.choice([2, 3, 9, most_rows]),
            "length": draw.choice([64, 112, 208, longest]),
            "drafts": draw.choice([0, 1, 3, 8]),
            "groups": draw.choice([1, 1, 2, 3]),
            "tokens": 256,
        }
        sides.play(False)
        self.own = Slots(self.sizes, torch.device("cpu"), None)
        sides.play(True)
        self.other = Slots(self.sizes, stage.tensors, stage)
        self.live: dict[str, dict[str, Any]] = {}
        self.number = 0

    def both(self, what: str, act: Callable[[Slots], Tensors | None], *, ulp: int = 0) -> Tensors:
        """Do the same to both sides, compare what comes out, and return vLLM's own."""
        self.sides.play(False)
        own = act(self.own) or {}
        self.sides.play(True)
        other = act(self.other) or {}
        self.counts[what] += 1
        compare(what, f"sequence {self.seed}", own, other, ulp)
        return own

    def run(self) -> None:
        """Make the steps."""
        for _ in range(self.draw.randint(2, 7)):
            self._requests()
            self.both("buffers", lambda side: dict(side.tensors()))
            names = [name for name in self.live if self.draw.random() < 0.9]
            if names:
                from .steps import Step

                Step(self, names).run()
                self.both("state after the step", lambda side: dict(side.tensors()))
                self._finish()

    def _requests(self) -> None:
        draw, length = self.draw, self.sizes["length"]
        for name in [one for one in self.live if draw.random() < 0.25]:
            self.both("remove", lambda side, name=name: side.requests.remove_request(name) and None)
            del self.live[name]
        fresh: list[str] = []
        while len(self.live) < self.sizes["rows"] and draw.random() < 0.6:
            self.number += 1
            name, drawn = f"r{self.number}", drawn_request(draw, length, self.sizes["groups"])
            self.both("add", lambda side, name=name, drawn=drawn: side.add(name, drawn))
            self.live[name] = {"length": len(drawn["tokens"]), "done": drawn["done"], "prefill": len(drawn["tokens"])}
            fresh.append(name)
        for name in self.live.keys() - set(fresh):
            row = self.own.requests.req_id_to_index[name]
            full = int(self.own.tables.num_blocks.np[:, row].max()) >= length // 16 + 1
            if draw.random() < 0.4 and not full:
                more = tuple([draw.randrange(500)] for _ in range(self.sizes["groups"]))
                self.both("append", lambda side, row=row, more=more: side.tables.append_block_ids(row, more, overwrite=False))
        self.both("apply", lambda side: side.apply(bool(fresh)))

    def _finish(self) -> None:
        for name in list(self.live):
            row = self.own.requests.req_id_to_index[name]
            one = self.live[name]
            one["done"] = int(self.own.requests.num_computed_tokens.gpu[row])
            one["length"] = int(self.own.requests.total_len.gpu[row])
            if one["length"] >= self.sizes["length"] - 12:
                self.both("remove", lambda side, name=name: side.requests.remove_request(name) and None)
                del self.live[name]


def drawn_request(draw: random.Random, length: int, groups: int) -> dict[str, Any]:
    """Return a request: its tokens, blocks, how much of it is computed, and parameters of every kind."""
    prompt = draw.randint(1, min(length - 16, 120))
    more = draw.randint(0, 4) if draw.random() < 0.3 else 0
    tokens = [draw.randrange(VOCABULARY) for _ in range(prompt + more)]
    params = import_module("vllm.sampling_params").SamplingParams(
        temperature=draw.choice([0.0, 0.5, 1.0, 1.7]),
        top_k=draw.choice([0, 5]),
        top_p=draw.choice([1.0, 0.9]),
        min_p=draw.choice([0.0, 0.0, 0.1]),
        seed=draw.choice([1, 7, 2**40 + 3, -(2**50), None]) if draw.random() < 0.99 else 5,
        repetition_penalty=draw.choice([1.0, 1.0, 1.3]),
        frequency_penalty=draw.choice([0.0, 0.4]),
        presence_penalty=draw.choice([0.0, -0.3]),
        min_tokens=(least := draw.choice([0, 0, 4])),
        max_tokens=50,
        stop_token_ids=sorted(draw.sample(range(VOCABULARY), 3)) if least else None,
        logit_bias=draw.choice([None, {3: 1.5, 90: -4.0}]),
        allowed_token_ids=draw.choice([None, None, sorted(draw.sample(range(VOCABULARY), 20))]),
    )
    if params.seed is None:
        params.seed = draw.randrange(2**62)  # vLLM would draw it itself, on each side anew
    words = [[draw.choice(tokens[-3:] + [5]) for _ in range(draw.randint(1, 3))] for _ in range(draw.randint(0, 3))]
    params._bad_words_token_ids = words or None
    params.logprob_token_ids = draw.choice([None, None, [4, 9, 77]])
    blocks = tuple([draw.randrange(500) for _ in range((prompt + more) // 16 + 1)] for _ in range(groups))
    done = draw.choice([0, 0, draw.randint(0, prompt + more - 1)])
    return {"prompt": prompt, "tokens": tokens, "done": done, "blocks": blocks, "params": params}


