"""A rank that is lost: the same error on every survivor, or new ranks that go on where the delivered tokens end."""

from __future__ import annotations

import random

import pytest

from hal.distributed.errors import RankLost

from .rows import Pooled, Row, Told, engine_of, reference, requests

FEW = [("killed", 2, 1, 1, 7)]
MANY = [("killed", 2, 1, 0, 1), ("killed", 1, 2, 1, 5), ("stopped", 2, 1, 1, 4)]
ANY = [("killed", 2, 1, random.Random(n).randrange(2), random.Random(n).randrange(1, 40)) for n in range(4)]
"""How, tp, dp, which rank, in which step of its group; each loss costs a world of ranks."""


def some(*losses):
    """These, and all others in a whole run."""
    others = [loss for loss in (*FEW, *MANY, *ANY) if loss not in losses]
    return [*losses, *(pytest.param(*loss, marks=pytest.mark.conform) for loss in others)]


class Anew:
    """Gives ranks of a pool; a world in which one was lost is ended, and a new one is made for the next start."""

    def __init__(self, worlds, size, *how):
        self.worlds, self.size, self.how = worlds, size, how
        self.pooled = []

    def __call__(self):
        if self.pooled:
            self.worlds.end(self.size)
        self.pooled.append(Pooled(self.worlds.of(self.size), () if self.pooled else self.how))
        return self.pooled[-1]


@pytest.mark.parametrize(("how", "tp", "dp", "victim", "step"), some())
def test_every_survivor_raises_the_same_error(worlds, how, tp, dp, victim, step):
    """It names the rank and the step; the engine raises it too, and what was delivered before is the reference's."""
    start, told = Anew(worlds, tp * dp, how, victim, step), Told()
    engine = engine_of(Row(tp=tp, dp=dp, timeout=2.0), start, told)
    for request in requests():
        engine.submit(request)
    with pytest.raises(RankLost) as caught:
        for _ in engine.run():
            pass
    worlds.end(tp * dp)
    assert caught.value.rank == victim
    assert caught.value.step in (step, step + 1)
    answers = start.pooled[0].answers
    for rank in set(range(tp * dp)) - {victim}:
        assert answers[rank] == ("RankLost", str(caught.value), victim, caught.value.step)
    for name, tokens in told.tokens.items():
        assert tokens == reference().tokens[name][: len(tokens)]
    missing = {name for name, _, _ in caught.value.undelivered}
    assert missing <= {request.request_id for request in requests()}
    assert missing


@pytest.mark.parametrize(("how", "tp", "dp", "victim", "step"), some(MANY[0]))
def test_restarted_ranks_go_on_from_what_was_delivered(worlds, how, tp, dp, victim, step):
    """Nothing is lost, nothing comes twice (``Told`` looks at the positions), and the tokens are the reference's."""
    start, told = Anew(worlds, tp * dp, how, victim, step), Told()
    engine = engine_of(Row(tp=tp, dp=dp, timeout=2.0), start, told, restarts=1)
    for request in requests():
        engine.submit(request)
    ended = {finished.request_id: finished.token_ids for finished in engine.run()}
    engine.crew.stop()
    assert engine.restarts == 1
    survivors = {answer for rank, answer in start.pooled[0].answers.items() if rank != victim}
    assert {answer[0] for answer in survivors} == {"RankLost"}
    assert len(survivors) == 1, "the survivors have raised different errors"
    assert dict(told.tokens) == dict(reference().tokens)
    assert {name: list(tokens) for name, tokens in ended.items()} == dict(reference().tokens)
