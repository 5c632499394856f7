"""A lost rank: the same error on every survivor, or new ranks that continue where the delivered tokens end."""

import pytest
from hal_engine.distributed.errors import RankLost
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from .rows import Delivered, Pooled, Row, engine_of, reference, requests

FEW = [("killed", 2, 1, 1, 7)]
MANY = [("killed", 2, 1, 0, 1), ("killed", 1, 2, 1, 5), ("stopped", 2, 1, 1, 4)]
"""Launcher, tp, dp, the lost rank, and the step of its group; each loss costs a world of ranks."""
WORLDS = [(2, 1, 38), (1, 2, 16)]
"""Tp and dp, and the steps that each group takes at least."""
LOSSES = st.sampled_from(WORLDS).flatmap(
    lambda world: st.tuples(
        st.sampled_from(["killed", "killed", "stopped"]),
        st.just(world[0]),
        st.just(world[1]),
        st.integers(0, 1),
        st.integers(1, world[2]),
    )
)
BOUNDED = settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.generate])


def some(*losses):
    """These in `make test`, and all in a whole run."""
    others = [loss for loss in (*FEW, *MANY) if loss not in losses]
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


def survivors_agree(worlds, how, tp, dp, victim, step):
    """All raise the same error, which names the rank and the step. So does the engine, and the tokens delivered before
    are the reference's."""
    start, delivered = Anew(worlds, tp * dp, how, victim, step), Delivered()
    engine = engine_of(Row(tp=tp, dp=dp, timeout=2.0), start, delivered)
    for request in requests():
        engine.submit(request)
    try:
        with pytest.raises(RankLost) as caught:
            list(engine.run())
    finally:
        engine.close()
        worlds.end(tp * dp)
    assert caught.value.rank == victim
    assert caught.value.step in (step, step + 1)
    answers = start.pooled[0].answers
    for rank in set(range(tp * dp)) - {victim}:
        assert answers[rank] == ("RankLost", str(caught.value), victim, caught.value.step)
    for name, tokens in delivered.tokens.items():
        assert tokens == reference().tokens[name][: len(tokens)]
    missing = {name: (position, count) for name, position, count in caught.value.undelivered}
    names = [request.request_id for request in requests()]  # of which some end in outputs that come after the loss
    left = [name for name in names if delivered.tokens[name] != reference().tokens[name]]
    assert missing == {name: (len(delivered.tokens[name]), -1) for name in left}, "also those that were waiting"
    assert missing


def goes_on(worlds, how, tp, dp, victim, step, speculate="none"):
    """No token is lost or repeated (``Told`` checks the positions), and the tokens are the reference's."""
    start, delivered = Anew(worlds, tp * dp, how, victim, step), Delivered()
    engine = engine_of(Row(tp=tp, dp=dp, timeout=2.0, speculate=speculate), start, delivered, restarts=1)
    for request in requests():
        engine.submit(request)
    try:
        ended = {finished.request_id: finished.token_ids for finished in engine.run()}
        engine.stop()
    finally:
        engine.close()
    assert engine.restarts == 1
    survivors = {answer for rank, answer in start.pooled[0].answers.items() if rank != victim}
    assert {answer[0] for answer in survivors} == {"RankLost"}
    assert len(survivors) == 1, "the survivors have raised different errors"
    assert dict(delivered.tokens) == dict(reference().tokens)
    assert {name: list(tokens) for name, tokens in ended.items()} == dict(reference().tokens)
    return engine


@pytest.mark.parametrize(("how", "tp", "dp", "victim", "step"), some())
def test_every_survivor_raises_the_same_error(worlds, how, tp, dp, victim, step):
    survivors_agree(worlds, how, tp, dp, victim, step)


@pytest.mark.parametrize(("how", "tp", "dp", "victim", "step"), some())
def test_restarted_ranks_go_on_from_what_was_delivered(worlds, how, tp, dp, victim, step):
    goes_on(worlds, how, tp, dp, victim, step)


@pytest.mark.conform
def test_any_rank_may_be_lost_in_any_step(worlds):
    """Every survivor raises the same error."""

    @BOUNDED
    @given(LOSSES)
    def holds(loss):
        survivors_agree(worlds, *loss)

    holds()


@pytest.mark.conform
def test_restarted_ranks_go_on_whichever_was_lost_in_whatever_step(worlds):
    @BOUNDED
    @given(LOSSES)
    def holds(loss):
        goes_on(worlds, *loss)

    holds()


@pytest.mark.conform
@pytest.mark.parametrize("victim", [0, 1])
def test_drafts_are_counted_over_a_restart(worlds, victim):
    """Those of the lost ranks count too, even if the first rank, which reports them, is killed itself."""
    engine = goes_on(worlds, "killed", 2, 1, victim, 7, speculate="ngram")
    former, last = engine._former.drafts, engine.workers[0].rank_executor.drafts
    assert former[0]
    assert last[0]
    assert engine.drafts == tuple(a + b for a, b in zip(former, last, strict=True))
