"""On the native path a hook, and a turn of the engine, keep the GIL, so a busy thread does not delay them.

A second thread wants the GIL throughout. The switch interval is so long that the thread gets it only if the hook
releases it: in a call of the driver's bindings, or in a call of NumPy's that releases it even for few elements.
"""

import ctypes
from itertools import count

import numpy as np
import pytest
from hal_core import MemorySink, Request, SamplingParams, StateConfig, Step, Task, TaskBatch, TaskKind, View
from hal_core.devices import dtype_of
from hal_engine.engine import Engine, Limits
from hal_engine.stepping import Stepper

from tests.lock_wanted import Waiting

SIZES = StateConfig(num_slots=128, max_model_len=2048, block_size=16)
LENGTH, BLOCKS, ROUNDS = 1024, 64, 5
_names = count()


def admitted(state, how_many):
    tokens = np.arange(LENGTH)
    return [state.admit(Request(f"r{next(_names)}", tokens)) for _ in range(how_many)]


def prefill(state, how_many):
    blocks = [np.arange(BLOCKS, dtype=np.int32) for _ in range(how_many)]
    return TaskBatch.prefill(list(range(how_many)), admitted(state, how_many), [LENGTH] * how_many, blocks)


def mixed(state, how_many):
    """Hand-offs, and blocks for a running request."""
    more = [
        Task(TaskKind.REMOTE_PREFILL, slot, one, LENGTH, blocks=list(range(BLOCKS)), first_token=7)
        for slot, one in enumerate(admitted(state, how_many), 1)
    ]
    return [Task(TaskKind.MORE_BLOCKS, 0, state.host_table.requests[0], blocks=[3], first_block=BLOCKS), *more]


def insertion(bound, state, how_many):
    state.release(list(range(SIZES.num_slots)))
    batch = prefill(state, how_many)
    return lambda: bound.insert_tasks(state=state, tasks=batch, stream=bound.default_stream)


def mixed_insertion(bound, state, how_many):
    insertion(bound, state, 1)()
    batch = mixed(state, how_many)
    return lambda: bound.insert_tasks(state=state, tasks=batch, stream=bound.default_stream)


def value(bound, state, name, given):
    target = state.view(name)[3] if np.ndim(given) == 0 else state.view(name)[3, : len(given)]
    return lambda: bound.async_set_value(target=target, value=given, stream=bound.default_stream)


def settle(bound):
    """Wait until no work is in flight, so that hooks need not wait and dropped memory can be reused."""
    for event in [*bound.device.last.values()]:
        assert event.wait(30)


def admission(state, dtype):
    """Admit from an array, as a list's elements are converted with the GIL kept."""
    tokens = np.arange(LENGTH, dtype=dtype)
    return lambda: state.admit(
        Request(f"r{next(_names)}", tokens, SamplingParams(max_tokens=900, bad_words=(3,)), [4] * 700)
    )


def graphs(bound, state):
    return lambda: bound.launch_graphs(graphs=(1, 2, 3), stream=bound.default_stream)


def launched(bound, state):
    """Launch a step of 16 new requests."""
    insertion(bound, state, 16)()
    return Step(next(_names), {"target": np.arange(16, dtype=np.int32)})


def update(bound, state):
    step = launched(bound, state)
    return lambda: bound.update_inputs(state=state, step=step, stream=bound.default_stream)


def saved(bound, state, sink):
    """Return a call that puts the output of a step in flight into the sink, which has completed the outputs before."""
    step = launched(bound, state)
    bound.async_set_value(target=state.view("sampled_token_ids"), value=5, stream=bound.default_stream)
    bound.update_inputs(state=state, step=step, stream=bound.default_stream)
    settle(bound)
    sink.look()
    return lambda: bound.save_output(state=state, step=step, sink=sink, stream=bound.default_stream)


def taken(bound, state, sink):
    ticket = saved(bound, state, sink)()
    return lambda: state.take(ticket)


class Later(MemorySink):
    """A sink that completes outputs when ``look`` is called, except the newest, which the worker may take."""

    def __init__(self):
        super().__init__()
        self.pending = []

    def put(self, pending):
        self.pending.append(pending)

    def look(self):
        while len(self.pending) > 1:
            one = self.pending.pop(0)
            one.resolve()
            one.complete(None)


CALLS = {
    "admit int32": lambda bound, state, _: admission(state, np.int32),
    "admit int64": lambda bound, state, _: admission(state, np.int64),
    "insert 1": lambda bound, state, _: insertion(bound, state, 1),
    "insert 128": lambda bound, state, _: insertion(bound, state, 128),
    "hand over 16, grow 1": lambda bound, state, _: mixed_insertion(bound, state, 16),
    "a scalar": lambda bound, state, _: value(bound, state, "temperature", 0.5),
    "64 tokens": lambda bound, state, _: value(bound, state, "token_ids", list(range(64))),
    "update": lambda bound, state, _: update(bound, state),
    "save output": saved,
    "graphs": lambda bound, state, _: graphs(bound, state),
    "take": taken,
}
NO_DRIVER = ("take", "admit int32", "admit int64")
WARM, TRIES, LONG = 6, 10_000, 100
"""Calls until events and memory are reused; calls within which a release of the GIL is noticed; turns until requests
end."""


def prepared(bound, state, sink, name):
    call = CALLS[name](bound, state, sink)
    settle(bound)
    return call


@pytest.mark.parametrize("name", CALLS)
def test_no_hook_lets_go_of_the_interpreters_lock(opened, name):
    bound, sink = opened(), Later()
    state = bound.state(SIZES)
    for _ in range(WARM):
        prepared(bound, state, sink, name)()
    with Waiting() as other:
        for _ in range(ROUNDS):
            assert other.gets_in(prepared(bound, state, sink, name)) == "", "the call let another thread in there"


@pytest.mark.parametrize("name", [name for name in CALLS if name not in NO_DRIVER])
def test_the_fallbacks_release_of_the_gil_is_noticed(fallback, name):
    bound, sink = fallback(), Later()
    state = bound.state(SIZES)
    with Waiting() as other:
        assert any(other.gets_in(prepared(bound, state, sink, name)) for _ in range(TRIES))


class Nothing:
    """A runner whose steps are one value: the rest of a turn is the engine's and the hooks'."""

    needs_host, vocab_size, supports = "", 100, ()

    def __init__(self, bound):
        self._bound = bound

    def check(self, request):
        pass

    def launch(self, state, step, stream):
        self._bound.async_set_value(target=state.view("sampled_token_ids"), value=5, stream=stream)
        return step.step

    def propose(self, state, step, stream):
        pass


def test_no_turn_of_the_engine_lets_go_of_the_interpreters_lock(opened):
    """Requests enter, are fed in pieces, grow, and end in the observed turns, without waits."""
    bound = opened()
    sink = Later()
    stepper = Stepper(bound, bound.state(SIZES), Nothing(bound), sink, blocks=128 * 16)
    engine, ended = Engine(stepper, Limits(chunk=100), overlap=True), []

    def turn(number):
        engine.submit(Request(f"r{number}", [5] * (1 + number % 150), SamplingParams(max_tokens=40 + number % 7)))
        settle(bound)
        sink.look()
        return lambda: ended.extend(engine.step())

    for number in range(LONG):
        turn(number)()
    known = len(ended)
    with Waiting() as other:
        found = {number: where for number in range(LONG, LONG + 60) if (where := other.gets_in(turn(number)))}
    assert found == {}, "turns let another thread in"
    assert len(ended) > known


def test_a_large_value_is_right_though_other_threads_run_meanwhile(opened):
    bound = opened()
    given = np.random.default_rng(3).integers(0, 2**60, 1 << 16)  # 512 KB: copied without the GIL on the native path
    target = View.contiguous(bound.device.allocate(given.nbytes), 0, given.shape, dtype_of("int64"))
    bound.async_set_value(target=target, value=given, stream=bound.default_stream).wait(30)
    there = (ctypes.c_int64 * given.size).from_address(target.memory.address)
    np.testing.assert_array_equal(np.ctypeslib.as_array(there), given)
