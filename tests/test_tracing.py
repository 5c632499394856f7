"""``--trace``: the file has each hook call once, spans of a row lie apart, and ranks have processes."""

from collections import Counter, defaultdict
from itertools import pairwise
from operator import itemgetter, le

import httpx
import numpy as np
import pytest
from hal_core import DONE, StateConfig, hookimpl
from hal_engine import perfetto
from hal_engine.generation.plan import ModelPlan
from hal_engine.opening import open_engine
from hal_engine.options import engine_options
from hal_engine.perfetto import Spans
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
    """A trace that was read back: ``spans`` by track, each (name, begin, end); ``notes``, each (span, name, value);
    names of processes and of the tracks of each. In the order of time every end belongs to the last beginning of its
    track that has none."""

    def __init__(self, path):
        trace = pb2.Trace()
        trace.ParseFromString(path.read_bytes())
        described = [packet.track_descriptor for packet in trace.packet if packet.HasField("track_descriptor")]
        self.processes = {one.uuid: one.process.process_name for one in described if not one.name}
        self.names = {one.uuid: one.name for one in described if one.name}
        self.parents = {one.uuid: one.parent_uuid for one in described if one.name}
        self.spans, begun = defaultdict(list), defaultdict(list)
        events = [(packet.timestamp, packet.track_event) for packet in trace.packet if packet.HasField("track_event")]
        self.notes = [
            (event.name, one.name, getattr(one, one.WhichOneof("value")))
            for _, event in events
            for one in event.debug_annotations
        ]
        for at, event in sorted(events, key=itemgetter(0)):
            if event.type == event.TYPE_SLICE_BEGIN:
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
    calls = Counter(name for name, *_ in read.of("calls"))
    assert {hook: calls[hook] for hook in counts} == counts
    assert "broadcast_tokens" not in calls, "a group of one never reaches the device"
    assert counts["save_output"] == len(read.of("steps")) >= 10
    assert Counter(name for name, *_ in read.of("stream 0")) == counts.pending
    assert calls["update_inputs"] == calls["order_after_reads"] == counts["save_output"]
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
    assert Counter(name for name, *_ in read.of("calls")) == {"state": 1, "async_set_value": 3}
    assert apart(read.of("calls"))


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_ranks_append_a_process_each(command, tmp_path, device):
    path = tmp_path / "ranks.pftrace"
    path.write_bytes(b"of an earlier run")
    done = command("run", "--device", device, "--tp", "2", "--max-tokens", "3", "x", "--trace", str(path))
    assert done.status == 0, done.err
    read = Read(path)
    assert sorted(read.processes.values()) == [f"rank 0, {device}:0", f"rank 1, {device}:0"]
    for process in read.processes:
        of = defaultdict(list)
        for uuid, spans in read.spans.items():
            if read.parents[uuid] == process:
                of[read.names[uuid]] += spans
        calls = Counter(name for name, *_ in of["calls"])
        assert calls["save_output"] == calls["broadcast_tokens"] >= 3
        ends = {hook: sorted(end for name, _, end in of["stream 0"] if name == hook) for hook in calls}
        assert len(ends["save_output"]) == calls["save_output"]
        assert len(ends["broadcast_tokens"]) == (calls["broadcast_tokens"] if device == "sim" else 0)
        assert all(map(le, ends["broadcast_tokens"], ends["save_output"])), "a broadcast ends before its step's output"


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
    assert calls["save_output"] == ended["save_output"] == len(read.of("steps")) == calls["update_inputs"] >= 4 + 5
    assert calls["insert_tasks"] >= 2
    assert all(apart(spans) for spans in read.spans.values())


def test_packets_have_what_was_added(tmp_path):
    """Spans within each other, side by side and at once; numbers and texts of more than seven bits."""
    path, error, late = tmp_path / "rows.pftrace", "ü" * 200, 1 << 61
    spans = Spans(1 << 22)
    spans.add((12, 18, "calls", "inner", 0, None, 10, 20, "calls", "insert_tasks", 1 << 40, None))
    spans.add((20, 21, "calls", "insert_tasks", 3, None, 30, late, "calls", "after", 0, error))
    spans.add((5, late, "stream 0", "save_output", 0, None))  # added last, begun first
    spans.add((late, late + 1, "stream 0", "step", 300, None))
    path.write_bytes(spans.packets(error, late))
    read = Read(path)
    assert [*read.processes.values()] == [error]
    assert sorted((name, began - late, ended - late) for name, began, ended in read.of("calls")) == [
        ("after", 30, late),
        ("inner", 12, 18),
        ("insert_tasks", 10, 20),
        ("insert_tasks", 20, 21),
    ]
    assert sorted(read.of("stream 0")) == [("save_output", late + 5, 2 * late), ("step", 2 * late, 2 * late + 1)]
    assert all(apart(one) for one in read.spans.values())
    assert sorted(read.notes) == [
        ("after", "error", error),
        ("insert_tasks", "requests", 3),
        ("insert_tasks", "requests", 1 << 40),
        ("save_output", "step", 0),
        ("step", "number", 300),
    ]


def test_the_last_spans_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(perfetto, "MOST", 2)
    path, spans = tmp_path / "many.pftrace", Spans(1)
    for at in range(1, 4):
        assert not spans.full or at == 3
        spans.add((at * 10, at * 10 + 1, "calls", "step", at, None))
    path.write_bytes(spans.packets("test"))
    assert spans.full
    assert [number for *_, number in Read(path).notes] == [2, 3]
