"""``--trace``: the file has each hook call once, spans lie within each other or below, and ranks have processes."""

from collections import Counter, defaultdict
from itertools import pairwise

import httpx
import numpy as np
import pytest
from hal_core import DONE, StateConfig, hookimpl
from hal_engine import perfetto
from hal_engine.generation.plan import ModelPlan
from hal_engine.opening import open_engine
from hal_engine.options import engine_options
from hal_engine.perfetto import Events
from hal_engine.tracing import traced

import hal

from .commands import LIBRARIES
from .serving.conftest import HANGS, serving

pb2 = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2", reason="perfetto is not installed")
WARM = LIBRARIES


class Counts(Counter):
    """How often each hook was called; ``pending``: with a ticket that was not done."""

    def __init__(self):
        super().__init__()
        self.pending = Counter()

    def _count(self, hook):
        self[hook] += 1
        ticket = yield
        self.pending[hook] += ticket is not DONE
        return ticket

    @hookimpl(wrapper=True)
    def insert_tasks(self):
        return (yield from self._count("insert_tasks"))

    @hookimpl(wrapper=True)
    def async_set_value(self):
        return (yield from self._count("async_set_value"))

    @hookimpl(wrapper=True)
    def broadcast_tokens(self):
        return (yield from self._count("broadcast_tokens"))

    @hookimpl(wrapper=True)
    def save_output(self):
        return (yield from self._count("save_output"))


class Read:
    """A trace that was read back: ``spans`` by track, each (name, begin, end); ``marks``; ``notes``, each (span, name,
    value); names of processes and of the tracks of each. Every end belongs to the last beginning of its track that has
    none."""

    def __init__(self, path):
        trace = pb2.Trace()
        trace.ParseFromString(path.read_bytes())
        described = [packet.track_descriptor for packet in trace.packet if packet.HasField("track_descriptor")]
        self.processes = {one.uuid: one.process.process_name for one in described if not one.name}
        self.names = {one.uuid: one.name for one in described if one.name}
        self.parents = {one.uuid: one.parent_uuid for one in described if one.name}
        self.spans, self.marks, begun = defaultdict(list), Counter(), defaultdict(list)
        events = [(packet.timestamp, packet.track_event) for packet in trace.packet if packet.HasField("track_event")]
        self.notes = [
            (event.name, one.name, one.string_value) for _, event in events for one in event.debug_annotations
        ]
        for at, event in events:
            if event.type == event.TYPE_INSTANT:
                self.marks[event.name] += 1
            elif event.type == event.TYPE_SLICE_BEGIN:
                begun[event.track_uuid].append((event.name, at))
            else:
                name, began = begun[event.track_uuid].pop()
                assert began < at
                self.spans[event.track_uuid].append((name, began, at))
        assert not any(begun.values())

    def of(self, track):
        return [span for uuid, spans in self.spans.items() if self.names[uuid] == track for span in spans]


def apart(spans):
    """Whether no span begins before the one before it has ended."""
    ordered = sorted(spans, key=lambda span: span[1])
    return all(former[2] <= later[1] for former, later in pairwise(ordered))


def test_each_hook_call_of_a_run_is_there_once(tmp_path):
    plan, path, counts = ModelPlan(None), tmp_path / "run.pftrace", Counts()
    setup = plan.serve(engine_options({"device": "cpu", "slots": 2, "trace": str(path)}))
    with open_engine(setup, lambda record: None) as opened:
        opened.device.observe(counts, name="counts")
        params = plan.params(None, temperature=0.0, max_tokens=5)
        opened.engine.submit_all([plan.request(f"r{at}", [1, 2, 3 + at], params) for at in range(3)])
        while opened.engine.busy:
            opened.engine.step()
    read = Read(path)
    assert [*read.processes.values()] == ["engine, cpu:0"]
    assert Counter(name for name, *_ in read.of("calls")) == counts
    assert counts["save_output"] == len(read.of("steps")) >= 10
    assert Counter(name for name, *_ in read.of("stream 0")) == counts.pending
    assert read.marks["update_inputs"] == counts["save_output"]
    assert all(apart(spans) for spans in read.spans.values())


def test_tickets_that_overlap_lie_below_each_other(tmp_path):
    path = tmp_path / "held.pftrace"
    with hal.open_device("sim") as device, traced(str(path), device, "test"):
        state = device.state(StateConfig(num_slots=2, max_model_len=32))
        stream = device.default_stream
        with device.device.hold_stream(stream):
            tickets = [
                device.async_set_value(
                    target=state.view("temperature"), value=np.zeros((2, 1), np.float32), stream=stream
                )
                for _ in range(3)
            ]
        for ticket in tickets:
            ticket.wait(60)
    read = Read(path)
    lanes = [spans for uuid, spans in read.spans.items() if read.names[uuid] == "stream 0"]
    assert sorted(map(len, lanes)) == [1, 1, 1]
    assert len(read.of("calls")) == 3
    assert apart(read.of("calls"))


def test_ranks_append_a_process_each(command, tmp_path):
    path = tmp_path / "ranks.pftrace"
    path.write_bytes(b"of an earlier run")
    done = command("run", "--device", "cpu", "--tp", "2", "--max-tokens", "3", "x", "--trace", str(path))
    assert done.status == 0, done.err
    read = Read(path)
    assert sorted(read.processes.values()) == ["rank 0, cpu:0", "rank 1, cpu:0"]
    for process in read.processes:
        names = Counter(
            name for uuid, spans in read.spans.items() if read.parents[uuid] == process for name, *_ in spans
        )
        assert names["save_output"] == 2 * names["broadcast_tokens"] >= 6  # as the host called it, and its ticket


@pytest.mark.conform
def test_a_server_traces_its_engine(tmp_path):
    path = tmp_path / "served.pftrace"
    with serving("--slots", "2", "--trace", str(path)) as served:
        for number in (1, 2):
            body = {"prompt": "def main(", "max_tokens": 3 + number, "temperature": 0}
            assert httpx.post(f"{served.url}/v1/completions", json=body, timeout=HANGS).status_code == 200
    read = Read(path)
    assert [*read.processes.values()] == ["engine, cpu:0"]
    calls, ended = (Counter(name for name, *_ in read.of(track)) for track in ("calls", "stream 0"))
    assert set(ended) == {"save_output"}
    assert calls["save_output"] == ended["save_output"] == len(read.of("steps")) == read.marks["update_inputs"] >= 4 + 5
    assert calls["insert_tasks"] >= 2
    assert all(apart(spans) for spans in read.spans.values())


def test_packets_have_what_the_events_say(tmp_path):
    """Spans that share a beginning or an end, a mark, numbers and texts of more than seven bits."""
    path, error = tmp_path / "rows.pftrace", "ü" * 200
    events = Events(1 << 22)
    calls, stream = events.track("calls"), events.track("stream 0")
    events.add((10, calls.begin("insert_tasks", 1 << 40), 10, calls.begin("inner", None), 20, calls.end))
    events.add((30, calls.end, 30, calls.mark("mark"), 30, calls.begin("after", None, error), 1 << 62, calls.end))
    events.add((5, stream.begin("save_output", 0), 1 << 62, stream.end))  # added last, begun first
    events.add((1 << 62, stream.begin("step", 300), (1 << 62) + 1, stream.end))
    path.write_bytes(events.packets(error))
    read = Read(path)
    assert [*read.processes.values()] == [error]
    assert sorted(read.of("calls")) == [("after", 30, 1 << 62), ("inner", 10, 20), ("insert_tasks", 10, 30)]
    assert read.of("stream 0") == [("save_output", 5, 1 << 62), ("step 300", 1 << 62, (1 << 62) + 1)]
    assert read.marks == {"mark": 1}
    assert sorted(read.notes) == [
        ("after", "error", error),
        ("insert_tasks", "requests", str(1 << 40)),
        ("save_output", "step", "0"),
    ]


def test_the_last_events_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(perfetto, "MOST", 4)
    path, events = tmp_path / "many.pftrace", Events(1)
    calls = events.track("calls")
    for at in range(3):
        assert not events.full or at == 2
        events.add((at * 10, calls.begin("step", at), at * 10 + 1, calls.end))
    path.write_bytes(events.packets("test"))
    assert events.full
    assert [name for name, *_ in Read(path).of("calls")] == ["step 1", "step 2"]
