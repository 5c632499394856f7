"""Proposers with drafts of a chosen quality, and runs of an engine with one."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hal_core.output.records import SlotStatus
from hal_core.output.sinks import MemorySink
from hal_core.slots.fields import FinishReason, StateConfig
from hal_engine.engine import Engine, Limits
from hal_paddle_runner.worker import Worker


class Drafter:
    """Drafts ``guess(request_id, generated, room)``, and checks its input.

    ``known``: slot to the request's name, and the tokens of prompt and output. ``expected``: name to the tokens that
    plain decoding gives it; all observed tokens have to agree. ``fed``: drafts that steps fed, as observed.
    """

    wants_hidden = False

    def __init__(self, guess, expected):
        self.guess, self.expected, self.known = guess, expected, {}
        self.drafted = self.fed = self.finished = 0

    def enter(self, slot, request, tokens):
        assert slot not in self.known
        self.known[slot] = (request.request_id, request.prompt_len, tokens.tolist())

    def observe(self, fed):
        assert len(fed.slots) == len(fed.accepted) == len(fed.drafted) == len(set(fed.slots))
        self.fed += sum(fed.drafted)
        for slot, accepted in zip(fed.slots, fed.accepted, strict=True):
            name, prompt, tokens = self.known[slot]
            tokens += accepted.tolist()
            assert tuple(tokens[prompt:]) == self.expected[name][: len(tokens) - prompt]

    def propose(self, room):
        drafts = {}
        for slot, most in room.items():
            name, prompt, tokens = self.known[slot]
            drafts[slot] = self.guess(name, len(tokens) - prompt, most)
            self.drafted += len(drafts[slot])
        return drafts

    def leave(self, slot, *, finished):
        del self.known[slot]
        self.finished += finished

    def close(self):
        """There are no resources to release."""


def guesses(expected, kind, vocab, seed=0):
    """Drafts that are right, wrong at each place, right up to a place, any, or too few."""
    draw = np.random.default_rng(seed)

    def right(name, at, most):
        return list(expected[name][at : at + most])

    def wrong(name, at, most):
        return [(token + 1) % vocab for token in right(name, at, most)]

    def partly(name, at, most):
        place = int(draw.integers(0, most + 1))
        return right(name, at, most)[:place] + wrong(name, at, most)[place:]

    def random(_, __, most):
        return draw.integers(0, vocab, int(draw.integers(0, most + 1))).tolist()

    return {"oracle": right, "always wrong": wrong, "partly right": partly, "random": random}[kind]


@dataclass
class Delivered:
    """The records of a request: tokens, the row of log-probabilities of each, and its end."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[list[int], list[float], int]] = field(default_factory=list)
    finish: FinishReason = FinishReason.NONE
    message: str = ""


def delivered(sink):
    """Map request ids to the collected records, in order."""
    found: dict[str, Delivered] = {}
    for record in sink.records:
        for row in record.rows():
            entry = found.setdefault(row.request_id, Delivered())
            entry.finish, entry.message = row.finish or entry.finish, row.message or entry.message
            if row.status is not SlotStatus.TOKEN:
                continue
            assert row.position == len(entry.tokens), "tokens out of order"
            entry.tokens += row.tokens.tolist()
            if row.logprobs is not None:
                columns = zip(row.logprob_token_ids.tolist(), row.logprobs.tolist(), row.ranks.tolist(), strict=True)
                for ids, values, rank in columns:
                    used = [place for place, token in enumerate(ids) if token >= 0 and np.isfinite(values[place])]
                    if used:  # else it requested none
                        entry.logprobs.append(([ids[p] for p in used], [values[p] for p in used], rank))
    return found


@dataclass(frozen=True)
class Setting:
    """The layout of a run; ``drafts`` is the most a step verifies of a request."""

    slots: int = 3
    blocks: int = 48
    chunk: int = 256
    drafts: int = 0
    block_size: int = 4


def run(device, model, requests, setting, proposer=None, *, arrivals=(), aborts=(), worker=Worker):
    """Serve all requests; return the engine and its worker at the end.

    Each step feeds the tokens that the scheduler announced, and all slots and blocks are free at the end. See
    :func:`serve`.
    """
    fed = len(model.fed)

    def announced(engine):
        nonlocal fed
        for tokens in model.fed[fed:]:
            assert tokens <= engine.scheduler.launch_tokens, "the step fed more than was foretold"
            model.launches.append((engine.scheduler.launch_tokens, tokens))
        fed = len(model.fed)

    given = {"arrivals": arrivals, "aborts": aborts, "worker": worker, "after": announced}
    engine = serve(device, model, requests, setting, proposer, **given)
    assert engine.worker.state.host_table.requests == [None] * setting.slots
    assert engine.scheduler.pool.free == setting.blocks
    return engine


def serve(device, model, requests, setting, proposer=None, *, arrivals=(), aborts=(), worker=Worker, after):
    """Serve all requests; return the engine at the end.

    ``arrivals``: the step before which each is submitted. ``aborts``: pairs of a step and the name of a request that is
    aborted before it. ``after``: called with the engine after each step.
    """
    sizes = StateConfig(
        num_slots=setting.slots,
        max_model_len=32,
        block_size=setting.block_size,
        max_draft_tokens=setting.drafts,
        max_logprobs=2,
        max_stop_length=3,
    )
    engine = Engine(
        worker(device, model, sizes, setting.blocks, MemorySink(), proposer=proposer), Limits(chunk=setting.chunk)
    )
    step, last = 0, max(arrivals, default=0)
    while engine.busy or step <= last:
        for number, request in enumerate(requests):
            if (arrivals[number] if arrivals else 0) == step:
                engine.submit(request)
        for when, name in aborts:
            if when == step:
                engine.abort(name)
        engine.step()
        after(engine)
        step += 1
    return engine
