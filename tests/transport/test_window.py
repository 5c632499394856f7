"""The window of unacknowledged frames against a list, and the sessions' decisions."""

import numpy as np
from hal_core import FinishReason, OutputRecord
from hal_core.frames.envelope import FrameKind, seal
from hal_engine.reading import Gap, SessionStarted
from hal_engine.reading.session import Session
from hal_engine.transport.protocol import VERSION, Hello
from hal_engine.transport.window import Window
from hypothesis import given, settings
from hypothesis import strategies as st

moves = st.lists(st.tuples(st.sampled_from(["add", "send", "ack", "rewind"]), st.integers(0, 12)), max_size=60)


def frame(number):
    return seal(FrameKind.OUTPUT, b"x" * (number % 5), session=1, sender=0, sequence=number)


@settings(deadline=None)
@given(moves)
def test_g19_a_window_holds_what_is_not_acknowledged_and_sends_it_in_order(moves):
    window = Window()
    made, acknowledged, unsent = 0, 0, 1  # the model
    for move, number in moves:
        if move == "add":
            made += 1
            window.add(frame(made))
        elif move == "send":
            assert window.take() == (frame(unsent) if unsent <= made else None)
            unsent = min(unsent + 1, made + 1)
        elif move == "ack":
            window.acknowledge(number)
            acknowledged = max(acknowledged, min(number, made))
            unsent = max(unsent, acknowledged + 1)
        elif move == "rewind":
            window.rewind(number)
            unsent = min(max(number, acknowledged) + 1, made + 1)
        assert (window.first, window.unsent, window.next) == (acknowledged + 1, unsent, made + 1)
        assert len(window) == made - acknowledged
        assert window.nbytes == sum(len(frame(number)) for number in range(acknowledged + 1, made + 1))


def hello(oldest, capacity=8):
    return Hello(VERSION, 9, 0, oldest, capacity)


def test_new_sessions_start_at_the_oldest_frame_known_ones_at_cursor():
    session = Session(9, now=0.0)
    assert session.begin(hello(4), "a channel") == SessionStarted(9, 0, 4)
    assert (session.expected, session.last, session.channel) == (4, 3, "a channel")
    known = Session(9, now=0.0, after=3)
    assert known.last == 3
    assert known.begin(hello(4), "a channel") is None
    gap = known.begin(hello(6), "another")
    assert isinstance(gap, Gap)
    assert (gap.first, gap.last, known.expected) == (4, 5, 6)


def test_a_connection_repairs_what_the_end_of_the_former_one_broke():
    session = Session(9, now=0.0, after=3)
    session.breaks(7.0)
    assert (session.channel, session.broken) == (None, 7.0)
    session.begin(hello(1), "a channel")
    assert session.broken is None


def test_an_ended_request_stays_ended_until_another_has_its_name():
    """Its row may stay for a step, without a token, while other requests enter."""
    session, names = Session(9, now=0.0), ("a", "b")

    def taken(names, counts, finish):
        record = record_of(names, np.array(counts, np.int32), np.array(finish, np.uint8))
        session.take(1, record)
        return list(session.requests)

    assert taken(names, [1, 1], [FinishReason.STOP, FinishReason.STOP]) == []
    assert taken(("a", "b", "c"), [0, 0, 1], [0, 0, 0]) == ["c"]
    assert taken(("b", "c"), [1, 1], [0, 0]) == ["c", "b"]
    assert taken(("b", "c", "a"), [1, 1, 0], [0, 0, 0]) == ["c", "b", "a"]


def record_of(names, counts, finish):
    """A record with these rows; each token is 0."""
    count, total = len(names), int(counts.sum())
    rest = np.zeros(count, np.int64), counts, np.zeros(total, np.int64), np.zeros(count, np.bool_)
    return OutputRecord(0, names, np.minimum(counts, 1).astype(np.uint8), finish, *rest)
