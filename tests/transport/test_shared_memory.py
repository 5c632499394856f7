"""Large frames in shared memory: read where they lie, never lost, and nothing left of the dead."""

from __future__ import annotations

import gc
import logging
import os
import threading

import pytest
from hal_core.errors import Unavailable
from hal_core.frames.envelope import FrameKind, encode_parts, read_header, seal

from hal.reading import FrameSkipped, Gap, OutputReader
from hal.transport import open_sink, private_ipc_url, release_ipc, shared_memory
from hal.transport.large import Parts
from hal.transport.protocol import control
from hal.transport.shared_memory import SLOTS, VIEWS, SharedSender
from hal.transport.urls import socket_of

from .conftest import files_of, lies_in_memory, needs_iceoryx2

pytestmark = needs_iceoryx2
SESSION = 77


@pytest.fixture
def url(shared_url):
    return shared_url


def test_a_large_frame_is_read_where_it_lies_and_nobody_can_write_to_it(opened, large, output):
    reader, sink = opened.reader(), opened.sink()
    alone = files_of(reader)
    first = large(1)
    sink.put(first)
    record = reader.read(10).record
    assert record == first.resolve()
    assert lies_in_memory(record.logprobs)
    assert not record.logprobs.flags.writeable
    sink.put(output(2))
    assert reader.read(10).record.step == 2  # a small one comes through the socket
    assert reader.counters() == {"frames": 2, "duplicates": 0, "skipped": 0, "shared": 1}
    assert sink.counters()["shared"] == 1
    reader.acknowledge()
    sink.close(10)
    del record
    assert reader.read(10) is None  # it has said good-bye, and taken everything along
    assert files_of(reader) == alone


def test_a_large_frame_without_log_probabilities_lies_there_too(opened, output):
    reader, sink = opened.reader(), opened.sink()
    first = output(1, requests=[f"request {number}" for number in range(3000)])
    sink.put(first)
    assert reader.read(10).record == first.resolve()
    assert reader.counters()["shared"] == 1


@pytest.fixture
def output():
    """The class of small outputs."""
    from .conftest import Output

    return Output


def test_records_that_are_kept_stay_as_they_are_and_hold_few_places(opened, large):
    reader, sink = opened.reader(), opened.sink()
    kept = []
    for step in range(3 * SLOTS):
        sink.put(large(step))
        kept.append(reader.read(10).record)
    assert reader.counters()["shared"] == 3 * SLOTS
    assert [lies_in_memory(record.logprobs) for record in kept] == [step < VIEWS for step in range(3 * SLOTS)]
    assert [record == large(step).resolve() for step, record in enumerate(kept)] == [True] * (3 * SLOTS)
    del kept[:VIEWS]
    sink.put(large(0))
    assert lies_in_memory(reader.read(10).record.logprobs)


def test_a_record_outlives_reader_and_sink_and_may_be_dropped_by_any_thread(opened, large):
    reader, sink = opened.reader(), opened.sink()
    sink.put(large(1))
    kept = [reader.read(10).record]
    files = files_of(reader)
    reader.close()
    sink.close(5)
    assert not [path for path in files if path.exists()]
    assert kept[0] == large(1).resolve()
    thread = threading.Thread(target=kept.clear)
    thread.start()
    thread.join()
    gc.collect()
    assert not [path for path in files if path.exists()]


def test_a_sample_that_is_gone_is_asked_for_and_comes_as_bytes(opened, large):
    events = []
    reader, sink = opened.reader(on_event=events.append), opened.sink()
    sink.put(large(1))
    assert reader.read(10).record.step == 1
    (session,) = reader._receiver.sessions.values()
    second = large(2)
    sink.put(second)
    while sink.counters()["shared"] < 2:  # it lies there
        threading.Event().wait(0.001)
    session.shared.forget(1 << 62)
    assert reader.read(10).record == second.resolve()
    sink.put(large(3))
    assert reader.read(10).record.step == 3
    assert reader.counters() == {"frames": 3, "duplicates": 0, "skipped": 1, "shared": 2}
    assert [type(event) for event in events if not isinstance(event, FrameSkipped)] == [type(events[0])]
    assert any("frame 2 is not in shared memory" in str(event) for event in events)


def test_samples_whose_words_were_lost_do_not_take_the_places_of_others(opened, large):
    """A connection that breaks takes the words along; what they spoke of comes as bytes."""
    reader, sink = opened.reader(auto_ack=False), opened.sink()
    sink.put(large(1))
    assert reader.read(10).record.step == 1
    for step in range(2, 2 + shared_memory.QUEUED):
        sink.put(large(step))
        while read_header(memoryview(reader._receiver.socket.recv_multipart()[1])).kind != FrameKind.SHARED:
            pass
    for step in range(2, 9):
        if step >= 2 + shared_memory.QUEUED:
            sink.put(large(step))
        assert reader.read(10).record.step == step
    assert reader.counters()["shared"] >= 3  # the first and the last ones


@pytest.fixture
def by_hand(opened, large):
    """A sender that writes into shared memory, and says, what the test wants."""
    from .test_bad_peers import ByHand

    events = []
    reader = opened.reader(on_event=events.append)
    sender = ByHand(reader.url)
    sender.say(control(FrameKind.STATE, 0, session=SESSION, body=sender_state(3)))
    assert sender.answer_cursor(reader, last=3) == 0
    memory = SharedSender(socket_of(reader.url), SESSION, 64 << 20)
    memory.follow(reader._receiver._memory.name)
    yield reader, events, sender, memory
    memory.close()
    sender.context.destroy(linger=0)


def sender_state(capacity):
    from hal.transport.protocol import State

    return State(1, capacity)


def parts_of(pending, *, session=SESSION, sequence=1):
    return encode_parts(pending.resolve(), session=session, sender=0, sequence=sequence)


def unsound(large):
    """Frames that are none, or not the one that is spoken of."""
    good = b"".join(parts_of(large(1)))
    return {
        "garbage": b"x" * 70_000,
        "another session's": b"".join(parts_of(large(1), session=SESSION + 1)),
        "too short": good[:-1],
        "torn": good[:-8] + b"\0" * 8,
        "no record": seal(FrameKind.OUTPUT, b"\xc1" * 70_000, session=SESSION, sender=0, sequence=1),
        "nothing": None,
    }


@pytest.mark.parametrize("kind", ["garbage", "another session's", "too short", "torn", "no record", "nothing"])
def test_what_is_no_frame_is_skipped_told_and_asked_for_and_the_second_time_a_gap(by_hand, large, kind, steps):
    reader, events, sender, memory = by_hand
    word = control(FrameKind.SHARED, 1, session=SESSION)
    for _ in range(2):
        data = unsound(large)[kind]
        assert data is None or memory.offer(Parts((data,)), 1, 1)
        sender.say(word)
        if not any(isinstance(event, FrameSkipped) for event in events):
            assert sender.answer_cursor(reader, last=3) == 0
    sound = large(2)
    sound.columns = 6000  # no larger than the others: it needs no larger place, which would have to wait
    assert memory.offer(Parts(parts_of(sound, sequence=2)), 2, 1)
    sender.say(control(FrameKind.SHARED, 2, session=SESSION))
    assert steps(reader, 1) == [2]
    (gap,) = [event for event in events if isinstance(event, Gap)]
    assert (gap.session, gap.first, gap.last) == (SESSION, 1, 1)
    assert reader.counters()["skipped"] == 2


def test_a_sample_that_comes_before_its_turn_waits(by_hand, large, steps):
    reader, _, sender, memory = by_hand
    assert memory.offer(Parts(parts_of(large(2), sequence=2)), 2, 1)
    sender.say(control(FrameKind.SHARED, 1, session=SESSION))
    assert sender.answer_cursor(reader, last=3) == 0
    sender.say(b"".join(parts_of(large(1))))
    sender.say(control(FrameKind.SHARED, 2, session=SESSION))
    assert steps(reader, 2) == [1, 2]


def test_a_word_about_shared_memory_that_nobody_asked_for_is_a_hole_like_any_other(large, steps):
    from .test_bad_peers import ByHand

    url = private_ipc_url()
    with OutputReader(url, timeout=10) as reader:
        sender = ByHand(url)
        sender.say(control(FrameKind.STATE, 1, session=SESSION, body=sender_state(3)))
        assert sender.answer_cursor(reader, last=1) == 0
        sender.say(control(FrameKind.SHARED, 1, session=SESSION))
        for _ in range(2):
            sender.say(control(FrameKind.STATE, 1, session=SESSION, body=sender_state(3)))
        assert sender.answer_cursor(reader, last=1) == 0
        sender.say(b"".join(parts_of(large(1))))
        assert steps(reader, 1) == [1]
        sender.context.destroy(linger=0)
    release_ipc(url)


@pytest.mark.parametrize(("theirs", "mine"), [("shm", "ipc"), ("ipc", "shm")])
def test_one_side_alone_is_served_through_the_socket_and_a_sink_says_so(url, large, theirs, mine, caplog):
    path = socket_of(url)
    with caplog.at_level(logging.WARNING, "hal.transport"), OutputReader(f"{mine}://{path}", timeout=10) as reader:
        sink = open_sink(f"{theirs}://{path}")
        for step in range(2):
            sink.put(large(step))
            assert reader.read(10).record == large(step).resolve()
        assert reader.counters().get("shared", 0) == sink.counters().get("shared", 0) == 0
        reader.acknowledge()
        sink.close(10)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (theirs == "shm")
    assert all("open it with a shm:// url too" in text for text in said)


@pytest.mark.parametrize("spoil", ["mode", "name", "gone"])
def test_a_domain_that_is_not_this_users_alone_is_not_used(url, large, spoil, caplog):
    with caplog.at_level(logging.WARNING, "hal.transport"), OutputReader(url, timeout=10) as reader:
        memory = reader._receiver._memory
        if spoil == "mode":
            memory._folder.chmod(0o755)
        elif spoil == "name":
            memory.name = "../" + memory.name
        else:
            memory.name = "0" * 16
        sink = open_sink(url)
        sink.put(large(1))
        assert reader.read(10).record == large(1).resolve()
        assert reader.counters()["shared"] == 0
        reader.acknowledge()
        sink.close(10)
    assert "large frames go through the socket" in caplog.text


def test_files_and_folders_are_this_users_alone_whatever_the_umask_is(opened, large):
    umask = os.umask(0)
    try:
        reader, sink = opened.reader(), opened.sink()
        sink.put(large(1))
        record = reader.read(10).record
        assert lies_in_memory(record.logprobs)
        folder = reader._receiver._memory._folder
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len(files_of(reader)) >= 4
        assert {path.name: path.stat().st_mode & 0o077 for path in files_of(reader)} == {
            path.name: 0 for path in files_of(reader)
        }
    finally:
        os.umask(umask)


def test_g26_a_path_that_iceoryx2_cannot_take_is_named_with_the_cure(tmp_path):
    folder = tmp_path / "grün"
    folder.mkdir()
    with pytest.raises(Unavailable, match="plain ASCII"):
        OutputReader(f"shm://{folder}/socket")
    assert not [path for path in folder.iterdir() if path.is_dir()]
