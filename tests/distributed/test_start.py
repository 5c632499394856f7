"""Ends of a start: refusals for the user's errors, otherwise a loss, after which ranks are restarted. Without
processes: the ranks are threads that follow a script.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections import deque
from typing import ClassVar

import pytest
from hal_core import CapabilityMissing, GroupLost, InvalidValue, SamplingParams, Unavailable
from hal_engine.distributed import control_channel
from hal_engine.distributed.control_channel import RankChannel
from hal_engine.distributed.control_messages import Agreed, Failed, Hello, Setup, Stop, Up
from hal_engine.distributed.engine import engine_of_ranks
from hal_engine.distributed.errors import RankLost, failed_message
from hal_engine.distributed.rank_executor import RankExecutor
from hal_engine.distributed.rank_info import RankInfo
from hal_engine.engine.engine import wait_for
from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport.channel import Channel
from hal_engine.transport.curve import Handshake

from hal.cli import main

from .rows import PATIENCE, Row, requests


class Actors:
    """Ranks that send ``failed`` instead of being ready; each its own, if given."""

    def __init__(self, *failed):
        self.failed, self.heard = failed, {}
        self._threads = []

    def start(self, url):
        for rank in range(len(self.failed)):
            self._threads.append(threading.Thread(target=self._act, args=(url, rank), daemon=True))
            self._threads[-1].start()

    def _act(self, url, rank):
        try:
            with contextlib.closing(RankChannel(url, rank)) as channel:
                channel.send(Hello(rank, len(self.failed), {}))
                self._wait(channel, rank, Setup)
                channel.send(self.failed[rank] or Hello(rank, len(self.failed), {}))
                if self._wait(channel, rank, Agreed):
                    channel.send(Up(rank, "cpu", {}, ""))
                    self._wait(channel, rank, Stop)
        except GroupLost as error:  # also while it connects: another rank ended the start before
            self.heard[rank] = error

    def _wait(self, channel, rank, wanted):
        while not isinstance(word := channel.receive(PATIENCE), wanted | Stop):
            assert word is not None
        self.heard[rank] = word
        return isinstance(word, wanted)

    def ended(self):
        return ""

    def end(self, patience):
        for thread in self._threads:  # a rank that has not sent its first message hears only that the channel closes
            thread.join(patience)


def up(setup, starter, **how):
    """A rank_executor whose ranks are up."""
    return assembled(RankExecutor(setup, starter, **how))


def assembled(rank_executor):
    while not rank_executor.assemble():
        wait_for(rank_executor.sockets, 0.05)
    return rank_executor


def test_what_a_rank_refuses_at_the_start_is_refused_on_every_rank():
    actors = Actors(None, Failed(1, "that cannot be", refused=True))
    with pytest.raises(InvalidValue, match="rank 1: that cannot be"):
        up(Row(tp=2).setup(), actors)
    assert [actors.heard[rank].refused for rank in (0, 1)] == [True, True]


def test_any_other_failure_of_a_rank_at_the_start_is_its_loss():
    """Also if another rank, which lacks it, reports first."""
    actors = Actors(Failed(0, "a collective failed", vague=True), Failed(1, "OSError: too many files"))
    with pytest.raises(RankLost, match="rank 1 was lost at its start: OSError: too many files") as caught:
        up(Row(tp=2).setup(), actors)
    assert caught.value.rank == 1
    assert [(actors.heard[rank].refused, actors.heard[rank].rank) for rank in (0, 1)] == [(False, 1)] * 2


class Able(Actors):
    """Ranks that come up, and report whether their steps can overlap."""

    def __init__(self, *overlaps):
        super().__init__(*[None for _ in overlaps])
        self.overlaps, self.over = overlaps, threading.Event()

    def _act(self, url, rank):
        with contextlib.suppress(GroupLost), contextlib.closing(RankChannel(url, rank)) as channel:
            channel.send(Hello(rank, len(self.failed), {}))
            self._wait(channel, rank, Setup)
            channel.send(Hello(rank, len(self.failed), {}))
            self._wait(channel, rank, Agreed)
            channel.send(Up(rank, "cpu", {}, "", overlap=self.overlaps[rank]))
            self.over.wait(PATIENCE)


@pytest.mark.parametrize("overlaps", [(False, False), (True, False), (False, True), (True, True)])
def test_steps_overlap_where_those_of_every_rank_can(overlaps):
    actors = Able(*overlaps)
    rank_executor = up(Row(tp=2).setup(), actors)
    actors.over.set()
    rank_executor.close()
    assert rank_executor.rank_info.overlap is all(overlaps)


def test_a_rank_that_finds_no_engine_keeps_no_connection(monkeypatch):
    """The engine ends while the rank connects."""
    mine, peer = socket.socketpair()
    peer.close()
    channel = Channel(mine, Handshake("control", None, calls=True))
    monkeypatch.setattr(control_channel, "connect", lambda *_: channel)
    with pytest.raises(GroupLost, match="rank 0 finds no engine"):
        RankChannel("ipc:///nowhere", 0)
    assert mine.fileno() == -1


class Ended(Actors):
    """Ranks that never come: their launcher has ended."""

    def ended(self):
        return "it ended with status -9"


def test_ranks_that_die_at_the_start_are_lost():
    with pytest.raises(RankLost, match=r"rank\(s\) \[0, 1\] did not come up: it ended with status -9"):
        up(Row(tp=2).setup(), Ended())


class Silent(Actors):
    """Ranks of which the last ends without a message after its first one."""

    def _act(self, url, rank):
        if rank < len(self.failed) - 1:
            super()._act(url, rank)
            return
        with contextlib.suppress(GroupLost), contextlib.closing(RankChannel(url, rank)) as channel:
            channel.send(Hello(rank, len(self.failed), {}))


def test_a_rank_that_ends_without_a_word_at_the_start_is_lost_at_once():
    """Its connection is closed; the engine does not wait until the start's limit."""
    with pytest.raises(RankLost, match="rank 1 was lost at its start: its process has ended"):
        up(Row(tp=2).setup(), Silent(None, None), starting=float("inf"))


def test_ranks_that_do_not_come_in_time_are_lost():
    expected = r"rank\(s\) \[0, 1\] did not come up: no message for 0 s .*HAL_RANKS_STARTING"
    with pytest.raises(RankLost, match=expected):
        up(Row(tp=2).setup(), Actors(), starting=0.0)


class Slow(Actors):
    """Ranks that answer nothing after their first message."""

    def __init__(self, *failed):
        super().__init__(*failed)
        self.over = threading.Event()

    def _act(self, url, rank):
        with contextlib.suppress(GroupLost), contextlib.closing(RankChannel(url, rank)) as channel:
            channel.send(Hello(rank, len(self.failed), {}))
            self.over.wait(PATIENCE)

    def end(self, patience):
        self.over.set()
        super().end(patience)


def test_ranks_that_come_just_after_the_limit_have_come():
    """The last message is there when the limit is looked at; the next part of the start is then too late."""
    rank_executor = RankExecutor(Row().setup(), Slow(None), starting=0.0)
    assert rank_executor.channel.receive(PATIENCE) == [], "a connection"
    wait_for(rank_executor.sockets, PATIENCE)
    with pytest.raises(RankLost, match=r"rank\(s\) \[0\] did not come up"):
        assembled(rank_executor)


class Late(Actors):
    """Ranks of which the last begins once ``begin`` is set."""

    def __init__(self, *failed):
        super().__init__(*failed)
        self.begin = threading.Event()

    def _act(self, url, rank):
        if rank == len(self.failed) - 1:
            assert self.begin.wait(PATIENCE)
        super()._act(url, rank)


def test_a_line_of_the_log_names_ranks_that_are_late(monkeypatch):
    """Ray can keep a rank waiting for minutes. The last rank begins after the line."""
    monkeypatch.setenv("HAL_SECONDS_START_LINE", "1e-9")
    actors = Late(None, Failed(1, "that cannot be", refused=True))

    class Lines(logging.Handler):
        def emit(self, record):
            if "waited 0 s for rank(s) [1], at most 300 s (HAL_RANKS_STARTING)" in record.getMessage():
                actors.begin.set()

    log, handler = logging.getLogger("hal"), Lines()
    log.addHandler(handler)
    try:
        with pytest.raises(InvalidValue, match="rank 1: that cannot be"):
            up(Row(tp=2).setup(), actors)
    finally:
        log.removeHandler(handler)


@pytest.mark.parametrize(
    ("error", "step", "refused"),
    [
        (InvalidValue("x"), 0, True),
        (CapabilityMissing("x"), 0, True),
        (InvalidValue("x"), 3, False),
        (OSError("x"), 0, False),
        (GroupLost("x"), 0, False),
    ],
)
def test_a_rank_says_whether_its_error_is_the_users_to_mend(error, step, refused):
    assert failed_message(error, 0, step).refused is refused


def test_what_a_rank_refuses_is_told_with_what_it_is_about():
    """As one rank reports it: "cpu: async_set_value: --require: …"."""
    about = {"device": "cpu", "hook": "async_set_value", "argument": "--require", "cure": "drop it"}
    expected = failed_message(CapabilityMissing("that is not offered", **about), 1, 0)
    assert (expected.what, expected.cure) == ("cpu: async_set_value: --require: that is not offered", "drop it")
    assert failed_message(GroupLost("rank 0 is lost", argument="group"), 1, 3).what == "rank 0 is lost"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_whose_connection_ends_is_lost(victim):
    """Else the engine would wait for its records forever."""
    actors = Able(False, False)
    rank_executor = up(Row(dp=2).setup(), actors)
    rank_executor.channel._ranks[victim].close()
    rank_executor.channel._gone[victim] = "its host is lost"
    with pytest.raises(RankLost, match=f"rank {victim} was lost at its start: its host is lost"):
        rank_executor.receive(PATIENCE)
    actors.over.set()
    rank_executor.close()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_without_a_sign_of_life_is_lost(victim, monkeypatch):
    actors = Able(False, False)
    rank_executor = up(Row(dp=2).setup(), actors)
    rank_executor.channel._ranks[victim].heard -= TIMEOUTS.silence + 1
    with pytest.raises(RankLost, match=f"rank {victim} was lost at its start: nothing came from it for 20 s"):
        rank_executor.receive(0.0)
    actors.over.set()
    rank_executor.close()


class Losing:
    """A rank_executor whose first step loses rank 1."""

    undelivered = ()
    drafts = (0, 0, 0)
    rank_info = RankInfo("cpu:0", {}, "", supports=SamplingParams.__slots__)
    progress: ClassVar = deque()

    def assemble(self):
        return True

    def order(self, number, tasks, taken):
        pass

    def receive(self, timeout):
        raise RankLost("rank 1 was lost in step 1: gone", 1, 1)

    def rest(self):
        return []

    def close(self):
        pass


def engine_with(starts, restarts):
    """An engine whose starts give or raise these, one after another."""
    left = iter(starts)

    def start():
        if isinstance(found := next(left), Exception):
            raise found
        return found

    return engine_of_ranks(Row(tp=2).setup(restart=restarts), lambda setup: start())


LOST = RankLost("rank 0 was lost at its start: killed", 0, 0)


def test_a_start_that_fails_is_tried_again_while_restarts_are_left():
    last = Losing()
    engine = engine_with([LOST, Losing(), Unavailable("no process"), LOST, last], 4)
    engine.submit(requests()[0])
    engine.step()
    assert engine.restarts == 4
    assert engine.workers[0].rank_executor is last


@pytest.mark.parametrize("failed", [LOST, Unavailable("no process")])
def test_when_no_restart_is_left_the_loss_names_what_was_not_delivered(failed):
    engine = engine_with([Losing(), failed], 1)
    for request in requests():
        engine.submit(request)
    with pytest.raises(RankLost, match=failed.what) as caught:
        engine.step()
    assert caught.value.undelivered == tuple((request.request_id, 0, -1) for request in requests())


def test_a_refusal_is_not_tried_again():
    with pytest.raises(InvalidValue, match="that cannot be"):
        engine_with([InvalidValue("that cannot be"), Losing()], 3)


def test_a_rank_that_is_lost_at_the_first_start_ends_the_command_with_1(monkeypatch, capsys):
    monkeypatch.setattr("hal_engine.distributed.starting.LocalLaunch", lambda size, **_: Ended())
    with pytest.raises(SystemExit) as end:
        main(["run", "--device", "cpu", "--prompt", "x", "--tp", "2"])
    assert end.value.code == 1
    assert "hal: error: rank 0 was lost at its start: rank(s) [0, 1] did not come up" in capsys.readouterr().err


class Stubborn(Actors):
    """Ranks that cannot be started, and whose end fails too."""

    def start(self, url):
        raise OSError("no more processes")

    def end(self, patience):
        raise RuntimeError("their end goes wrong")


def test_whatever_an_end_raises_the_engines_sockets_are_closed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(RuntimeError, match="goes wrong"):
        up(Row().setup(), Stubborn())
    assert list(tmp_path.iterdir()) == []
