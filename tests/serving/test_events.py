"""Events of a stream: how many writes and tasks they take, what is kept for a client that does not read, and bytes."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from types import SimpleNamespace

import msgspec
import pytest
from hal_core import FinishReason, HalError
from hal_engine.generation import AsyncEngine
from hal_engine.generation.plan import ModelPlan
from hal_engine.model.streaming import StreamDecoder
from hal_engine.options import engine_options
from hal_engine.serving import Settings
from hal_engine.serving.answers import Answers, Wanted
from hal_engine.serving.app import Server
from hal_engine.serving.drain import Drain
from hal_engine.serving.events import Events
from hal_engine.serving.metrics import SHORT, Gaps, Metrics
from hal_engine.serving.schemas import StreamOptions
from hal_engine.serving.shapes import ChatShape, CompletionShape
from hal_engine.streams import Part, append, joined
from hal_engine.timeouts import TIMEOUTS
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Histogram

HANGS = 60
TOKENIZER = ModelPlan(None).tokenizer
SHAPES = {"completions": CompletionShape, "chat": ChatShape}


class Engine:
    """Takes requests; the test gives their parts. ``puts``: of each request; ``ended``: how many were ended."""

    def __init__(self):
        self.puts, self.ended = [], 0

    def begin(self, ids, params, put, **options):
        self.puts.append(put)

        def end():
            self.ended += 1

        return end


class Client:
    """One connection. ``writes``: bodies of it; ``takes``: whether it takes bytes; ``leaves``: is set."""

    def __init__(self):
        self.head, self.writes, self.more, self.waits = None, [], True, 0
        self.takes, self.leaves = asyncio.Event(), asyncio.Event()
        self.takes.set()

    async def send(self, message):
        if not self.takes.is_set():
            self.waits += 1
            await self.takes.wait()
        if message["type"] == "http.response.start":
            self.head = message
        else:
            self.writes.append(message["body"])
            self.more = message["more_body"]

    async def receive(self):
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    def events(self):
        """The objects of all events; the last as it is."""
        found = [event.removeprefix("data: ") for event in b"".join(self.writes).decode().split("\n\n")[:-1]]
        return [json.loads(event) if event != "[DONE]" else event for event in found]


class Served:
    """A stream of ``n`` choices that has its first part."""

    def __init__(self, engine, *, n=1, shape="completions", logprobs=False, drain=None, stops=(), **options):
        self.engine, self.client, self.drain = engine, Client(), drain or Drain(0.0)
        self.answers = Answers(engine, Wanted([[1, 2]], n, {}, stops), Metrics("m"))
        shape = SHAPES[shape]("m", TOKENIZER, logprobs=logprobs)
        self.response = Events(self.answers, shape, StreamOptions(**options), self.drain)

    async def begin(self):
        first, before = asyncio.create_task(self.answers.first()), len(self.engine.puts)
        await until(lambda: len(self.engine.puts) == before + self.answers.left)
        self.puts = self.engine.puts[before:]
        self.puts[0](Part("a", (1,)))
        await first
        self.task = asyncio.create_task(self.response({}, self.client.receive, self.client.send))
        await until(lambda: self.client.writes)

    async def end(self):
        for put in self.puts:
            put(Part("", (2,), FinishReason.LENGTH))
        await self.task


async def until(holds):
    while not holds():
        await asyncio.sleep(0)


def play(scene):
    """Run a scene with an engine; return how many tasks it made after its beginning (``count`` begins anew)."""
    made = []

    async def bounded():
        loop = asyncio.get_running_loop()
        loop.set_task_factory(lambda loop, work, **more: made.append(work) or asyncio.Task(work, loop=loop, **more))
        async with asyncio.timeout(HANGS):
            await scene(Engine(), made)

    asyncio.run(bounded())


def test_a_step_is_one_write_and_no_task():
    async def scene(engine, made):
        served = Served(engine)
        await served.begin()
        made.clear()
        for step in range(100):
            served.puts[0](Part("b", (2,)))
            assert len(served.client.writes) == step + 2, "it is written in the call that brings the part"
        assert made == []
        await served.end()
        assert b"".join(served.client.writes).count(b"data: {") == 102

    play(scene)


def test_the_choices_of_a_step_are_one_write():
    async def scene(engine, made):
        served = Served(engine, n=3)
        await served.begin()
        before = len(served.client.writes)
        made.clear()
        for _ in range(10):
            for put in served.puts:
                put(Part("b", (2,)))
            await asyncio.sleep(0)
        assert made == []
        assert len(served.client.writes) == before + 10
        await served.end()

    play(scene)


def test_a_client_that_does_not_read_has_one_write_and_few_parts_and_slows_nobody():
    async def scene(engine, made):
        slow, other, steps = Served(engine), Served(engine), 5000
        await slow.begin()
        await other.begin()
        slow.client.takes.clear()
        made.clear()
        for step in range(steps):
            slow.puts[0](Part(f"{step},", (2,)))
            other.puts[0](Part("b", (2,)))
            kept = slow.answers._parts.get(0, [])
            assert len(kept) <= 1 + math.log2(steps)
        await until(lambda: slow.client.waits)
        assert (slow.client.waits, len(slow.client.writes), len(made)) == (1, 1, 1)
        assert len(other.client.writes) == 1 + steps
        slow.client.takes.set()
        await until(lambda: len(slow.client.writes) == 3)
        text = "a" + "".join(f"{step}," for step in range(steps))
        events = slow.client.events()
        assert "".join(event["choices"][0]["text"] for event in events) == text
        assert len(events) == 3, "the write that waited, and all that came meanwhile as one"
        await slow.end()
        await other.end()

    play(scene)


def test_a_kept_token_is_copied_a_few_times():
    parts, count, copied = [], 1 << 12, 0
    for _ in range(count):
        former = {id(part) for part in parts}
        append(parts, Part("x", (1,)))
        copied += sum(len(part.token_ids) for part in parts if id(part) not in former)
    assert copied <= (1 + math.log2(count)) * count
    assert joined(parts) == Part("x" * count, (1,) * count)


def test_a_fault_in_one_response_harms_no_other(monkeypatch):
    async def scene(engine, made):
        broken, other = Served(engine), Served(engine)
        await broken.begin()
        await other.begin()
        monkeypatch.setattr(broken.response._shape, "event", lambda *_: 1 / 0)
        monkeypatch.setattr(broken.response, "_around", {})
        for served in (broken, other):
            served.puts[0](Part("b", (2,)))
        with pytest.raises(ZeroDivisionError):
            await broken.task
        assert engine.ended == 1
        await other.end()
        assert other.client.events()[-1] == "[DONE]"

    play(scene)


def test_a_client_that_leaves_has_its_choices_ended():
    async def scene(engine, made):
        served = Served(engine, n=3)
        await served.begin()
        served.client.leaves.set()
        await served.task
        assert engine.ended == 3
        before = len(served.client.writes)
        served.puts[0](Part("b", (2,)))
        await asyncio.sleep(0)
        assert len(served.client.writes) == before

    play(scene)


@pytest.mark.parametrize("reads", [True, False])
def test_the_end_of_the_drain_is_the_last_event(reads):
    async def scene(engine, made):
        served = Served(engine, drain=(drain := Drain(0.0)))
        await served.begin()
        if not reads:
            served.client.takes.clear()
            served.puts[0](Part("b", (2,)))
        drain.begin()
        await until(lambda: served.task.done() or (not reads and served.answers.error))
        served.client.takes.set()
        await served.task
        assert served.client.events()[-1]["error"]["code"] == "server_stopping"
        assert (drain.cut, engine.ended > 0, served.client.more) == (1, True, False)

    play(scene)


def test_a_stream_that_begins_behind_the_drain_ends_at_once():
    async def scene(engine, made):
        drain = Drain(0.0)
        drain.begin()
        await until(lambda: drain._over)
        served = Served(engine, drain=drain)
        await served.begin()
        await served.task
        assert served.client.events()[-1]["error"]["code"] == "server_stopping"

    play(scene)


def test_an_idle_stream_has_comments_unless_nobody_reads(monkeypatch):
    monkeypatch.setattr(TIMEOUTS, "ping", 0.0)

    async def scene(engine, made):
        served = Served(engine)
        await served.begin()
        await until(lambda: served.client.writes[-1].startswith(b": ping - "))
        served.client.takes.clear()
        await until(lambda: served.client.waits)
        before = len(served.client.writes)
        for _ in range(10):
            await asyncio.sleep(0)
        assert (served.client.waits, len(served.client.writes)) == (1, before)
        served.client.takes.set()
        await served.end()

    play(scene)


def test_gaps_are_a_histogram_as_of_prometheus():
    labels = {"model_name": "m"}
    ours, theirs = Gaps("x", "About.", labels), Histogram("x", "About.", ["model_name"], buckets=SHORT, registry=None)
    for seconds in (0.0, 0.001, 0.0011, 0.04, 0.1, 39.9, 40.0, 41.0):
        ours.observe(seconds)
        theirs.labels(**labels).observe(seconds)
    (family,), (wanted,) = ours.collect(), theirs.collect()
    assert family.type == wanted.type
    assert family.samples == [sample for sample in wanted.samples if not sample.name.endswith("_created")]


def test_an_error_is_the_last_event_behind_all_parts():
    async def scene(engine, made):
        served = Served(engine, n=2)
        await served.begin()
        served.puts[1](Part("b", (2,)))
        served.puts[0](HalError("gone"))
        await served.task
        assert [event.get("error", {}).get("message", "") for event in served.client.events()][-2:] == ["", "gone"]

    play(scene)


@pytest.mark.parametrize("shape", SHAPES)
@given(texts=st.lists(st.text(st.characters(codec="utf-8")), max_size=6), usage=st.booleans())
def test_the_bytes_of_events_are_those_of_their_objects(shape, texts, usage):
    options = {"include_usage": usage, "continuous_usage_stats": usage}

    async def scene(engine, made):
        served = Served(engine, shape=shape, **options)
        await served.begin()
        for text in texts:
            served.puts[0](Part(text, (2,)))
        await served.end()
        response, wanted = served.response, []
        if (opening := response._shape.opening(0)) is not None:
            wanted.append(response._shape.event([opening]))
        parts = [Part("a", (1,)), *(Part(text, (2,)) for text in texts), Part("", (2,), FinishReason.LENGTH)]
        for tokens, part in enumerate(parts, 1):
            count = {"prompt_tokens": 2, "completion_tokens": tokens, "total_tokens": 2 + tokens}
            if part.text or part.finish_reason:
                wanted.append(response._shape.event([response._shape.piece(0, part)], count if usage else None))
        if usage:
            wanted.append(response._shape.event([], count))
        lines = [b"data: " + msgspec.json.encode(one) + b"\n\n" for one in wanted]
        assert b"".join(served.client.writes) == b"".join([*lines, b"data: [DONE]\n\n"])
        assert dict(served.client.head["headers"])[b"content-type"] == b"text/event-stream; charset=utf-8"
        assert served.client.more is False

    play(scene)


def test_whole_characters_are_decoded_once_at_most():
    """Behind the first text of an answer, ids that are whole characters have theirs from a table."""
    decoded = []
    tokens = TOKENIZER.encode("def main(names):\n    return names\n")
    counting = SimpleNamespace(
        byte_token_ids=TOKENIZER.byte_token_ids,
        own_texts=TOKENIZER.own_texts,
        visible=TOKENIZER.visible,
        decode=lambda ids: decoded.append(ids) or TOKENIZER.decode(ids),
    )
    decoder = StreamDecoder(counting, tokens[:3])
    text, before = decoder.push(tokens[3:4]), len(decoded)
    text += "".join(decoder.push([token]) for token in tokens[4:8]) + decoder.push(tokens[8:])
    assert len(decoded) == before
    assert text == TOKENIZER.decode(tokens[3:])


def test_a_request_of_token_ids_waits_for_no_thread_and_a_turn_of_the_loop_at_a_time(monkeypatch):
    """Each wait of a request lasts a step's events where many streams run, so that a first token comes late. Counted
    are turns of the event loop: to the engine's request, and from its first part to the event."""
    plan = ModelPlan(None)
    engine = AsyncEngine.of(plan, plan.serve(engine_options({"device": "cpu", "slots": 2})))
    begun, turns, client, threads = [], [0], Client(), {*threading.enumerate()}
    monkeypatch.setattr(engine, "begin", lambda ids, params, put, **options: begun.append(put) or (lambda: None))
    server = Server(engine, Settings(model="m"), drain=Drain(0.0))
    server._opened.set()
    content = json.dumps({"prompt": [1, 2, 3], "stream": True, "max_tokens": 2}).encode()
    messages = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive():
        return messages.pop() if messages else await client.receive()

    async def main():
        loop = asyncio.get_running_loop()

        def turn():
            turns[0] += 1
            loop.call_soon(turn)

        headers = [(b"content-length", b"%d" % len(content)), (b"host", b"localhost")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
        task = asyncio.create_task(server.app()(scope, receive, client.send))
        loop.call_soon(turn)
        await until(lambda: begun)
        assert turns[0] <= 1
        turns[0] = 0
        begun[0](Part("a", (1,)))
        await until(lambda: client.writes)
        assert turns[0] <= 2
        client.leaves.set()
        await task

    asyncio.run(asyncio.wait_for(main(), HANGS))
    assert {*threading.enumerate()} <= threads
