"""A runner that raises on all ranks of a group ends its step's requests; one that raises on some ends the group."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hal_core import FinishReason, MemorySink, Request, SamplingParams
from hal_engine.distributed.engine import engine_of_ranks
from hal_engine.distributed.errors import RankLost
from hal_engine.distributed.rank_executor import RankExecutor
from hal_engine.engine import Engine
from hal_engine.model import DEFAULT_CHECKPOINT
from hal_engine.proposers import Setup as ProposerSetup
from hal_engine.proposers import make_proposer
from hal_paddle_runner.loading import load_model
from hal_paddle_runner.worker import Worker

from hal import open_device
from tests.split.rows import Own
from tests.split.rows import engine_of as split_engine

from .rank_work import RAISING, raising_at
from .rows import AMPLE, Delivered, Pooled, Row, engine_of, reference, requests
from .test_losses import Anew

MARKED, SLOTS = "g2", 3
WHAT = f"RuntimeError: no memory for {MARKED}"
LONG, SHORT = 60.0, 0.5
"""Waits for the other ranks: no test reaches the first one, unless ranks do not agree."""
PLACES = [
    ("before the layers", "none"),
    ("after the layers", "none"),
    ("before the layers", "ngram"),
    ("after the layers", "ngram"),
    ("drafting", "ngram"),
]


@dataclass
class Served:
    """What became of the requests: the records, and each request's end."""

    delivered: Delivered = field(default_factory=Delivered)
    ends: dict = field(default_factory=dict)

    def run(self, engine):
        """Serve all requests; return how often ranks were started again."""
        try:
            for request in requests():
                engine.submit(request)
            for finished in engine.run():
                assert finished.request_id not in self.ends
                self.ends[finished.request_id] = finished
        except BaseException:
            engine.close()
            raise
        engine.stop()
        return engine.restarts

    def compare(self, where):
        """The step's requests ended with the error after tokens of the reference; all others have all of theirs."""
        failed = {name for name, one in self.ends.items() if one.reason == FinishReason.ERROR}
        assert MARKED in failed
        assert len(failed) <= SLOTS
        assert len(self.ends) == len(requests())
        method = "propose" if where == "drafting" else "launch"
        for name, tokens in reference().tokens.items():
            given = self.delivered.tokens[name]
            if name in failed:
                assert f"ModelRunner.{method} raised {WHAT} (rank_work.py:" in self.ends[name].message
                assert given == tokens[: len(given)] != tokens
            else:
                assert given == tokens


@pytest.mark.parametrize(("where", "speculate"), PLACES)
def test_in_one_process_others_enter_the_slots_that_were_freed(where, speculate):
    found, sizes = Served(), Row(speculate=speculate).sizes
    with open_device("cpu") as device, raising_at(SimpleNamespace(rank=0), MARKED, where, (0,), LONG):
        model = load_model(DEFAULT_CHECKPOINT)
        setup = ProposerSetup(3, sizes.num_slots, sizes.max_model_len, model.config.vocab_size, model)
        worker = Worker(device, model, sizes, AMPLE, MemorySink(), proposer=make_proposer(speculate, setup))
        found.run(Engine(worker, on_record=found.delivered.take))
    found.compare(where)


@pytest.mark.parametrize(("where", "speculate"), PLACES)
def test_what_all_ranks_raise_ends_the_requests_of_that_step(worlds, where, speculate):
    found, pooled = Served(), Pooled(worlds.of(2), ("raising at", MARKED, where, (0, 1), LONG))
    found.run(engine_of(Row(tp=2, speculate=speculate), lambda: pooled, found.delivered))
    found.compare(where)
    assert pooled.answers == {0: None, 1: None}, "no rank ended with an error"


CHECKED = [
    ({"max_tokens": 9}, r"max_tokens: nine \(ask for ten\)"),
    ({"max_tokens": 4, "logprobs": 1}, r"logprobs: 1 is not supported by failing:CheckingRunner \(give None\)"),
    ({"max_tokens": 11}, r"CheckingRunner\.check raised OSError: no table \\udc80 for eleven \(failing\.py:\d+\)"),
]
FOLDER = str(Path(__file__).parents[1] / "overlap")


@pytest.mark.parametrize(("tp", "dp", "speculative"), [(2, 1, False), (1, 2, False), (2, 1, True)])
def test_what_all_ranks_refuse_ends_alone(worlds, tp, dp, speculative):
    """Beside each a request that is served, and one afterwards in its slot. None of their tokens is in a record."""
    row, pooled, delivered = Row(tp=tp, dp=dp, check=False), Pooled(worlds.of(2), ("raising", FOLDER, "")), Delivered()
    more = {"sizes": replace(row.setup().sizes, max_draft_tokens=2, num_slots=2)} if speculative else {}
    setup = row.setup(runner="failing:CheckingRunner", **more)
    engine = engine_of_ranks(setup, lambda made: RankExecutor(made, pooled), on_record=delivered.take)
    try:
        for params, why in CHECKED:
            for name, wanted in (("refused", params), ("beside", {"max_tokens": 3}), ("after", {"max_tokens": 5})):
                engine.submit(Request(name, (1, 2), SamplingParams(**wanted)))
            ends = {one.request_id: one for one in engine.run()}
            assert (ends["refused"].reason, ends["refused"].token_ids) == (FinishReason.ERROR, ())
            assert re.fullmatch(why, ends["refused"].message)
            assert (ends["beside"].token_ids, ends["after"].token_ids) == ((300,) * 3, (300,) * 5)
            assert delivered.tokens.pop("refused", []) == []
            delivered.tokens.clear()
        engine.stop()
    except BaseException:
        engine.close()
        raise
    assert pooled.answers == {0: None, 1: None}, "no rank ended with an error"


@pytest.mark.conform
@pytest.mark.parametrize("where", [where for where in RAISING if where != "drafting"])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_raises_ends_the_group_in_one_line(worlds, rank, where):
    start, found = Anew(worlds, 2, "raising at", MARKED, where, (rank,), SHORT), Served()
    with pytest.raises(RankLost) as caught:
        found.run(engine_of(Row(tp=2, timeout=LONG), start, found.delivered))
    assert caught.value.rank == rank
    assert caught.value.what.startswith(f"rank {rank} was lost in step ")
    assert caught.value.what.endswith(f": {WHAT}")
    assert len(str(caught.value).splitlines()) == 1
    worlds.end(2)


@pytest.mark.conform
def test_after_what_one_rank_raised_new_ranks_serve_all_requests(worlds):
    start, found = Anew(worlds, 2, "raising at", MARKED, "before the layers", (1,), SHORT), Served()
    assert found.run(engine_of(Row(tp=2, timeout=LONG), start, found.delivered, restarts=1)) == 1
    assert {one.reason for one in found.ends.values()} <= {FinishReason.LENGTH, FinishReason.STOP}
    assert found.delivered.tokens == reference().tokens


@pytest.mark.conform
@pytest.mark.parametrize("role", [0, 1], ids=["prefill", "decode"])
def test_in_a_split_the_other_role_serves_the_other_requests(role):
    how = ("raising at", MARKED, "after the layers", (0, 1), LONG)
    found, started = Served(), {}

    def start(number):
        return started.setdefault(number, Own(2, how if number == role else ()))

    found.run(split_engine(Row(tp=2), (1, 1), start, found.delivered))
    found.compare("after the layers")
    assert all(one.answers == {0: None, 1: None} for one in started.values())
