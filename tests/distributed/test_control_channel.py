"""An engine's last message reaches every rank, also one that is behind."""

import contextlib
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread

import numpy as np
import pytest
from hal_core import GroupLost, OutputRecord, SlotStatus
from hal_engine.distributed.control_channel import EngineChannel, RankChannel
from hal_engine.distributed.control_messages import Agreed, Failed, Hello, Release, Stop, encode_message
from hal_engine.distributed.steps import StepOrder
from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport.channel import connect
from hal_engine.transport.curve import CurveKeys

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
KINDS = (np.uint8, SlotStatus.TOKEN), (np.uint8, 0), (np.int64, 0), (np.int32, 1), (np.int64, 7), (np.bool_, False)
RECORD = OutputRecord(1, ("a",), *(np.array([value], kind) for kind, value in KINDS))


def test_the_last_message_reaches_a_rank_that_is_stopped_meanwhile(tmp_path):
    """An engine whose ranks are not its children ends after its last message; a rank that missed it reports a loss."""
    channel, parting = EngineChannel(), Event()
    rank = start(tmp_path, channel.url, code=A_RANK)
    try:
        while not any(number == 0 for number, _ in channel.receive(60.0)):
            pass
        os.kill(rank.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, rank.pid, os.WSTOPPED)
        assert channel.send(Stop("x" * MORE_THAN_A_CONNECTION_HOLDS, refused=True)) == []
        receive = channel._hub.receive

        def awake(timeout):
            if not parting.is_set():
                parting.set()
                os.kill(rank.pid, signal.SIGCONT)
            return receive(timeout)

        channel._hub.receive = awake
        channel.close()
        os.kill(rank.pid, signal.SIGCONT)
        assert rank.communicate(timeout=60)[0].split() == ["Stop"]
    finally:
        rank.kill()
        with rank:
            pass


def test_a_message_that_a_rank_sends_while_it_ends_is_among_the_last():
    """A process's exit is seen before the message that it sent last has come."""
    channel, ending = EngineChannel(), Event()

    def rank():
        with contextlib.closing(RankChannel(channel.url, 0)) as own:
            own.send(Hello(0, 1, {}))
            assert ending.wait(60.0)
            own.send(Failed(0, "too small"))

    one = Thread(target=rank)
    one.start()
    with contextlib.closing(channel):
        while not channel.receive(60.0):
            pass
        ending.set()
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


def test_a_connection_that_breaks_is_a_lost_engine_and_a_lost_rank():
    """Messages in flight are not repeated: if the connection did not end, engine and rank would wait for each other."""
    engine = EngineChannel("tcp://127.0.0.1:*")
    cable = Cable(int(engine.url.rpartition(":")[2]))
    rank = RankChannel(cable.url, 0)
    try:
        rank.send(Hello(0, 1, {}))
        while not any(number == 0 for number, _ in engine.receive(60.0)):
            pass
        engine.send(Agreed())
        assert rank.receive(60.0) == Agreed()
        cable.carries.clear()
        assert engine.send(Release("a", 1)) == []
        cable.cut()
        with pytest.raises(GroupLost, match="rank 0 has lost the engine: "):
            rank.receive(60.0)
        while not engine.gone():
            engine.receive(60.0)
        assert list(engine.gone()) == [0]
    finally:
        rank.close()
        cable.close()
        engine.close()


def test_records_and_messages_keep_their_order():
    engine = EngineChannel()
    rank = RankChannel(engine.url, 3)
    try:
        rank.send(Hello(3, 4, {}))
        sent = [Agreed(), RECORD, Release("a", 1), RECORD]
        for one in sent:
            assert rank.end.send_record(one) if one is RECORD else rank.send(one)
        found = []
        while len(found) < 5:
            found += engine.receive(60.0)
        assert found[1:] == [(3, one) for one in sent]
    finally:
        rank.close()
        engine.close()


def test_an_engine_that_is_gone_over_tcp_is_noticed_by_its_silence(monkeypatch):
    """Its host may have vanished: no end of the connection comes then."""
    engine = EngineChannel("tcp://127.0.0.1:*")
    rank = RankChannel(engine.url, 0)
    try:
        rank._channel.heard -= TIMEOUTS.silence + 1
        with pytest.raises(GroupLost, match="rank 0 has lost the engine: nothing came for 20 s"):
            rank.receive(60.0)
    finally:
        rank.close()
        engine.close()


def test_what_is_no_message_ends_a_ranks_connection():
    engine = EngineChannel()
    rank = RankChannel(engine.url, 0)
    try:
        rank.send(Hello(0, 1, {}))
        rank._channel.send(b"mnonsense")
        while not engine.gone():
            engine.receive(60.0)
        assert "a message is unreadable" in engine.gone()[0]
    finally:
        rank.close()
        engine.close()


def test_a_connection_that_was_closed_over_a_frame_is_no_rank_by_the_next_one():
    channel = EngineChannel()
    stranger = connect(channel.url, "control")
    stranger.send(b"no message")
    stranger.send(b"m", encode_message(Hello(0, 1, {})))
    with contextlib.closing(channel), contextlib.closing(stranger):
        while not stranger.ended:
            assert channel.receive() == []
            stranger.receive()
        with contextlib.closing(RankChannel(channel.url, 0)) as rank:
            rank.send(Hello(0, 1, {}))
            assert channel.receive(60.0) or channel.receive(60.0)
            assert channel.send(Stop()) == []


@pytest.mark.parametrize("number", [-1, 2])
def test_a_connection_that_names_a_rank_beyond_the_engines_is_closed(number):
    with contextlib.closing(EngineChannel(size=2)) as channel, contextlib.closing(RankChannel(channel.url, 0)) as rank:
        rank.send(Hello(number, 2, {}))
        while not rank.end.channel.ended:
            assert channel.receive() == []
            rank.end.receive()


def test_an_answer_comes_before_the_messages_that_were_sent_earlier():
    """The engine has sent the next step by then, and a rank that waits for the answer runs that step later."""
    engine = EngineChannel()
    rank = RankChannel(engine.url, 0)
    try:
        assert rank.send(Hello(0, 1, {}))
        while not engine.receive(60.0):
            pass
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


def test_a_rank_is_taken_only_with_its_own_key(monkeypatch):
    """Each key of the job is let in; but none is let in as another rank."""
    monkeypatch.setattr(TIMEOUTS, "parting", 0.05)
    keys, own = CurveKeys.new(), [CurveKeys.new().knowing() for _ in range(2)]
    publics = [one.public for one in own]
    engine = EngineChannel("tcp://127.0.0.1:*", keys.knowing(*publics), publics.__getitem__)
    with contextlib.closing(engine), contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as pool:

        def rank(number, with_key):
            made = pool.submit(RankChannel, engine.url, number, own[with_key].knowing(keys.public))
            while not made.done():
                assert engine.receive(0.01) == []
            return stack.enter_context(contextlib.closing(made.result()))

        thief = rank(0, with_key=1)
        thief.send(Hello(0, 2, {}), 0.0)
        while not thief._channel.ended:
            assert engine.receive(0.01) == []
            thief._channel.receive()
        for number in (0, 1):
            rank(number, with_key=number).send(Hello(number, 2, {}), 0.0)
            while not (found := engine.receive(60.0)):
                pass
            assert [of for of, _ in found] == [number]
