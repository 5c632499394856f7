"""The last word of an engine comes to every rank, also to one that is behind."""

from __future__ import annotations

import os
import signal
from threading import Event

from hal.distributed.lines import EngineLine
from hal.distributed.words import Verdict
from tests.commands import start

A_RANK = """
import sys
from hal.distributed.lines import RankLine
from hal.distributed.words import Hello
line = RankLine(sys.argv[1], 0)
line.say(Hello(0, 1, {}))
print(type(line.receive(60.0)).__name__, flush=True)
line.close()
"""
MORE_THAN_A_CONNECTION_HOLDS = 16 << 20


def test_the_last_word_comes_to_a_rank_that_is_stopped_while_it_is_said(tmp_path):
    """An engine whose ranks are not its children ends when it has said it; its end is a loss to who has not heard."""
    line, parting = EngineLine(), Event()
    rank = start(tmp_path, line.url, code=A_RANK)
    try:
        while not any(number == 0 for number, _ in line.receive(60.0)):
            pass
        os.kill(rank.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, rank.pid, os.WSTOPPED)
        assert line.say(Verdict("x" * MORE_THAN_A_CONNECTION_HOLDS, refused=True)) == []
        receive = line.receive

        def awake(timeout):
            if not parting.is_set():
                parting.set()
                os.kill(rank.pid, signal.SIGCONT)
            return receive(timeout)

        line.receive = awake
        line.close()
        os.kill(rank.pid, signal.SIGCONT)
        assert rank.communicate(timeout=60)[0].split() == ["Verdict"]
    finally:
        rank.kill()
        with rank:
            pass
