"""What an engine refuses of workers that others started is told to them, with what differs."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from hal_core import FinishReason, GroupLost, InvalidValue
from hal_core.handover import Description

from hal.cli.run_split import split_engine
from hal.cli.run_workers import hire
from hal.distributed.lines import RankLine
from hal.distributed.split.states import State
from hal.distributed.words import Failed, Go, Hello, Ready, Setup, Up, Verdict
from tests.distributed.rows import Row
from tests.distributed.test_hiring import PATIENCE, Employed, ipc, options
from tests.split.test_engine import world_with

__all__ = ["ipc"]


class Rank:
    """A worker's one rank, in place of the launcher: a thread that comes up with blocks of a layout, or refuses."""

    def __init__(self, layout, refuses="", **able):
        self.status, self._how = 0, ""
        self._refuses = refuses and Failed(0, refuses, "choose another", refused=True)
        self._up = Up(0, "cpu", {}, "", peer=Description("ipc:///nowhere", facts={"layout": layout}), **able)
        self._thread = threading.Thread(target=self._act, daemon=True)

    def start(self, url):
        self._url = url
        self._thread.start()

    def _act(self):
        line = RankLine(self._url, 0)
        try:
            for said, wanted in ((Hello(0, 1, {}), Setup), (self._refuses or Ready(0, {}), Go), (self._up, Verdict)):
                line.say(said)
                while not isinstance(word := line.receive(PATIENCE), wanted | Verdict):
                    assert word is not None
                if isinstance(word, Verdict):
                    self.status, self._how = 2, f"rank 0: {word.what} ({word.cure})"
                    return
        except GroupLost as error:
            self.status, self._how = 1, str(error)
        finally:
            line.close()

    def ended(self):
        return self._how

    def end(self, patience):
        self._thread.join(patience)


def refused(urls, monkeypatch, first, second):
    """What becomes of an engine with a prefill and a decode worker of these ranks: its error, and the workers."""
    row = Row()
    workers = [Employed(role, url) for role, url in zip(("prefill", "decode"), urls, strict=True)]
    ranks = dict(zip((worker.thread for worker in workers), (first, second), strict=True))  # whichever begins first
    monkeypatch.setattr("hal.distributed.hired.PaddleLaunch", lambda size, more: ranks[threading.current_thread()])
    plan = SimpleNamespace(sizes=row.sizes, config=SimpleNamespace(vocab_size=256), blocks=row.blocks)
    with pytest.raises(InvalidValue) as error, hire(options(*urls), PATIENCE) as hired:
        split_engine(plan, hired.options, row.setup(), print, print, hired)
    return error.value, workers


def test_blocks_that_are_not_alike_are_refused_by_name_on_both_sides(ipc, monkeypatch):
    error, workers = refused(ipc[:2], monkeypatch, Rank("heads"), Rank("tokens"))
    differs = "the blocks of decode worker 0, rank 0, differ from those here: layout: 'heads' here, 'tokens' there"
    assert error.what == differs
    for worker in workers:
        ended = worker.wait()
        assert isinstance(ended, InvalidValue), ended
        assert (ended.what, ended.cure) == (f"the engine refuses: {differs}", error.cure)


def test_what_a_rank_refuses_is_told_where_it_was_started_and_to_the_others(ipc, monkeypatch):
    error, (its, other) = refused(ipc[:2], monkeypatch, Rank("heads", "there is no such device"), Rank("heads"))
    assert error.what == "there is no such device"
    assert its.wait() == 2
    assert its.how == "rank 0: there is no such device (choose another)"
    ended = other.wait()
    assert isinstance(ended, InvalidValue), ended
    assert (ended.what, ended.cure) == ("the engine refuses: there is no such device", "choose another")


def test_a_worker_that_comes_again_with_other_blocks_is_refused_by_name(monkeypatch):
    world, journey = world_with(State.DECODING, restarts=1)
    monkeypatch.setattr("tests.split.simulated.FACTS", {"layout": "another"})
    journey.decode.crew.kill(0)
    world.finish()
    differs = "the blocks of decode worker 0 differ from those here: layout: 'one int64 a token' here, 'another' there"
    assert differs in world.ended[journey.name].message
    assert world.ended[journey.name].reason is FinishReason.ERROR
    assert world.crews[-1].line.ranks[0].inbox[-1].what == differs
