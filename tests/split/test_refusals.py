"""An engine's refusal of its workers is sent to their ranks, with the difference."""

import threading

import pytest
from hal_core import FinishReason, GroupLost, InvalidValue
from hal_core.handover import Description
from hal_engine.distributed.control_channel import RankChannel
from hal_engine.distributed.control_messages import Agreed, Failed, Hello, Setup, Stop, Up
from hal_engine.distributed.engine import engine_of_ranks
from hal_engine.distributed.rank_executor import RankExecutor
from hal_engine.distributed.split.states import State

from tests.distributed.rows import PATIENCE, Row
from tests.split.test_engine import world_with


class Rank:
    """A worker's one rank, in place of the launcher: a thread that comes up with blocks of a layout, or refuses when
    the rank ``after`` has its setup."""

    def __init__(self, layout, refuses="", after=None, **able):
        self.verdict, self.has_setup, self._after = None, threading.Event(), after
        self._how = ""
        self._refuses = refuses and Failed(0, refuses, "choose another", refused=True)
        self._up = Up(0, "cpu", {}, "", peer=Description("ipc:///nowhere", facts={"layout": layout}), **able)
        self._thread = threading.Thread(target=self._act, daemon=True)

    def start(self, url):
        self._url = url
        self._thread.start()

    def _act(self):
        channel, hello = RankChannel(self._url, 0), Hello(0, 1, {})
        try:
            for message, wanted in ((hello, Setup), (self._refuses or hello, Agreed), (self._up, Stop)):
                channel.send(message)
                while not isinstance(word := channel.receive(PATIENCE), wanted | Stop):
                    assert word is not None
                if isinstance(word, Setup):
                    self.has_setup.set()
                    if self._after is not None:
                        assert self._after.has_setup.wait(PATIENCE)
                if isinstance(word, Stop):
                    self.verdict, self._how = word, f"rank 0: {word.what} ({word.cure})"
                    return
        except GroupLost as error:
            self._how = str(error)
        finally:
            channel.close()

    def ended(self):
        return self._how

    def end(self, patience):
        self._thread.join(PATIENCE)


def refused(*ranks):
    """The error of an engine with a prefill and a decode worker of one rank each."""
    given = iter(ranks)
    with pytest.raises(InvalidValue) as error:
        engine_of_ranks(Row().setup(split=(1, 1)), lambda setup: RankExecutor(setup, next(given)))
    return error.value


def test_blocks_that_are_not_alike_are_refused_by_name_on_both_sides():
    ranks = Rank("heads"), Rank("tokens")
    error = refused(*ranks)
    differs = "the blocks of decode worker 0, rank 0, differ from those here: layout: 'heads' here, 'tokens' there"
    assert error.what == differs
    assert [(rank.verdict.what, rank.verdict.cure, rank.verdict.refused) for rank in ranks] == [
        (differs, error.cure, True)
    ] * 2


def test_what_one_rank_refuses_is_sent_to_the_other_worker_too():
    other = Rank("heads")
    ranks = Rank("heads", "there is no such device", after=other), other
    error = refused(*ranks)
    assert error.what == "there is no such device"
    assert [(rank.verdict.what, rank.verdict.cure) for rank in ranks] == [(error.what, "choose another")] * 2


def test_a_worker_that_comes_again_with_other_blocks_is_refused_by_name(monkeypatch):
    world, split_request = world_with(State.DECODING, restarts=1)
    monkeypatch.setattr("tests.split.simulated.FACTS", {"layout": "another"})
    split_request.decode.rank_executor.kill(0)
    world.finish()
    differs = "the blocks of decode worker 0 differ from those here: layout: 'one int64 a token' here, 'another' there"
    assert differs in world.ended[split_request.name].message
    assert world.ended[split_request.name].reason is FinishReason.ERROR
    assert world.rank_executors[-1].channel.ranks[0].inbox[-1].what == differs
