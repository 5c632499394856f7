"""Step messages and control messages: decoding returns the encoded content, and other bytes are refused in one way."""

import contextlib

import pytest
from hal_core import ENTERING, FrameError, Request, SamplingParams, SplitRole, StateConfig, TaskKind, admit, lay_out
from hal_core import Task as CoreTask
from hal_engine.distributed.control_messages import (
    Agreed,
    Failed,
    Hello,
    Raised,
    Setup,
    Stop,
    decode_message,
    encode_message,
)
from hal_engine.distributed.steps import StepOrder, TaskOrder, decode_step, encode_step, orders_of
from hypothesis import given
from hypothesis import strategies as st

ids = st.integers(0, 2**31 - 1)
tokens = st.lists(ids, max_size=6).map(tuple)
counts = st.integers(0, 2**31 - 1)
params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 5, width=32),
    seed=st.integers(0, 2**63 - 1),
    max_tokens=st.integers(1, 100),
    stop_sequences=st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
    bad_words=tokens,
    logprobs=st.none() | st.integers(0, 20),
)
names = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=8)


@st.composite
def task_orders(draw):
    kind, name = draw(st.sampled_from(TaskKind)), draw(names)
    request = None
    if kind in ENTERING:
        request = Request(name, draw(tokens), draw(params), draw(tokens), draw(st.sampled_from(SplitRole)))
    numbers = [draw(counts) for _ in range(3)]
    return TaskOrder(kind, numbers[0], name, request, *numbers[1:], draw(tokens), draw(counts), draw(ids), draw(tokens))


steps = st.integers(1, 2**63 - 1)
orders = st.builds(StepOrder, counts, steps, st.lists(task_orders(), max_size=4).map(tuple), steps)


@given(orders)
def test_a_step_message_is_heard_as_it_was_said(order):
    assert decode_step(encode_step(order)) == order


@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_or_refused(body):
    for decode in (decode_step, decode_message):
        with contextlib.suppress(FrameError):
            decode(body)


@given(orders, st.data())
def test_a_changed_byte_is_decoded_or_refused(order, data):
    packed = bytearray(encode_step(order))
    packed[data.draw(st.integers(0, len(packed) - 1), label="byte")] ^= data.draw(st.integers(1, 255), label="bits")
    with contextlib.suppress(FrameError):
        decode_step(bytes(packed))


@pytest.mark.parametrize(
    "message",
    [
        Hello(1, 2, {"a": "b"}),
        Setup(
            model="m",
            require={"x": True, "y": "async"},
            sizes=StateConfig(2, 64),
            blocks=4,
            tp=2,
            timeout=3.0,
        ),
        Failed(1, "it broke", step=3, lost=[0], trace="Traceback"),
        Raised(1, 3, "launch", "RuntimeError", "Traceback"),
        Agreed(3, True),
        Stop("why", "cure", 1, 5),
    ],
)
def test_a_message_arrives_as_it_was_sent(message):
    assert decode_message(encode_message(message)) == message


def test_a_scheduler_s_tasks_travel_with_the_requests_that_enter():
    """A resumed request is sent with its generated tokens; all later tasks have its name alone."""
    layout = lay_out(StateConfig(2, 64))
    request = Request("r", (3, 4), SamplingParams(max_tokens=9), (5,))
    admitted = admit(request, layout)
    enter = CoreTask(TaskKind.PREFILL, 1, admitted, 0, 3, blocks=[4])
    leave = CoreTask(TaskKind.ABORTED, 1, admitted)
    first, second = orders_of([enter, leave])
    assert list(first.request.prompt) == [3, 4]
    assert (tuple(first.request.output), first.request.params) == ((5,), request.params)
    assert (first.blocks, first.num_scheduled_tokens) == ((4,), 3)
    assert (second.name, second.request) == ("r", None)
