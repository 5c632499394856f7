"""The window of unacknowledged frames against a list, and the sessions' decisions."""

from __future__ import annotations

from hal_core.frames.envelope import FrameKind, seal
from hal_engine.reading import Gap, SessionStarted
from hal_engine.reading.session import Session
from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport.protocol import State
from hal_engine.transport.window import Window
from hypothesis import given, settings
from hypothesis import strategies as st

moves = st.lists(st.tuples(st.sampled_from(["add", "send", "ack", "rewind"]), st.integers(0, 12)), max_size=60)


def frame(number):
    return seal(FrameKind.OUTPUT, b"x" * (number % 5), session=1, sender=0, sequence=number)


@settings(deadline=None)
@given(moves, st.integers(1, 400))
def test_g19_a_window_holds_what_is_not_acknowledged_and_sends_it_in_order(moves, limit):
    window = Window()
    made, acknowledged, unsent = 0, 0, 1  # the model
    for move, number in moves:
        if move == "add":
            made += 1
            window.add(frame(made))
        elif move == "send" and unsent <= made:
            message, count = window.message(limit)
            assert message == b"".join(frame(number) for number in range(unsent, unsent + count))
            assert count == 1 or len(message) <= limit
            window.sent(count)
            unsent += count
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


def test_new_sessions_start_at_the_oldest_frame_known_ones_at_cursor():
    session = Session(9, now=0.0)
    _, cursor = session.ask(0.0)
    assert not cursor.explicit
    assert session.hear(7, State(oldest=4, capacity=8, echo=cursor.token)) == SessionStarted(9, 0, 4)
    assert session.expected == 4
    known = Session(9, now=0.0, after=3)
    sequence, cursor = known.ask(0.0)
    assert (sequence, cursor.explicit) == (3, True)
    assert known.hear(7, State(oldest=4, capacity=8, echo=cursor.token)) is None
    assert isinstance(known.hear(7, State(oldest=6, capacity=8, echo=known.ask(0.0)[1].token)), Gap)


def test_only_the_answer_to_the_last_cursor_counts():
    session = Session(9, now=0.0)
    _, former = session.ask(0.0)
    session.ask(0.0)
    assert session.hear(7, State(oldest=4, capacity=8, echo=former.token)) is None
    assert session.is_asking


def test_unanswered_cursors_and_missing_frames_are_requested_again():
    session = Session(9, now=0.0, after=3)
    _, cursor = session.ask(0.0)
    assert not session.must_ask(5, TIMEOUTS.ask_again / 2)
    assert session.must_ask(5, TIMEOUTS.ask_again * 2)
    session.hear(5, State(oldest=1, capacity=8, echo=cursor.token))
    assert not session.must_ask(5, 1.0)  # the frames may be on their way
    assert session.must_ask(5, 1.1)  # the sender made them before its last message, so they are not
    session.expected = 6
    assert not session.must_ask(5, 1.2)
