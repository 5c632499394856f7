"""Parts of G14 and G16 that need neither Paddle nor other processes: terms, headers, tickets, watchdogs."""

import socket
import sys
import threading
from time import monotonic

import pytest
from hal_core.devices.cpu.device import CpuDevice
from hal_core.errors import GroupLost
from hal_core.group import Group
from hal_core.ranks.watchdog import Watchdog
from hal_core.runtime.bound import bind
from hal_core.slots.fields import StateConfig

GENEROUS = 10.0
PAIR = Group((0, 1), 0)


class Clock:
    """The time that watchdogs see. Only tests move it, so that no test depends on the machine's speed."""

    def __init__(self):
        self.now, self._looked = 1000.0, {}

    def __call__(self):
        return self.now

    def watch(self, dog):
        """Record that this watchdog's thread has read the clock."""
        look, self._looked[dog] = dog._check_deadlines, 0.0

        def noted(now):
            look(now)
            self._looked[dog] = now

        dog._check_deadlines = noted

    def advance(self, seconds):
        """Advance the clock, and wait until the thread of each running watchdog has read it."""
        self.now += seconds
        for dog in self._looked:
            dog._wake_thread()
            until(lambda dog=dog: dog._over.is_set() or self._looked[dog] >= self.now)


@pytest.fixture
def clock(monkeypatch):
    """A clock for the watchdogs that the test makes."""
    clock = Clock()
    monkeypatch.setattr(sys.modules[Watchdog.__module__], "monotonic", clock)
    return clock


def until(condition):
    """Wait until the condition holds; another thread makes it true."""
    end = monotonic() + GENEROUS
    while not condition():
        assert monotonic() < end, "it did not come about"
        threading.Event().wait(0.001)


@pytest.fixture
def meet(request):
    """Make connected watchdogs, each with the event that its abort sets; close them afterwards, twice."""
    clock = request.getfixturevalue("clock") if "clock" in request.fixturenames else None
    met = []

    def meet(timeout, size=2):
        dogs, aborted, links = connected(timeout, size)
        met.extend(dogs)
        for dog in dogs if clock else ():
            clock.watch(dog)
        return dogs, aborted, links

    yield meet
    for dog in met:
        dog.close()
        dog.close()


def connected(timeout, size):
    links = {rank: {} for rank in range(size)}
    for low in range(size):
        for high in range(low + 1, size):
            links[low][high], links[high][low] = socket.socketpair()
    for peers in links.values():
        for link in peers.values():
            link.setblocking(False)
    aborted = [threading.Event() for _ in range(size)]
    return [Watchdog(rank, links[rank], timeout, aborted[rank].set) for rank in range(size)], aborted, links


def call(dog):
    """A collective that is over at once."""
    dog.begin()
    dog.end()


def heard(dog):
    """Whether all peers that this watchdog queried have answered; on a clock that jumps the answers would be late."""
    return dog._over.is_set() or not dog._unreached_probed or dog._answers.keys() == dog._peers.keys()


def test_g16_a_call_that_outlives_the_timeout_ends_the_group_on_every_rank(meet, clock):
    dogs, aborted, _ = meet(2.0, size=3)
    dogs[0].begin()
    clock.advance(1.0)  # half of the timeout: it queries its peers
    until(lambda: dogs[0]._answers.keys() == {1, 2})
    clock.advance(0.9)
    assert not any(event.is_set() for event in aborted)
    clock.advance(0.1)
    assert all(event.wait(GENEROUS) for event in aborted)
    assert "[1, 2] did not come" in dogs[0].reason
    assert dogs[2].reason.startswith(("rank 0 gave it up", "rank 1 gave it up"))  # the peer whose message arrived first
    assert dogs[2].reason.endswith(" because of rank 1")
    for dog in dogs:
        with pytest.raises(GroupLost, match="start them again"):
            dog.begin()


def test_g16_a_process_that_ends_without_a_word_ends_the_group_at_once(meet):
    dogs, aborted, links = meet(30.0, size=3)
    for link in links[2].values():
        link.shutdown(socket.SHUT_RDWR)
    assert all(event.wait(GENEROUS) for event in aborted)
    assert "rank 2" in dogs[0].reason


def test_g16_a_goodbye_is_no_loss_until_a_call_needs_who_left(meet):
    dogs, aborted, _ = meet(30.0)
    for dog in dogs:
        dog.begin()
        dog.end()
    dogs[1].begin()  # the second call: rank 1 has done its part and leaves
    dogs[1].end()
    dogs[1].close()
    until(lambda: 1 in dogs[0]._left)
    dogs[0].begin()  # so rank 0 may still take part
    dogs[0].end()
    assert not aborted[0].is_set()
    with pytest.raises(GroupLost, match="rank 1 has closed the group"):
        dogs[0].begin()


def test_g16_calls_that_end_in_time_never_trouble_the_watchdog(meet, clock):
    dogs, aborted, _ = meet(1.0)
    for _ in range(30):  # together longer than the timeout
        for dog in dogs:
            dog.begin()
        clock.advance(0.05)
        for dog in dogs:
            dog.end()
    assert not any(event.is_set() for event in aborted)


def test_g16_of_calls_that_overlap_one_that_ends_does_not_hide_the_next(meet, clock):
    dogs, aborted, _ = meet(4.0)
    call(dogs[1])  # this rank has reached the first call
    first, second = dogs[0].begin(), dogs[0].begin()
    assert (first, second) == (1, 2)
    clock.advance(2.5)
    dogs[0].end(first)  # the second had to wait for it, so its timeout begins now
    clock.advance(2.5)
    assert not aborted[0].is_set()
    until(lambda: dogs[0]._answers.keys() == {1})
    clock.advance(1.5)
    assert aborted[0].wait(GENEROUS)
    assert "[1] did not come" in dogs[0].reason


def test_g16_a_rank_that_never_comes_is_missed_though_the_call_ended_here(meet, clock):
    """NCCL between hosts buffers sent data: the source's calls end, whether or not a peer receives them."""
    dogs, aborted, _ = meet(2.0, size=3)
    for dog in (dogs[0], dogs[0], dogs[0], dogs[1], dogs[2]):
        call(dog)
    clock.advance(0.9)
    call(dogs[0])  # calls continue
    clock.advance(0.2)
    until(lambda: dogs[0]._reached == {1: 1, 2: 1})  # both reached the first call, so its timeout no longer counts
    clock.advance(1.0)
    assert not aborted[0].is_set()
    call(dogs[0])
    for _ in range(4):
        call(dogs[1])
    for _ in range(6):  # the timeout of the last call, and one more query
        clock.advance(0.6)
        until(lambda: all(map(heard, dogs)))
    assert aborted[0].wait(GENEROUS)
    assert dogs[0].rank_at_fault == 2, dogs[0].reason  # by its own finding, or by its peers' reports
    with pytest.raises(GroupLost, match=r"\[2\] did not come|because of rank 2"):
        dogs[0].begin()


def test_g16_a_rank_that_comes_at_the_last_moment_has_come(meet, clock):
    dogs, aborted, _ = meet(2.0)
    call(dogs[0])
    clock.advance(1.0)
    until(lambda: dogs[0]._answers == {1: 0})
    clock.advance(0.9)
    call(dogs[1])
    for _ in range(6):
        clock.advance(1.0)
        until(lambda: dogs[0]._reached == {1: 1})
    assert not aborted[0].is_set()


def test_g16_who_came_and_is_silent_now_is_not_blamed_for_who_never_came(meet, clock):
    dogs, aborted, _ = meet(2.0, size=3)
    call(dogs[0])
    call(dogs[1])
    clock.advance(1.0)
    until(lambda: dogs[0]._answers == {1: 1, 2: 0})
    dogs[1]._notify = lambda *message, **to: None
    for _ in range(5):
        clock.advance(0.6)
    assert aborted[0].wait(GENEROUS)
    assert dogs[0].rank_at_fault == 2, dogs[0].reason


def test_g16_a_stopped_rank_is_missed_though_every_call_ended_here(meet, clock):
    dogs, aborted, _ = meet(2.0)
    dogs[1]._notify = lambda *message, **to: None  # its process is stopped
    call(dogs[0])
    for _ in range(5):
        clock.advance(0.6)
    assert aborted[0].wait(GENEROUS)
    assert "no answer from rank(s) [1]" in dogs[0].reason


def test_g16_a_call_that_is_reported_over_late_starts_no_clock(meet, clock):
    dogs, aborted, _ = meet(1.0)
    call(dogs[1])
    call(dogs[1])
    first, second = dogs[0].begin(), dogs[0].begin()
    dogs[0].end(second)
    dogs[0].end(first)
    for _ in range(6):
        clock.advance(0.5)
    assert not aborted[0].is_set()


def test_g16_further_calls_do_not_postpone_the_end_of_a_hung_one(meet):
    dogs, _, _ = meet(0.3)

    def go_on():
        end = monotonic() + GENEROUS
        while monotonic() < end:
            dogs[0].begin()  # as a device does, which queues the next call while the first is in flight
            threading.Event().wait(0.01)

    with pytest.raises(GroupLost, match="did not come"):
        go_on()


def test_g16_a_failed_collective_is_explained_by_the_lost_rank(meet):
    dogs, _, links = meet(30.0)
    dogs[0].begin()
    links[1][0].shutdown(socket.SHUT_RDWR)
    error = dogs[0].failed(RuntimeError("connect: reset by peer"))
    assert "the process of rank 1 has ended" in str(error)
    dogs, _, _ = meet(30.0)
    dogs[0].begin()
    assert "reset by peer" in str(dogs[0].failed(RuntimeError("reset by peer")))


def test_g16_after_a_failed_collective_no_later_call_begins(meet):
    dogs, _, _ = meet(30.0)
    dogs[0]._give_up_at = monotonic() + 600  # a thread that gets no processor time on a busy host
    dogs[0]._over.wait = lambda timeout: False
    dogs[0].begin()
    assert "a collective failed: no route" in str(dogs[0].failed(OSError("no route")))
    assert not dogs[0].reason
    with pytest.raises(GroupLost, match="a collective failed: no route"):
        dogs[0].begin()


class Unreached(CpuDevice):
    """A device whose peers never arrive; it counts how often it had to wait for them."""

    opened = 0

    def open_communicator(self, group):
        self.opened += 1
        raise GroupLost(f"rank 1 did not come, waited {self.opened} times", cure="start it", argument="group")


def test_g16_a_group_lost_while_opening_is_waited_for_only_once():
    device = bind(Unreached(0, {}))
    stream, states = (
        device.default_stream,
        [device.state(StateConfig(num_slots=2, max_model_len=8), name=name) for name in "ab"],
    )
    for state in (*states, *states):
        with pytest.raises(GroupLost, match=r"^cpu:0: broadcast_tokens: group: .* waited 1 times \(start it\)"):
            device.broadcast_tokens(state=state, group=PAIR, stream=stream)
        with pytest.raises(GroupLost, match="waited 1 times"):
            device.open_group(state=state, group=PAIR)
    with pytest.raises(GroupLost, match="waited 2 times"):
        device.open_group(state=states[0], group=Group((0, 2), 0))
    assert device.device.opened == 2
