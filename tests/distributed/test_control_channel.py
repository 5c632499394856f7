"""An engine's last message reaches every rank, also one that is behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from threading import Event, Thread

import pytest
from hal_core import GroupLost
from hal_engine.distributed.control_channel import EngineChannel, RankChannel
from hal_engine.distributed.control_messages import Agreed, Beat, Failed, Hello, Release, Verdict
from hal_engine.distributed.steps import StepOrder

from tests.commands import start

A_RANK = """
import sys
from hal_engine.distributed.control_channel import RankChannel
from hal_engine.distributed.control_messages import Hello
channel = RankChannel(sys.argv[1], 0)
channel.send(Hello(0, 1, {}))
print(type(channel.receive(60.0)).__name__, flush=True)
channel.close()
"""
MORE_THAN_A_CONNECTION_HOLDS = 16 << 20


def test_the_last_message_reaches_a_rank_that_is_stopped_meanwhile(tmp_path):
    """An engine whose ranks are not its children ends after its last message; a rank that missed it reports a loss."""
    channel, parting = EngineChannel(), Event()
    rank = start(tmp_path, channel.url, code=A_RANK)
    try:
        while not any(number == 0 for number, _ in channel.receive(60.0)):
            pass
        os.kill(rank.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, rank.pid, os.WSTOPPED)
        assert channel.send(Verdict("x" * MORE_THAN_A_CONNECTION_HOLDS, refused=True)) == []
        receive = channel.receive

        def awake(timeout):
            if not parting.is_set():
                parting.set()
                os.kill(rank.pid, signal.SIGCONT)
            return receive(timeout)

        channel.receive = awake
        channel.close()
        os.kill(rank.pid, signal.SIGCONT)
        assert rank.communicate(timeout=60)[0].split() == ["Verdict"]
    finally:
        rank.kill()
        with rank:
            pass


def test_a_message_that_a_rank_sends_while_it_ends_is_among_the_last():
    """A process's exit is seen before the message that it sent last has come."""
    channel, ending = EngineChannel(), Event()
    send = channel.send
    channel.send = lambda *given: (send(*given), ending.set())[0]

    def rank():
        with contextlib.closing(RankChannel(channel.url, 0)) as own:
            own.send(Hello(0, 1, {}))
            assert ending.wait(60.0)
            own.send(Failed(0, "too small"))

    one = Thread(target=rank)
    one.start()
    with contextlib.closing(channel):
        while not any(True for _ in channel.receive(60.0)):
            pass
        assert [message.what for _, message in channel.last_messages()] == ["too small"]
    one.join()


class Cable:
    """Carries bytes between the clients of ``url`` and a port of this host; can be cut, and restored at once."""

    def __init__(self, port):
        self._port, self._ends = port, []
        self._door = socket.create_server(("127.0.0.1", 0))
        self.url = f"tcp://127.0.0.1:{self._door.getsockname()[1]}"
        self.carries = Event()
        self.carries.set()
        Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, far = self._door.accept()[0], socket.create_connection(("127.0.0.1", self._port))
                self._ends += [near, far]
                for one, other in ((near, far), (far, near)):
                    Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one, other):
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                if self.carries.is_set():
                    other.sendall(data)

    def cut(self):
        """Bytes in flight are lost, and the connection ends; a new one may be made."""
        ends, self._ends = self._ends, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self.carries.set()

    def close(self):
        self._door.close()
        self.cut()


def hear(rank, engine):
    while True:
        engine.send(Beat())
        assert rank.receive(0.05) is None, "it hears beats, and never what it was told before"


def test_a_connection_that_broke_and_was_made_again_is_a_lost_engine():
    """Messages in flight are not repeated: if the connection did not end, engine and rank would wait for each other."""
    engine = EngineChannel("tcp://127.0.0.1:*")
    cable = Cable(int(engine.url.rpartition(":")[2]))
    rank = RankChannel(cable.url, 0)
    try:
        rank.send(Hello(0, 1, {}))
        while not any(number == 0 for number, _ in engine.receive(60.0)):
            pass
        engine.send(Beat())
        assert rank.receive(60.0) == Beat()
        cable.carries.clear()
        assert engine.send(Release("a", 1)) == []
        cable.cut()
        with pytest.raises(GroupLost, match="rank 0: the connection to the engine broke"):
            hear(rank, engine)
    finally:
        rank.close()
        cable.close()
        engine.close()


def test_an_answer_comes_before_the_messages_that_were_sent_earlier():
    """The engine has sent the next step by then, and a rank that waits for the answer runs that step later."""
    engine = EngineChannel()
    rank = RankChannel(engine.url, 0)
    try:
        assert rank.send(Hello(0, 1, {}))
        assert [message for _, message in engine.receive(60.0)]
        orders = [StepOrder(0, number, ()) for number in (1, 2, 3)]
        for order in orders[:2]:
            engine.order(order, 0)
        engine.send(Agreed(1, alike=True))
        engine.order(orders[2], 0)
        assert rank.answer(60.0) == Agreed(1, alike=True)
        assert [rank.receive(60.0) for _ in orders] == orders
        assert rank.answer(0.05) is None
    finally:
        rank.close()
        engine.close()
