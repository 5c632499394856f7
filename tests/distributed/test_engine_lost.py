"""Ranks whose engine is gone: they end, and neither wait for it nor outlive it."""

import os
import signal
import subprocess
import sys

import pytest
from hal_core import GroupLost
from hal_engine.children import PARENT, TIED
from hal_engine.distributed import rank
from hal_engine.distributed.control_messages import Progress
from hal_engine.timeouts import TIMEOUTS


class Dead:
    """A channel to an engine that is gone; records the messages, and how long each would have waited."""

    def __init__(self, *_):
        self.sent = []

    def send(self, message, patience=10.0):
        self.sent.append((type(message).__name__, patience))
        return False

    def close(self):
        self.sent.append(("closed", 0))


def test_a_rank_says_nothing_to_an_engine_that_is_gone():
    channel = Dead()
    with pytest.raises(GroupLost, match="gone"), rank._Serving(channel, 0, None).reporting():
        raise GroupLost("gone", argument="engine")
    assert channel.sent == []


def test_a_rank_that_misses_another_does_not_wait_for_the_engine():
    """It may be gone too; its end is noticed as soon as in any other wait."""
    channel = Dead()
    with pytest.raises(GroupLost, match="rank 1"), rank._Serving(channel, 0, None).reporting():
        raise GroupLost("rank 1 is lost")
    assert channel.sent == [("Failed", TIMEOUTS.parting)]


def test_an_unsendable_transfer_message_is_a_lost_engine():
    """The message is not repeated: blocks whose end the engine does not receive would never be free."""
    with pytest.raises(GroupLost, match="rank 3: the engine takes no messages any more"):
        rank._Serving(Dead(), 3, None)._send(Progress(3, "a", 1, "over"))


def test_a_rank_that_finds_no_engine_ends_at_once():
    with pytest.raises(GroupLost, match="rank 0 finds no engine at ipc:///nowhere: No such file"):
        rank.serve("ipc:///nowhere", 0, 1)


@pytest.mark.parametrize(("parent", "status"), [(None, 7), (1 << 22, 1)])
def test_a_process_with_a_dead_parent_ends_before_any_import(parent, status):
    """Its parent is another process than the one in its environment."""
    code = TIED + "os._exit(7 if os.environ['HAL_RANKS_PARENT'] == str(os.getpid()) else 8)"
    environment = os.environ | {PARENT: str(parent or os.getpid())}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == status


def test_a_process_that_is_started_while_sigterm_is_held_back_heeds_it():
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        code = TIED + "os.kill(os.getpid(), signal.SIGTERM)"
        variables = os.environ | {PARENT: str(os.getpid())}
        done = subprocess.run([sys.executable, "-c", code], env=variables, check=False)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
    assert done.returncode == -signal.SIGTERM
