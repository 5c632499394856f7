"""``update_inputs`` captured into the worker's own graph and replayed: the same effect as a call in each step."""

import gc

import numpy as np
import pytest
from hal_core import CapturedUpdate, MemorySink, Request, SamplingParams, StateConfig, Step, TaskBatch
from hal_core.devices.cpu import CpuPlugin
from hal_core.errors import CapabilityMissing, InvalidValue
from hal_core.runtime.bound import bind
from hal_cuda.driver import CudaError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SIZES = StateConfig(num_slots=4, max_model_len=32, block_size=8, max_draft_tokens=2)
SPOILT, NODES = 4, 5


def insert(bound, state, stream, slots=range(4)):
    params = SamplingParams(max_tokens=6, eos_token_ids=(3,), stop_sequences=((7, 8),))
    requests = [state.admit(Request(f"r{slot}", [slot + 1] * 9, params)) for slot in slots]
    batch = TaskBatch.prefill(list(slots), requests, [9] * len(requests), [[1, 2]] * len(requests))
    return bound.insert_tasks(state=state, tasks=batch, stream=stream)


def captured(bound, state, stream, *, speculative=False):
    library = bound.device.driver.api.library
    library.stand_in_capture(stream.handle, 1)
    try:
        return CapturedUpdate(bound, state=state, stream=stream, speculative=speculative)
    finally:
        library.stand_in_capture(stream.handle, 0)
        assert library.stand_in_count(SPOILT) == 0


def step_of(number, *, speculative=False):
    return Step(number, {"target": np.arange(4, dtype=np.int32)}, speculative=speculative)


def known(bound, state):
    """Return the host's data of a state, and the device's counters."""
    table, drafts = state.host_table, state.drafts
    counts = bound.counters()
    return {
        "updates": state.updates,
        "table": table.table[:, : len(table.row_lengths)].tolist(),
        "drafts": (drafts.step, drafts.handed, drafts.saved, dict(drafts.holders), set(drafts.changed)),
        "mirror": {name: column.tolist() for name, column in state.mirror.items() if name != "request_serial"},
        "counts": (counts.launches, counts.copies_out, counts.submissions),
    }


def run(bound, tokens, *, speculative, update):
    """Run steps with these tokens; return records and the host's data after each of them."""
    state, stream, results = bound.state(SIZES), bound.default_stream, []
    insert(bound, state, stream)
    go = update(state, stream)
    for number, given_ in enumerate(tokens):
        step = step_of(number, speculative=speculative)
        field = "accept_tokens" if speculative else "sampled_token_ids"
        bound.async_set_value(target=state.view(field), value=np.resize(given_, state.view(field).shape), stream=stream)
        bound.async_set_value(target=state.view("accept_num"), value=2 if speculative else 1, stream=stream)
        go(step)
        record = state.take(bound.save_output(state=state, step=step, sink=MemorySink(), stream=stream))
        rows = [(row.request_id, row.status, row.tokens.tolist()) for row in record.rows()]
        results.append((rows, known(bound, state)))
    return results


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.lists(st.lists(st.integers(1, 9), min_size=4, max_size=4), min_size=1, max_size=8),
    speculative=st.booleans(),
)
def test_a_replayed_update_is_the_one_that_was_called(opened, tokens, speculative):
    """Records, mirror, host table and counters after each step equal those of calls, and the cpu device's."""

    def called(bound):
        return lambda state, stream: lambda step: bound.update_inputs(state=state, step=step, stream=stream)

    def replayed(bound):
        library = bound.device.driver.api.library

        def update(state, stream):
            graph = captured(bound, state, stream, speculative=speculative)
            assert library.stand_in_count(NODES) == 1
            launch = lambda: library.stand_in_replay(stream.handle)  # noqa: E731
            return lambda step: graph.replay(step=step, stream=stream, launch=launch)

        return update

    with opened() as one, opened() as other, bind(CpuPlugin.open(0, {})) as cpu:
        found = [run(bound, tokens, speculative=speculative, update=replayed(bound)) for bound in (one,)]
        found += [run(bound, tokens, speculative=speculative, update=called(bound)) for bound in (other, cpu)]
    assert found[0] == found[1]
    for mine, theirs in zip(found[0], found[2], strict=True):
        assert mine[0] == theirs[0]
        assert mine[1]["mirror"] == theirs[1]["mirror"]


def test_the_ticket_and_what_enters_next_wait_for_the_graph(opened):
    bound = opened()
    state, stream, library = bound.state(SIZES), bound.device.stream(), bound.device.driver.api.library
    insert(bound, state, stream, [0, 1]).wait(30)
    graph, other = captured(bound, state, stream), bound.device.stream()
    library.stand_in_hold(stream.handle, 1)
    for own in (False, True):
        events = []

        def launch(own=own, events=events):
            library.stand_in_replay(stream.handle)
            events.append(stream.record() if own else None)
            return events[0]

        ticket = graph.replay(step=step_of(int(own)), stream=stream, launch=launch)
        assert not ticket.done()
        if own:
            assert ticket._event is events[0], "the caller's event, where there is one"
    late = insert(bound, state, other, [2])
    assert not late.done(), "the graph reads every slot (G28)"
    library.stand_in_hold(stream.handle, 0)
    for one in (ticket, late):
        one.wait(30)
    assert state.updates == 2


def test_memory_that_the_graph_still_writes_is_not_freed(opened):
    bound, freed = opened(), []
    api, stream = bound.device.driver.api, bound.device.stream()
    state, free = bound.state(SIZES), api.cuMemFreeAsync
    api.cuMemFreeAsync = lambda address, on: freed.append(address) or free(address, on)
    insert(bound, state, stream).wait(30)
    graph, address = captured(bound, state, stream), state.memory.address
    insert(bound, bound.state(SIZES, name="other"), bound.default_stream).wait(30)
    for event in [*bound.device.last.values()]:
        event.wait(30)
    api.library.stand_in_hold(stream.handle, 1)
    graph.replay(step=step_of(0), stream=stream, launch=lambda: api.library.stand_in_replay(stream.handle))
    del graph, state
    gc.collect()
    bound.device.allocate(64)  # unreferenced memory is released
    assert address not in freed
    api.library.stand_in_hold(stream.handle, 0)
    stream.synchronize(30)
    bound.device.allocate(64)
    assert address in freed


def test_the_graph_waits_for_copies_out_that_read_what_it_changes(opened):
    bound = opened()
    state, stream, library = bound.state(SIZES), bound.device.stream(), bound.device.driver.api.library
    insert(bound, state, stream).wait(30)
    graph, other = captured(bound, state, stream), bound.device.stream()
    library.stand_in_hold(other.handle, 1)
    before = bound.copy_out(memory=state.memory, parts=[state.layout.groups["step_input"]], stream=other)
    ticket = graph.replay(step=step_of(0), stream=stream, launch=lambda: library.stand_in_replay(stream.handle))
    assert not ticket.done()
    library.stand_in_hold(other.handle, 0)
    ticket.wait(30)
    columns = state.columns(before.data[0], state.layout.groups["step_input"])
    assert columns["seq_lens_encoder"].tolist() == [[9]] * 4


def refuse(graph, match, **given_):
    """Call a replay that must be refused before any launch."""
    launched = []
    with pytest.raises(InvalidValue, match=match):
        graph.replay(**given_, launch=lambda: launched.append(1))
    assert not launched


def test_what_update_inputs_refuses_a_replay_refuses_before_it_launches(opened):
    bound = opened()
    state, stream = bound.state(SIZES), bound.device.stream()
    insert(bound, state, stream).wait(30)
    plain, speculative = (captured(bound, state, stream, speculative=kind) for kind in (False, True))
    refuse(plain, "update_inputs.*step", step=Step(0, {"target": np.array([9], np.int32)}), stream=stream)
    refuse(plain, "a speculative step for a graph", step=step_of(0, speculative=True), stream=stream)
    refuse(speculative, "a plain step for a graph", step=step_of(0), stream=stream)
    refuse(plain, "is not a stream", step=step_of(0), stream=None)
    library = bound.device.driver.api.library
    library.stand_in_capture(stream.handle, 1)
    refuse(plain, "is being captured", step=step_of(0), stream=stream)
    library.stand_in_capture(stream.handle, 0)
    plain.replay(step=step_of(0), stream=stream, launch=lambda: library.stand_in_replay(stream.handle))
    bound.set_drafts(state=state, step=step_of(0), drafts={0: [5]}, stream=stream)
    refuse(plain, "draft", step=step_of(1), stream=stream)
    assert state.updates == 1


def test_a_launch_that_fails_is_not_booked(opened):
    bound = opened()
    state, stream = bound.state(SIZES), bound.device.stream()
    insert(bound, state, stream).wait(30)
    graph, before = captured(bound, state, stream), known(bound, state)

    def launch():
        raise RuntimeError("no such graph")

    with pytest.raises(RuntimeError, match="no such graph"):
        graph.replay(step=step_of(0), stream=stream, launch=launch)
    assert known(bound, state) == before


def test_what_cannot_be_captured_is_refused_by_name(opened):
    bound, other = opened(), opened()
    state, stream = bound.state(SIZES), bound.device.stream()
    plain = bound.state(StateConfig(num_slots=4, max_model_len=32), name="plain")
    with pytest.raises(InvalidValue, match=r"capture_update.*is not being captured.*begin the capture first"):
        CapturedUpdate(bound, state=state, stream=stream)
    with pytest.raises(InvalidValue, match="a state without drafts"):
        CapturedUpdate(bound, state=plain, stream=stream, speculative=True)
    with pytest.raises(InvalidValue, match="another opened device"):
        CapturedUpdate(other, state=state, stream=other.device.stream())
    with bind(CpuPlugin.open(0, {})) as cpu, pytest.raises(CapabilityMissing, match="has no graphs"):
        CapturedUpdate(cpu, state=cpu.state(SIZES), stream=cpu.default_stream)


def test_many_captured_updates_leave_the_count_of_calls_in_flight_alone(opened):
    """A mark recorded into a graph never passes, so the stream would count as full forever."""
    bound = opened()
    state, stream, library = bound.state(SIZES), bound.device.stream(), bound.device.driver.api.library
    library.stand_in_capture(stream.handle, 1)
    for _ in range(400):
        CapturedUpdate(bound, state=state, stream=stream)
    library.stand_in_capture(stream.handle, 0)
    assert library.stand_in_count(NODES) == 400, "and nothing else"
    for _ in range(600):
        bound.async_set_value(target=state.view("seed")[0], value=1, stream=stream)
    assert bound.device.driver.native.calls.given_up() == 0


class TestGraphsOfTheCallers:
    """``launch_graphs``: graphs that the caller has captured and instantiated."""

    def test_they_are_launched_in_order_behind_the_streams_work(self, opened):
        bound = opened()
        state, stream = bound.state(SIZES), bound.device.stream()
        captured(bound, state, stream)
        calls = bound.device.driver.api.calls
        calls.clear()
        bound.launch_graphs(graphs=[0x1A, 0x1B], stream=stream)
        assert [name for name in calls[:] if name.startswith("graph")] == ["graph 1a", "graph 1b"]

    def test_a_graph_waits_for_what_holds_its_stream_and_the_host_does_not(self, opened):
        bound = opened()
        state, stream = bound.state(SIZES), bound.device.stream()
        insert(bound, state, stream).wait(30)
        captured(bound, state, stream)
        with bound.device.hold_stream(stream):
            bound.async_set_value(target=state.view("sampled_token_ids"), value=9, stream=stream)
            bound.launch_graphs(graphs=[1], stream=stream)
            assert not stream.record().done()
        step = step_of(0)
        record = state.take(bound.save_output(state=state, step=step, sink=MemorySink(), stream=stream))
        assert [row.tokens.tolist() for row in record.rows()] == [[9]] * 4

    def test_what_cannot_be_launched_is_refused_by_name(self, opened):
        bound = opened()
        stream, library = bound.device.stream(), bound.device.driver.api.library
        library.stand_in_capture(stream.handle, 1)
        with pytest.raises(InvalidValue, match=r"launch_graphs.*is being captured"):
            bound.launch_graphs(graphs=[1], stream=stream)
        library.stand_in_capture(stream.handle, 0)
        bound.device.driver.api.fail = "graph"
        with pytest.raises(CudaError, match="cuGraphLaunch"):
            bound.launch_graphs(graphs=[1], stream=stream)
        bound.device.driver.api.fail = ""
        with pytest.raises(InvalidValue, match=r"launch_graphs: graphs: 17 graphs at once"):
            bound.launch_graphs(graphs=[1] * 17, stream=stream)
        with bind(CpuPlugin.open(0, {})) as cpu, pytest.raises(CapabilityMissing, match="has no graphs"):
            cpu.launch_graphs(graphs=[1], stream=cpu.default_stream)
