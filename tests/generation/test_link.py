"""The thread between an event loop and an engine process: what it does first, and how much of it at a time."""

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from threading import Lock
from types import SimpleNamespace

import numpy as np
import pytest
from hal_core import FinishReason, HalError, OutputRecord, SamplingParams, SlotStatus, Unavailable
from hal_engine.children import API_KEY, environment
from hal_engine.distributed.control_messages import Abort, Failed
from hal_engine.generation import Ranks
from hal_engine.generation.link import _AT_ONCE, EngineLink
from hal_engine.generation.plan import ModelPlan
from hal_engine.streams import Stream, Streams
from hal_engine.transport.channel import Channel

import hal

HANGS = 60
HELD = "tests.serving.held_steps:HeldRunner"
ROOT = Path(__file__).parents[2]


def link_of(turns=()):
    """A link whose process has sent the contents of ``turns``, and which notes what it sends, takes and posts."""
    link, done = EngineLink.__new__(EngineLink), []
    link._wake_end, link._wake = os.pipe()
    link._channel, link.other = Channel.pair()
    channels = link._channel, link.other
    link.close_ends = lambda: [*map(os.close, (link._wake_end, link._wake)), *(one.close() for one in channels)]
    left = iter(turns)
    link._end_here = SimpleNamespace(receive=lambda: next(left, []), send=done.append)
    link._streams, link._received, link._posted, link._is_giving = Streams(), deque(), False, False
    link._trouble, link._error, link._read_end = None, None, -1
    link._loop = SimpleNamespace(call_soon=done.append, call_soon_threadsafe=done.append)
    link._process = SimpleNamespace(poll=lambda: None)
    link._pulse = SimpleNamespace(look=lambda: None, late=0, silent=False)
    link._wakes, link._receiving, link._closing, link._silent = Lock(), Lock(), False, None
    link.up = Future()
    link.up.set_result(None)
    return link, done


def record(step, names=("a",), positions=None, finish=0):
    """One token of each request."""
    kinds = (
        (np.uint8, SlotStatus.TOKEN),
        (np.uint8, finish),
        (np.int64, step if positions is None else positions),
        (np.int32, 1),
        (np.int64, 7),
        (np.bool_, False),
    )
    return OutputRecord(step, names, *(np.full(len(names), value, kind) for kind, value in kinds))


ROWS = [record(step) for step in range(3)]


def stream_of(link, name, parts):
    link._streams.add(name, Stream(ModelPlan(None).answer([1], (), SamplingParams()), parts.append))


def test_an_abort_is_sent_at_once():
    link, done = link_of()
    stream_of(link, "a", [])
    link.abort("a")
    link.abort("a")
    link.close_ends()
    assert done == [Abort("a")]


def test_a_failure_follows_all_records_that_came_before_it():
    link, done = link_of([ROWS, [Failed(0, "broken", "mend it")]])
    parts = []
    stream_of(link, "a", parts)
    link._read()
    link._read()
    with pytest.raises(Unavailable, match="broken"):
        link._watch()
    link.close_ends()
    assert [part.token_ids for part in parts] == [(7, 7, 7)]
    assert done == [link._give_rest], "it is posted once"


def test_a_busy_loop_is_posted_to_once_and_takes_all_records_as_one_part():
    link, posts = link_of([[one] for one in ROWS])
    parts = []
    stream_of(link, "a", parts)
    link._check_pulse = lambda: setattr(link, "_closing", len(link._received) == len(ROWS))
    link._watch()  # the thread reads, as the loop does not
    assert posts == [link._give], "while the loop is busy it is posted to once"
    link._give()
    link.close_ends()
    assert [part.token_ids for part in parts] == [(7, 7, 7)]


def test_requests_that_begin_or_end_are_given_before_the_others():
    link, posts = link_of()
    given = []
    for name in "abc":
        answer = ModelPlan(None).answer([1], (), SamplingParams())
        link._streams.add(name, Stream(answer, lambda part, name=name: given.append((name, part.token_ids))))
    link._received += [record(0, ("a", "b")), record(1, ("a", "b")), record(2, ("a", "b", "c"), [2, 2, 0])]
    link._received += [record(3, ("b",), finish=FinishReason.LENGTH)]
    link._give()
    assert given == [("a", (7, 7, 7)), ("b", (7, 7, 7, 7)), ("c", (7,))], "all begin"
    posts.pop()()
    del given[:]
    link._received += [record(3), record(1, ("c",), finish=FinishReason.LENGTH)]
    link._give()
    assert given == [("c", (7,))]
    link._received += [record(4)]
    link._give()
    assert given == [("c", (7,))]
    posts.pop()()
    assert given == [("c", (7,)), ("a", (7, 7))], "what came meanwhile is one part"
    assert not posts
    link.close_ends()


def test_the_loop_goes_round_between_the_parts_of_many_requests():
    link, posts = link_of()
    names, given = tuple(f"r{at}" for at in range(3 * _AT_ONCE)), []
    for name in names:
        stream_of(link, name, given)
    link._received += [record(0, names)]
    link._give()
    assert len(given) == len(names), "all begin"
    posts.pop()()
    link._received += [record(1, names)]
    link._give()
    counts = []
    while posts:
        counts.append(len(given))
        posts.pop()()
    assert counts == [(3 + at) * _AT_ONCE for at in range(3)]
    assert len(given) == 2 * len(names)
    link.close_ends()


def looks_of(link, most):
    """Let the thread look so often at most."""
    left = iter(range(most))
    link._check_pulse = lambda: setattr(link, "_closing", next(left, None) is None)
    link._end_here.receive = lambda: [link._take(one) for one in link._channel.receive()]


def test_the_thread_reads_the_end_of_a_process_in_place_of_a_held_loop():
    link, _ = link_of()
    looks_of(link, 9)
    link._read_end, link._status, link._tail = link._channel.fileno(), lambda: -signal.SIGKILL, lambda: ""
    link.other.close()
    with pytest.raises(Unavailable, match="ended: signal SIGKILL"):
        link._watch()
    link.close_ends()


def test_the_thread_sends_what_the_process_had_no_room_for():
    link, _ = link_of()
    looks_of(link, 99)
    link._read_end, look = link._channel.fileno(), link._check_pulse
    link._check_pulse = lambda: (look(), link.other.receive())
    link._channel.send(bytes(1 << 20))
    assert link._channel.pending, "more than the kernel takes"
    link._watch()
    assert not link._channel.pending
    link.close_ends()


def test_the_process_s_own_error_names_its_end_whoever_reads_it():
    link, _ = link_of()
    looks_of(link, 9)
    link._read_end, link._status, link._tail = link._channel.fileno(), lambda: 1, lambda: ""
    receive, raised = link._end_here.receive, []
    link._end_here.receive = lambda: [Failed(0, "broken", "mend it")] if link._channel.receive() else receive()

    def watch():  # the thread's turn, as soon as the loop gives the lock back
        link._receiving = Lock()
        with pytest.raises(Unavailable) as error:
            link._watch()
        raised.append(str(error.value))

    link._receiving = contextlib.ExitStack()
    link._receiving.callback(watch)
    link.other.send(b"failed")
    link.other.close()
    link._loop.remove_reader = lambda number: None
    link._read()
    link.close_ends()
    assert raised == ["broken (mend it)"]


def test_what_a_request_s_caller_raises_holds_up_no_other():
    link, posts = link_of()
    given = []

    def put(part):
        if part.token_ids != (7,) or given[1:]:
            raise ValueError("the caller's own")
        given.append(part)

    link._streams.add("a", Stream(ModelPlan(None).answer([1], (), SamplingParams()), put))
    stream_of(link, "b", given)
    link._received += [record(0, ("a", "b"))]
    link._give()
    posts.pop()()
    for step in (1, 2):
        link._received += [record(step, ("a", "b"))]
        link._give()
        with contextlib.suppress(ValueError):
            posts.pop()()
    assert [part.token_ids for part in given] == [(7,), (7,), (7, 7)]
    link.close_ends()


def test_tokens_that_are_lost_end_the_engine():
    link, _ = link_of()
    stream_of(link, "a", [])
    link._received.extend(ROWS[1:])
    link._give()
    with pytest.raises(HalError, match="a: tokens from 1 on came after 0"):
        link._watch()
    link.close_ends()


def test_the_key_of_a_server_is_its_own(monkeypatch):
    monkeypatch.setenv(API_KEY, "secret")
    monkeypatch.setenv("OTHER", "secret")
    assert API_KEY not in environment()
    assert environment()["OTHER"] == "secret"


@pytest.fixture
def held(tmp_path, monkeypatch):
    """A folder for a runner whose steps wait for permits."""
    os.mkfifo(tmp_path / "permits")
    monkeypatch.setenv("HELD_STEPS", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.syspath_prepend(str(ROOT))
    opened = os.open(tmp_path / "permits", os.O_RDWR)
    yield tmp_path
    os.close(opened)


async def launched(held):
    while not (held / "steps").exists():
        await asyncio.sleep(0.01)


async def text_of(engine):
    found = []
    async for part in engine.generate([1, 2, 3], {"max_tokens": 4}):
        found.append(part)
    return found


def test_a_step_that_never_ends_is_noticed_and_named(held, monkeypatch):
    monkeypatch.setenv("HAL_RANKS_STEP", "0.5")
    monkeypatch.setenv("HAL_SECONDS_BEAT", "0.05")
    monkeypatch.setenv(API_KEY, "secret")

    async def run():
        async with hal.AsyncEngine(device="cpu", runner=HELD) as engine:
            environment = Path(f"/proc/{engine._link._process.pid}/environ").read_bytes()
            assert b"HELD_STEPS=" in environment
            assert API_KEY.encode() not in environment
            with pytest.raises(Unavailable, match=r"has not ended step 1 within 0\.5 s .*HAL_RANKS_STEP"):
                await asyncio.wait_for(text_of(engine), HANGS)
            assert "step 1" in str(engine.error)

    asyncio.run(run())


def test_the_exit_status_is_named_of_a_process_that_waits_for_this_end_of_its_channel(held):
    async def run():
        async with hal.AsyncEngine(device="cpu", runner=HELD) as engine:
            running = asyncio.create_task(text_of(engine))
            await launched(held)
            (held / "permits").write_bytes(b"x")
            with pytest.raises(Unavailable, match="ended: exit status 143"):
                await asyncio.wait_for(running, HANGS)

    asyncio.run(run())


INTERRUPTED = """
import os, signal
from hal_engine.distributed.control_messages import Up
from hal_engine.generation.process import CallerEnd
from tests.overlap.failing import FailingRunner

send = CallerEnd.send

def interrupted(end, message):
    if isinstance(message, Up):
        os.kill(os.getpid(), signal.SIGINT)
    return send(end, message)

CallerEnd.send = interrupted
"""


def test_an_interrupt_does_not_cut_the_message_that_the_process_is_up(tmp_path, monkeypatch):
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    for folder in (tmp_path, ROOT):
        monkeypatch.syspath_prepend(str(folder))

    async def run():
        async with hal.AsyncEngine(device="cpu", runner="interrupted:FailingRunner") as engine:
            assert (await text_of(engine))[-1].finish_reason is not None

    asyncio.run(run())


def test_a_stopped_process_ends_its_requests_and_may_go_on(held, monkeypatch):
    monkeypatch.setenv("HAL_SECONDS_PROCESS_SILENCE", "1")
    monkeypatch.setenv("HAL_SECONDS_BEAT", "0.05")

    async def run():
        async with hal.AsyncEngine(device="cpu", runner=HELD) as engine:
            running = asyncio.create_task(text_of(engine))
            await launched(held)
            pid = engine._link._process.pid
            os.kill(pid, signal.SIGSTOP)
            for request in (running, text_of(engine)):
                with pytest.raises(Unavailable, match="has not beaten for 1 s: it is stopped, or hangs"):
                    await asyncio.wait_for(request, HANGS)
            assert "has not beaten" in engine.lost
            assert engine.error is None
            os.kill(pid, signal.SIGCONT)
            (held / "permits").write_bytes(b"*")
            while engine.lost:
                await asyncio.sleep(0.01)
            assert (await text_of(engine))[-1].finish_reason is not None

    asyncio.run(run())


BUSY = f"""
import asyncio, hal
async def main():
    async with hal.AsyncEngine(device="cpu", runner="{HELD}") as engine:
        print(engine._link._process.pid, flush=True)
        async for part in engine.generate([1, 2, 3]): pass
asyncio.run(main())
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_a_process_in_a_step_ends_with_its_parent(held, stopped):
    parent = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True)
    engine = int(parent.stdout.readline())
    ended = os.pidfd_open(engine)
    asyncio.run(asyncio.wait_for(launched(held), HANGS))
    if stopped:
        os.kill(engine, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert select.select([ended], [], [], HANGS)[0], "it outlives its parent, as no step ends"
    os.close(ended)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder for temporary files, of this test alone."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_nothing_is_left_of_ranks_that_end_while_they_load(folder):
    async def run():
        engine = hal.AsyncEngine(device="cpu", executor=Ranks(tp=2))
        opening = asyncio.create_task(engine.__aenter__())
        while not [*folder.glob("*/hal-ranks-*/rank.*")]:  # ranks that are being started
            await asyncio.sleep(0.01)
        opening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await opening

    asyncio.run(run())
    assert [*folder.iterdir()] == []


def test_nothing_is_left_of_workers_that_end_in_order(folder):
    async def run():
        async with hal.AsyncEngine(device="cpu", executor=Ranks(split=(1, 1))) as engine:
            assert len(await text_of(engine)) >= 1

    asyncio.run(run())
    assert [*folder.iterdir()] == []
