"""The checker reports every unordered pair, in every mode of execution: also when the bytes came out right."""

from __future__ import annotations

import threading

import pytest
from hal_sim import WRITE, label, options


def kinds(report) -> tuple[str, str]:
    return report.first.kind, report.second.kind


def test_a_missing_event_between_streams(bench):
    producer, consumer = bench.stream(), bench.stream()
    address, out = bench.memory(8), bench.pinned(8)
    with label("produce"):
        bench.device.fill(address, 8, 1, 1, producer)
    with label("consume"):
        bench.device.d2h(out.address, address, 8, consumer)
    producer.synchronize()
    consumer.synchronize()
    (race,) = bench.device.races()
    assert (race.kind, *kinds(race)) == ("race", "kernel_fill", "async_d2h")
    assert (race.first.label, race.second.label) == ("produce", "consume")
    assert (race.first.stream, race.second.stream) == (producer.number, consumer.number)
    assert (race.what, race.begin, race.nbytes) == ("write/read", address, 8)
    text = str(race)
    assert f"no event recorded on stream {producer.number} after kernel_fill #{race.first.sequence}" in text
    assert f"is waited for on stream {consumer.number} before async_d2h #{race.second.sequence}" in text


def test_staging_reused_after_its_fence(bench):
    stream, address, ring, fence = bench.stream(), bench.memory(8), bench.pinned(8), bench.device.event()
    for _ in range(3):
        bench.device.host_write(ring.address, 8)
        bench.device.h2d(address, ring.address, 8, stream)
        fence.record(stream)
        bench.device.fill(address, 8, 0, 1, stream)
        while not fence.query():
            pass
    stream.synchronize()
    assert bench.device.races() == []
    fence.close()


def test_the_writes_of_a_plan_are_known_one_by_one(bench):
    import numpy as np

    one, two = bench.stream(), bench.stream()
    state, out = bench.memory(64), bench.pinned(64)
    table = np.array([(state + 8, 5, 8, 1), (state + 32, 5, 8, 1)], WRITE)
    block = bench.upload(table)
    bench.device.scatter(block, table.nbytes, 2, one)
    for begin, nbytes in ((0, 8), (16, 16), (40, 24)):
        bench.device.d2h(out.address + begin, state + begin, nbytes, two)
    bench.device.synchronize()
    assert bench.device.races() == []
    bench.device.scatter(block, table.nbytes, 2, one)
    bench.device.d2h(out.address, state + 36, 2, two)
    bench.device.synchronize()
    (race,) = bench.device.races()
    assert (race.begin, race.nbytes) in {(state + 36, 2), (state + 32, 8)}


def test_destroying_a_stream_orders_nothing(bench):
    first, address = bench.stream(), bench.memory(8)
    bench.device.fill(address, 8, 1, 1, first)
    bench.streams.remove(first)
    first.close()
    while bench.device._native.pending_tasks():
        pass  # its work is over, its thread ends, without a wait for it
    second = bench.stream()
    bench.device.fill(address, 8, 2, 1, second)
    bench.device.synchronize()
    assert [kinds(r) for r in bench.device.races()] == [("kernel_fill", "kernel_fill")]


def test_every_read_counts_against_a_later_write(bench):
    readers, writer = [bench.stream() for _ in range(3)], bench.stream()
    state, event = bench.memory(8), bench.device.event()
    outs = [bench.pinned(8) for _ in readers]
    for stream, out in zip(readers, outs, strict=True):
        bench.device.d2h(out.address, state, 8, stream)
    writer.wait(event.record(readers[2]))
    bench.device.fill(state, 8, 1, 1, writer)
    bench.device.synchronize()
    assert {frozenset(kinds(r)) for r in bench.device.races()} == {frozenset({"async_d2h", "kernel_fill"})}
    assert {s for r in bench.device.races() for s in (r.first.stream, r.second.stream)} == {
        readers[0].number, readers[1].number, writer.number,
    }  # fmt: skip
    event.close()


def test_a_pair_is_reported_once_and_reset_forgets_it(bench):
    one, two, state = bench.stream(), bench.stream(), bench.memory(64)
    bench.device.fill(state, 64, 1, 1, one)
    bench.device.fill(state, 64, 2, 1, two)
    bench.device.synchronize()
    assert len(bench.device.races()) == 1
    bench.device.reset()
    bench.device.synchronize()
    assert bench.device.races() == []
    bench.device.fill(state, 64, 3, 1, one)
    bench.device.synchronize()
    assert bench.device.races() == []


def test_the_checker_can_be_switched_off(bench):
    one, two, state = bench.stream(), bench.stream(), bench.memory(8)
    with options(check=0):
        bench.device.fill(state, 8, 1, 1, one)
        bench.device.fill(state, 8, 2, 1, two)
        bench.device.synchronize()
    assert bench.device.races() == []


def in_thread(function) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@pytest.mark.parametrize("published", [False, True])
def test_threads_as_lines_of_their_own(bench, published):
    """With the option, another thread's wait counts only when it is handed over."""
    stream, address, buffer = bench.stream(), bench.memory(8), bench.pinned(8)
    with options(host_threads=1):
        bench.device.h2d(address, buffer.address, 8, stream)

        def sender() -> None:
            stream.synchronize()
            if published:
                bench.device.host_publish(1)

        in_thread(sender)
        if published:
            bench.device.host_acquire(1)
        bench.device.host_write(buffer.address, 8)
        assert len(bench.device.races()) == (0 if published else 1)
        bench.device.synchronize()


def test_threads_share_one_line_by_default(bench):
    stream, address, buffer = bench.stream(), bench.memory(8), bench.pinned(8)
    bench.device.h2d(address, buffer.address, 8, stream)
    in_thread(stream.synchronize)
    bench.device.host_write(buffer.address, 8)
    assert bench.device.races() == []


def test_what_is_noted_does_not_grow_for_ever(bench):
    stream, address, out = bench.stream(), bench.memory(4096), bench.pinned(4096)
    for i in range(200):
        bench.device.fill(address + 8 * i, 8, i, 8, stream)
        bench.device.d2h(out.address + 8 * i, address + 8 * i, 8, stream)
        stream.synchronize()
        bench.device.host_read(out.address + 8 * i, 8)
    assert bench.device._native.noted_segments() == 0
