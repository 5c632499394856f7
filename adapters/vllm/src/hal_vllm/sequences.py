"""Drawn sequences of requests on both sides: after every call the same bytes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch

from .buffers import CODES
from .sides import LETTERS, VOCABULARY, WIDTH, Differs, Sides, Slots, Tensors, compare
from .stage import Stage
from .steps import Step


class Sequence:
    """One drawn sequence of steps on both sides."""

    def __init__(self, seed: int, sides: Sides, stage: Stage, counts: Counter[str]) -> None:
        self.draw, self.seed, self.sides, self.counts = random.Random(seed), seed, sides, counts
        draw = self.draw
        self.sizes = {
            "rows": draw.choice([2, 2, 3, 3, 9, 9, 16, 64]),
            "length": draw.choice([64, 112, 208, 208, 512, 2048]),
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
        try:
            other = act(self.other) or {}
        except Exception as error:
            raise Differs(what, f"sequence {self.seed}", f"hal's raises {type(error).__name__}: {error}") from error
        self.counts[what] += 1
        compare(what, f"sequence {self.seed}", own, other, ulp)
        return own

    def run(self) -> None:
        """Make the steps."""
        for _ in range(self.draw.randint(3, 8)):
            self._requests()
            self.both("buffers", lambda side: dict(side.tensors()))
            names = [name for name in self.live if self.draw.random() < 0.9]
            if names:
                rows = [self.own.requests.req_id_to_index[name] for name in names]
                Step(self.draw, self.sizes, rows, [self.live[name] for name in names], self.both).run()
                self.both("state after the step", lambda side: dict(side.tensors()))
                self._finish()

    def _requests(self) -> None:
        draw, length = self.draw, self.sizes["length"]
        for name in [one for one in self.live if draw.random() < 0.25]:
            self.both("remove", partial(_remove, name))
            del self.live[name]
        fresh: list[str] = []
        while len(self.live) < self.sizes["rows"] and draw.random() < 0.6:
            self.number += 1
            name, drawn = f"r{self.number}", drawn_request(draw, length, self.sizes["groups"])
            self.both("add", partial(_add, name, drawn))
            self.live[name] = {"length": len(drawn["tokens"]), "done": drawn["done"], "prefill": len(drawn["tokens"])}
            fresh.append(name)
        for name in self.live.keys() - set(fresh):
            row = self.own.requests.req_id_to_index[name]
            full = int(self.own.tables.num_blocks.np[:, row].max()) >= length // 16 + 1
            if draw.random() < 0.4 and not full:
                more = tuple([draw.randrange(500)] for _ in range(self.sizes["groups"]))
                self.both("append", partial(_append, row, more))
        direct = drawn_writes(draw)
        self.both("direct writes", lambda side: side.direct.write(*direct))
        self.both("apply", lambda side: {"left to submit": torch.tensor(side.apply(bool(fresh)))})

    def _finish(self) -> None:
        for name in list(self.live):
            row = self.own.requests.req_id_to_index[name]
            one = self.live[name]
            one["done"] = int(self.own.requests.num_computed_tokens.gpu[row])
            one["length"] = int(self.own.requests.total_len.gpu[row])
            if one["length"] >= self.sizes["length"] - 12:
                self.both("remove", partial(_remove, name))
                del self.live[name]


def _remove(name: str, side: Slots) -> None:
    side.requests.remove_request(name)


def _add(name: str, drawn: Mapping[str, Any], side: Slots) -> None:
    side.add(name, drawn)


def _append(row: int, blocks: tuple[list[int], ...], side: Slots) -> None:
    side.tables.append_block_ids(row, blocks, overwrite=False)


def drawn_writes(draw: random.Random) -> tuple[list[tuple[int, int, int, list[int]]], list[int], int | None]:
    """Return runs of a table's row that may overlap, what is kept on the host, and how many rows of it are copied."""
    runs = []
    for _ in range(draw.randint(0, 8)):
        start = draw.choice([0, 0, 2, WIDTH - 2])
        count = draw.choice([1, 2, 5, WIDTH])
        values = [draw.randrange(2**20) for _ in range(min(count, WIDTH - start))]
        runs.append((draw.randrange(len(CODES)), draw.randrange(2), start, values))
    return runs, [draw.randrange(2) for _ in range(12)], draw.choice([None, 2])


def drawn_request(draw: random.Random, length: int, groups: int) -> dict[str, Any]:
    """Return a request: its tokens, blocks, how much of it is computed, and parameters of every kind."""
    prompt = draw.randint(1, length - 16 if draw.random() < 0.1 else min(length - 16, 120))
    more = draw.randint(0, 4) if draw.random() < 0.3 else 0
    letters = draw.choice([LETTERS, VOCABULARY])
    tokens = [draw.randrange(letters) for _ in range(prompt + more)]
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
    words = [
        [draw.choice([*tokens[-3:], *range(LETTERS), 5]) for _ in range(draw.randint(1, 3))]
        for _ in range(draw.randint(0, 3))
    ]
    params._bad_words_token_ids = words or None
    params.logprob_token_ids = draw.choice([None, None, [4, 9, 77]])
    blocks = tuple([draw.randrange(500) for _ in range((prompt + more) // 16 + 1)] for _ in range(groups))
    last = prompt + more - 1  # most requests decode after their first step
    done = draw.choice([0, draw.randint(0, last), last, last])
    return {"prompt": prompt, "tokens": tokens, "done": done, "blocks": blocks, "params": params}
