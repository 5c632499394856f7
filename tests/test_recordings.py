"""Recordings: of a small worker's calls, of ``hal run --record``, and their replay on devices and on liars."""

import gzip
import importlib.util
import re
import signal
import socket
import subprocess
import sys
import zlib
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import get_ident

import numpy as np
import pytest
from hal_conformance.harness import backdoor
from hal_conformance.harness.lies import Lie, lay_over
from hal_conformance.harness.sinks import KeepingSink
from hal_conformance.opening import subject
from hal_conformance.replay import frames, recorder
from hal_conformance.replay.player import replay
from hal_conformance.replay.recorder import CallRecorder
from hal_core import (
    DONE,
    Companion,
    FinishReason,
    Group,
    InvalidValue,
    Request,
    SamplingParams,
    StateConfig,
    StateField,
    Step,
    Task,
    TaskKind,
    Writes,
    bind,
    hookimpl,
)
from hal_core.devices.cpu.device import CpuDevice
from hal_core.slots.tasks import ENTERING

from hal.cli import main

SIZES = StateConfig(num_slots=4, max_model_len=64, max_logprobs=2, max_draft_tokens=2, vocab_size=100)


class SmallWorker:
    """A worker on cpu whose tokens come from the host (``write``) or from a kernel (``kernel``)."""

    def __init__(self, bound, sizes=SIZES, **options):
        self.bound, self.stream = bound, bound.default_stream
        self.state = bound.state(sizes, **options)
        self.speculative, self.steps = sizes.max_draft_tokens > 0, 0

    def enter(self, slots, extra=None):
        requests = [
            Request(f"r{slot}", [5, 6, 7 + slot], SamplingParams(max_tokens=30), extra=extra or {}) for slot in slots
        ]
        self.requests = [self.state.admit(request) for request in requests]
        pairs = zip(slots, self.requests, strict=True)
        tasks = [Task(TaskKind.PREFILL, at, one, num_scheduled_tokens=3, blocks=[at]) for at, one in pairs]
        self.bound.insert_tasks(state=self.state, tasks=tasks, stream=self.stream)

    def write(self, tokens):
        """Write one token a slot from the host."""
        column = np.full((self.state.sizes.num_slots, 1), -1)
        for slot, token in tokens.items():
            column[slot] = token
        if not self.speculative:
            self.set("sampled_token_ids", column)
            return
        self.set("accept_tokens", np.pad(column, ((0, 0), (0, self.state.sizes.max_draft_tokens)), constant_values=-1))
        self.set("accept_num", (column >= 0).astype(np.int32))

    def kernel(self, **fields):
        """Write whole fields as a model's kernel does: past the hooks."""
        for name, values in fields.items():
            place = self.state.layout.fields[name]
            data = np.zeros((self.state.sizes.num_slots, place.width), place.field.dtype.storage)
            data[: len(values), : np.shape(values)[1]] = values
            backdoor.write(
                self.bound.device, self.state.memory, place.offset, data.view(np.uint8).reshape(-1), self.stream
            )

    def set(self, name, value):
        self.bound.async_set_value(target=self.state.view(name), value=value, stream=self.stream)

    def step(self, slots, *, take=True, drafts=None, **options):
        step = Step(self.steps, {"target": slots}, speculative=self.speculative, **options)
        self.steps += 1
        self.bound.update_inputs(state=self.state, step=step, stream=self.stream)
        if drafts is not None:
            self.bound.set_drafts(state=self.state, step=step, drafts=drafts, stream=self.stream)
        sink = KeepingSink()
        ticket = self.bound.save_output(state=self.state, step=step, sink=sink, stream=self.stream)
        if take:
            record = self.state.take(ticket)
            sink.resolve_all()
            return record
        return sink


@pytest.fixture
def recorded(tmp_path):
    """Record a function's calls on an opened device; return the file."""
    numbers = iter(range(100))

    def record(work):
        path = tmp_path / f"{next(numbers)}.rec"
        with bind(CpuDevice(0, {})) as bound, closing(CallRecorder(path, bound)):
            work(bound)
        return path

    return record


def given_of(path, name):
    """Return the values of all frames of a name."""
    return [one.given for one in frames.Recording(path).frames() if one.name == name]


@pytest.fixture(scope="module")
def cpu():
    return subject("cpu")


def from_host(bound, tokens=9):
    worker = SmallWorker(bound)
    worker.enter([0, 2])
    worker.write({0: tokens, 2: 11})
    worker.step([0, 2], drafts={2: [1, 2]})
    worker.write({0: 8, 2: 1})
    worker.step([0, 2])


def kernels_tokens(bound):
    worker = SmallWorker(bound)
    worker.enter([0, 1, 3])
    tokens = [[9, 8, 7], [6, 5, 4], [0, 0, 0], [3, 2, 1]]
    ids, ranks = np.arange(36).reshape(4, 3, 3), np.arange(12).reshape(4, 3)
    ids[..., 0], ids = tokens, ids.reshape(4, 9)
    worker.kernel(
        accept_tokens=tokens,
        accept_num=[[3], [1], [0], [2]],
        topk_token_ids=ids,
        topk_logprobs=-ids / 8,
        topk_ranks=ranks,
    )
    first = worker.step([3, 0, 1], logprobs=2)
    assert first.tokens.tolist() == [3, 2, 9, 8, 7, 6]


def late_errors(bound):
    worker = SmallWorker(bound)
    worker.enter([0, 1])
    worker.kernel(stop_flags=[[True], [False], [True], [True]], accept_tokens=[[0], [7]], accept_num=[[0], [1]])
    record = worker.step([0, 1], late_errors=lambda: {0: "no token could be sampled"})
    assert record.finish.tolist() == [FinishReason.ERROR, FinishReason.NONE]


def outside_the_vocabulary(bound, *, host=True):
    worker = SmallWorker(bound, StateConfig(num_slots=4, max_model_len=64, vocab_size=100))
    worker.enter([0, 1])
    for tokens in ([100, 7], [3, 8]):
        if host:
            worker.write(dict(enumerate(tokens)))
        else:
            worker.kernel(sampled_token_ids=np.array([tokens]).T)
        record = worker.step([0, 1])
    assert record.counts.tolist() == [0, 1], "later tokens of the request are not reported"


def departures(bound):
    worker = SmallWorker(bound)
    worker.enter([0, 1, 2])
    worker.write({0: 9, 1: 8, 2: 7})
    worker.step([0, 1, 2])
    worker.state.release([1])
    task = Task(TaskKind.PREEMPTED, 0, worker.requests[0])
    bound.insert_tasks(state=worker.state, tasks=[task], stream=worker.stream)
    worker.write({2: 6})
    assert worker.step([0, 1, 2]).request_ids == ("r0", "r2")


def end_before_a_step(bound):
    worker = SmallWorker(bound)
    worker.enter([0, 1])
    worker.state.release([0])
    worker.enter([0])
    worker.write({0: 9, 1: 8})
    worker.step([0, 1])


def declared_fields_and_companions(bound):
    fields = [StateField("lora", "bfloat16", value="extra"), StateField("row", "int32", 3, value="extra")]
    own = [Companion("proposer", [StateField("depth", "int64", value=lambda request: len(request.prompt))])]
    worker = SmallWorker(bound, fields=fields, companions=own)
    worker.enter([0, 1], {"lora": 1.5, "row": [1, 2, 3]})
    worker.write({0: 9, 1: 8})
    worker.set("lora", [0.5, 1.5, 2.5, 3.5])
    worker.step([0, 1])


def every_view(bound):
    worker = SmallWorker(bound)
    worker.enter([0, 1, 2])
    for view, value in (
        (worker.state.view("seed")[::-2], [[3], [4]]),
        (worker.state.view("token_ids")[1, 4:20:3], 77),
        (worker.state.view("stop_flags")[3], True),
        (worker.state.view("top_p")[1:3, 0], [0.25, 0.5]),
    ):
        bound.async_set_value(target=view, value=value, stream=worker.stream)


WORK = {
    from_host: (10, 2, []),
    kernels_tokens: (3, 1, []),
    late_errors: (3, 1, []),
    outside_the_vocabulary: (7, 2, []),
    partial(outside_the_vocabulary, host=False): (5, 2, []),
    departures: (10, 2, [[1], [0]]),
    end_before_a_step: (6, 1, [[0]]),
    declared_fields_and_companions: (6, 1, []),
    every_view: (5, 0, []),
}
"""What a worker does: how many calls and steps are recorded, and the slots of each release."""


@pytest.mark.parametrize("work", WORK)
def test_calls_records_and_state_are_replayed(recorded, cpu, work):
    path, (calls, steps, released) = recorded(work), WORK[work]
    differs, text = replay(cpu, path)
    assert (differs, text.split(":")[0]) == (False, f"{calls} calls, {steps} records of {steps} steps")
    assert [slots for (slots,) in given_of(path, "release")] == released


def test_a_run_without_a_call_keeps_an_earlier_recording(recorded):
    path = recorded(from_host)
    before = path.read_bytes()
    with bind(CpuDevice(0, {})) as bound, closing(CallRecorder(path, bound)):
        assert path.read_bytes() == before, "until the first call"
    assert path.read_bytes() == before


def test_two_runs_at_once_do_not_write_one_file(recorded, tmp_path):
    with (
        bind(CpuDevice(0, {})) as second,
        bind(CpuDevice(0, {})) as bound,
        closing(CallRecorder(tmp_path / "x", bound)),
    ):
        with pytest.raises(InvalidValue, match="x is being written by another run"):
            CallRecorder(tmp_path / "x", second)
        with closing(CallRecorder("/dev/null", bound)), closing(CallRecorder("/dev/null", second)):
            from_host(bound)
    assert len(given_of(tmp_path / "x", "record")) == 2


def test_records_that_the_worker_never_takes_are_written(recorded, cpu):
    def work(bound):
        worker = SmallWorker(bound, StateConfig(num_slots=1, max_model_len=256))
        request = worker.state.admit(Request("r", [5, 6], SamplingParams(max_tokens=200)))
        task = Task(TaskKind.PREFILL, 0, request, num_scheduled_tokens=2, blocks=[0])
        bound.insert_tasks(state=worker.state, tasks=[task], stream=worker.stream)
        for token in range(recorder.MOST_PENDING + 3):
            worker.write({0: token})
            worker.step([0], take=False)

    path, at = recorded(work), recorder.MOST_PENDING
    names = [one.name for one in frames.Recording(path).frames() if one.name in ("record", "save_output")]
    assert names[: at + 2] == [*["save_output"] * (at + 1), "record"]
    assert names.count("record") == at + 3
    assert not replay(cpu, path)[0]


def test_records_taken_late_are_taken_as_late(recorded):
    def work(bound):
        worker = SmallWorker(bound)
        worker.enter([0])
        left = []
        for token in (9, 8, 7):
            worker.write({0: token})
            left.append(worker.step([0], take=False))
        worker.state.take(left[1].pending[0])
        worker.write({0: 6})
        left.append(worker.step([0], take=False))
        for sink in left:
            sink.resolve_all()

    names = ("record", "save_output")
    read = [(one.name, *one.given[:2]) for one in frames.Recording(recorded(work)).frames() if one.name in names]
    assert [one if one[0] == "record" else one[0] for one in read] == [
        *["save_output"] * 3,
        ("record", 0, False),
        ("record", 1, True),
        "save_output",
        ("record", 2, False),
        ("record", 3, False),
    ]


def test_device_values_and_groups_are_recorded_and_left_out(recorded, cpu):
    def work(bound):
        worker = SmallWorker(bound)
        worker.enter([0])
        worker.write({0: 9})
        source = worker.state.view("temperature")[1]
        target = worker.state.view("temperature")[0]
        bound.async_set_value(target=target, value=source, stream=worker.stream)
        worker.step([0], group=Group((0, 1), 0))

    path = recorded(work)
    (value,) = [given for given in given_of(path, "async_set_value") if given[-1] is None]
    ((step,),) = given_of(path, "save_output")
    assert (value[3], step[3]) == ("float32", Group((0, 1), 0))
    assert "; 1 with values of the device or of other ranks were left out" in replay(cpu, path)[1]


def test_a_recorder_adds_no_work_to_the_device(tmp_path):
    def counted(record):
        with bind(CpuDevice(0, {})) as bound:
            if record:
                with closing(CallRecorder(tmp_path / "x.rec", bound)):
                    from_host(bound)
            else:
                from_host(bound)
            return bound.counters()

    assert counted(record=True) == counted(record=False)


def test_a_step_of_128_slots_takes_at_most_5000_bytes(tmp_path):
    sizes = StateConfig(num_slots=128, max_model_len=256, max_draft_tokens=4)
    path, rng = tmp_path / "x.rec", np.random.default_rng(0)
    with bind(CpuDevice(0, {})) as bound:
        recorder = CallRecorder(path, bound)
        worker = SmallWorker(bound, sizes)
        worker.enter(range(128))
        worker.write(dict(enumerate(rng.integers(0, 99_999, 128).tolist())))
        worker.step(range(128))
        for _ in range(16):
            counts = rng.integers(1, 6, (128, 1), np.int32)
            worker.set("accept_tokens", np.where(np.arange(5) < counts, rng.integers(0, 99_999, (128, 5)), -1))
            worker.set("accept_num", counts)
            worker.step(range(128))
        recorder.close()
    entered = len(zlib.compress(b"".join(msg for msg in _raw(path)[:129]), 1))  # the admitted requests
    assert (path.stat().st_size - entered) / 17 <= 5000


def _raw(path):
    """Return the encoded frames of a whole file."""
    rest, found = gzip.decompress(path.read_bytes().partition(b"\n")[2]), []
    while rest:
        size = 4 + int.from_bytes(rest[:4], "little")
        found.append(rest[4:size])
        rest = rest[size:]
    return found


def test_a_companions_own_step_is_named(tmp_path):
    with bind(CpuDevice(0, {})) as bound:
        recorder = CallRecorder(tmp_path / "x.rec", bound)
        worker = SmallWorker(bound, companions=["proposer"])
        worker.enter([0, 1])
        (companion,) = worker.state.companions
        bound.update_inputs(state=companion, step=Step(0, {"proposer": [0, 1]}), stream=bound.default_stream)
        with pytest.raises(InvalidValue, match=r"a companion's own call is not recorded \(call its target\)"):
            recorder.close()


def test_a_write_of_its_own_memory_is_named(tmp_path):
    path = tmp_path / "x.rec"
    with bind(CpuDevice(0, {})) as bound:
        recorder = CallRecorder(path, bound)
        state = bound.state(SIZES)
        writes = Writes()
        writes.fill(state.view("seed"), [0], 3)
        bound.write(writes=writes, stream=bound.default_stream)
        with pytest.raises(InvalidValue, match=r"a write to a state is not recorded \(use async_set_value\)"):
            recorder.close()
    assert path.read_bytes() == b"", "no call was recorded before it"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"def main(", "magic is b'def main(': not a recording (give a file of hal run --record FILE)"),
        (lambda data: data.replace(b"g 4 ", b"g 5 ", 1), "version is 5, but this kit reads 4 (install the kit"),
        (lambda data: b"hal recording 3\n" + data, "version is 3, but this kit reads 4 (install the kit"),
        (lambda data: data[:-60], "end is missing: the file is truncated after call"),
        (lambda data: data[:-1], "end is missing: the file is truncated after call 10 (record again"),
        (lambda data: data[: data.index(b"\n") + 1], "end is missing: the file is truncated after call 0 (record"),
        (lambda data: data + b"more", "stream is damaged after call 10: Not a gzipped file (b'mo')"),
        (lambda data: data[:-5] + bytes([data[-5] ^ 255]) + data[-4:], "is damaged after call 10: CRC check failed"),
        (lambda data: data[:90] + bytes([data[90] ^ 255]) + data[91:], "is damaged"),
        (lambda data: _with(data, STATE, INSERT + b"\x99\x63" + bytes(8)), "not valid: Invalid enum value 99"),
        (lambda data: _with(data, STATE, INSERT + b"\x98\1" + bytes(7)), "frame after call 0 is not valid: "),
        (lambda data: _with(data, b"\x92\xa7release"), "frame after call 0 is not valid: "),
        (lambda data: _with(data, b"\x93\xa3end\0\x90"), "frame after call 0 is not valid: 'end'"),
        (lambda data: _with(data, b"\x93\xa3\xe9nd\0\x90"), "frame after call 0 is not valid: "),
        (lambda data: _with(data, STATE, b"\x93\xabsave_output\x00\x91\xc0"), "not valid: Expected `array`"),
        (lambda data: _with(data, STATE.replace(b"\4", b"\0")), "not valid: sizes: num_slots = 0"),
    ],
)
def test_what_cannot_be_replayed_is_refused_by_field(recorded, cpu, tmp_path, damage, message):
    path = tmp_path / "bad.rec"
    path.write_bytes(damage(recorded(from_host).read_bytes()))
    with pytest.raises(InvalidValue) as raised:
        replay(cpu, path)
    assert str(raised.value).startswith(f"--replay: {path}: ")
    assert message in str(raised.value)
    assert raised.value.cure


STATE = b"\x93\xa5state\0\x94\xa6target\x82\xa9num_slots\x04\xadmax_model_len\x40\x90\x90"
INSERT = b"\x93\xacinsert_tasks\0\x91\x91"


def _with(data, *made):
    """A recording with only these frames."""
    return data[: data.index(b"\n") + 1] + gzip.compress(b"".join(len(one).to_bytes(4, "little") + one for one in made))


def test_every_argument_of_a_task_is_recorded(recorded):
    def work(bound):
        worker = SmallWorker(bound)
        given = [Request(name, [5, 6], SamplingParams(max_tokens=9)) for name in "pq"]
        first, second = [worker.state.admit(request) for request in given]
        call = {"state": worker.state, "stream": worker.stream}
        bound.insert_tasks(tasks=[Task(TaskKind.PREFILL, 3, first, 1, 1, [7, 8, 9], 0)], **call)
        handed = Task(TaskKind.REMOTE_PREFILL, 1, second, 2, 0, [5], 0, 12, [3, 4])
        bound.insert_tasks(tasks=[Task(TaskKind.MORE_BLOCKS, 3, first, 0, 0, [4], 3), handed], **call)

    assert [tasks for (tasks,) in given_of(recorded(work), "insert_tasks")] == [
        [(TaskKind.PREFILL, 3, 0, 1, 1, [7, 8, 9], 0, -1, [])],
        [(TaskKind.MORE_BLOCKS, 3, 0, 0, 0, [4], 3, -1, []), (TaskKind.REMOTE_PREFILL, 1, 1, 2, 0, [5], 0, 12, [3, 4])],
    ]


@pytest.mark.parametrize("size", [0, 1, 70_000, 200_000])
def test_frames_are_complete_whenever_they_are_written(tmp_path, monkeypatch, size):
    """Each frame alone, or all at the end."""
    data = np.random.default_rng(size).bytes(size)
    for period in (0, 1e6):
        monkeypatch.setattr(frames, "PERIOD", period)
        path = tmp_path / f"{period}.rec"
        writer = frames.Writer(path, "cpu:0 with hal 1.1.0")
        for number in range(3):
            before = path.stat().st_size
            writer.put(frames.Frame, "record", 0, (number, True, data))
            while period == 0 and path.stat().st_size == before:
                assert writer._thread.is_alive()
        writer.close()
        assert given_of(path, "record") == [(number, True, data) for number in range(3)]


def test_a_record_is_encoded_by_the_writing_thread(recorded, monkeypatch):
    encoded, threads = recorder.encode_body, []
    monkeypatch.setattr(recorder, "encode_body", lambda record: threads.append(get_ident()) or encoded(record))
    recorded(from_host)
    assert len(threads) == 2
    assert get_ident() not in threads


def test_the_error_of_a_frame_is_raised_by_close(tmp_path, monkeypatch):
    def fail(record):
        raise ValueError(f"step {record.step} cannot be encoded")

    monkeypatch.setattr(recorder, "encode_body", fail)
    path = tmp_path / "x.rec"
    with bind(CpuDevice(0, {})) as bound:
        kept = CallRecorder(path, bound)
        from_host(bound)
        with pytest.raises(ValueError, match="step 0 cannot be encoded"):
            kept.close()
    with pytest.raises(InvalidValue, match="end is missing"):
        [*frames.Recording(path).frames()]


def test_the_file_of_a_killed_process_has_its_calls(tmp_path, cpu):
    path = tmp_path / "x.rec"
    opened = "import sys, test_recordings as t; b = t.bind(t.CpuDevice(0, {})); r = t.CallRecorder(sys.argv[1], b)"
    worker = [sys.executable, "-c", f"{opened}; t.from_host(b); sys.stdin.read()", path]
    with subprocess.Popen(worker, stdin=subprocess.PIPE, cwd=Path(__file__).parent) as process:
        while _calls(path) != 10:
            assert process.poll() is None
        process.kill()
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(InvalidValue, match="end is missing: the file is truncated after call 10"):
        replay(cpu, path)


def _calls(path):
    """Return how many calls of an unfinished file can be read."""
    try:
        return len([*frames.Recording(path).frames()])
    except InvalidValue as wrong:
        return int((re.search(r"after call (\d+)", str(wrong)) or [0, 0])[1])


def test_the_device_that_recorded_a_wrong_record_is_named(cpu, tmp_path):
    class ReversedOutput(CpuDevice):
        """Gives the engine one token in place of another."""

        def copy_out(self, memory, parts, stream):
            copied = super().copy_out(memory, parts, stream)
            for data in copied.data:
                numbers = data[: data.nbytes // 8 * 8].view(np.int64)
                numbers[numbers == 9] = 33
            return copied

    path = tmp_path / "x.rec"
    with bind(ReversedOutput(0, {})) as bound, closing(CallRecorder(path, bound)):
        from_host(bound)
    differs, summary = replay(cpu, path)
    assert differs
    assert summary.startswith("call 6, save_output of step 0, as recorded: row 0 is")
    assert "the device that recorded it (cpu:0 with hal" in summary


def test_a_full_disk_is_raised_by_name_when_it_is_met(tmp_path, monkeypatch):
    def full(writer, _, flush):
        with Path("/dev/full").open("ab") as file:
            write(writer, file, flush)

    write, path = frames.Writer._write, tmp_path / "x.rec"
    with bind(CpuDevice(0, {})) as bound:
        device = CallRecorder("/dev/full", bound)
        SmallWorker(bound).enter([1])
        with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
            device.close()
        kept = CallRecorder(path, bound)
        monkeypatch.setattr(frames.Writer, "_write", full)
        from_host(bound)
        with pytest.raises(OSError, match=rf"No space left on device: '{path}'"):
            kept.close()


def test_a_recording_is_written_over_and_another_file_is_kept(recorded, tmp_path):
    path = recorded(from_host)
    other = tmp_path / "prompts.txt"
    other.write_text("def main(\n")
    with bind(CpuDevice(0, {})) as bound:
        with pytest.raises(InvalidValue, match=r"prompts\.txt exists, and is no recording \(give another name"):
            CallRecorder(other, bound)
        with closing(CallRecorder(path, bound)):
            SmallWorker(bound).enter([1])
    assert other.read_text() == "def main(\n"
    assert [frame.name for frame in frames.Recording(path).frames()] == ["state", "request", "insert_tasks"]


def test_what_is_no_regular_file_is_refused(cpu, tmp_path):
    for path, message in ((tmp_path, "file is no file"), (tmp_path / "x", "file does not exist")):
        with pytest.raises(InvalidValue, match=message):
            replay(cpu, path)


# -- hal run --record, and what the kit's tests do not kill ----------------------------------------------------------


class StepZeroIsWarmUp(Lie):
    """Takes step 0 for a warm-up and does not advance the state; the kit's own steps count from 1."""

    def update_inputs(self, state, step, stream):
        return super().update_inputs(state, step, stream) if step.number else DONE


class RowsByRequestId(Lie):
    """Keeps a state's tokens in a table by request id: a resumed request misses the tokens generated since."""

    known = np.zeros((64, 2), np.int64)

    def register_state(self, state):
        self.known[...] = 0
        super().register_state(state)

    @hookimpl
    def insert_tasks(self, device, state, tasks, stream):
        ticket = super().insert_tasks(device, state, tasks, stream)
        for kind, slot, request in zip(tasks.plain["kinds"], tasks.plain["slots"], tasks.requests, strict=True):
            if kind in ENTERING:
                key = zlib.crc32(f"{state.name} {request.request_id}".encode())
                held, before = self.known[key % 64].tolist()
                if held != key:
                    self.known[key % 64] = key, request.total
                elif before < request.total:
                    late = state.view("token_ids")[slot, before : request.total]
                    self.async_set_value(device, late, late.dtype.storage.type(-1), stream)
        return ticket


ROOT = Path(__file__).parents[1]
PROMPTS = ("def main(", "class Stack:", "for i in range(", "import os")
RUNS = {
    "plain": ("--slots", "3", "--max-tokens", "24"),
    "drafts": ("--slots", "3", "--max-tokens", "24", "--temperature", "0", "--speculate", "ngram"),
    "preemptions": ("--slots", "4", "--blocks", "6", "--max-tokens", "60", "--chunk", "4", "--logprobs", "2", "--json"),
}
LAST = {"drafts": "set_drafts", "preemptions": "preempted"}


def run(path, *arguments, device="cpu"):
    """Run the command here with a recording; its exit status."""
    prompts = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    shown = "--json" if "--json" in arguments else "-q"
    with pytest.raises(SystemExit) as end:
        main(["run", shown, "--device", device, *prompts, *arguments, "--record", str(path)])
    return end.value.code or 0


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """A recording of each kind."""
    folder = tmp_path_factory.mktemp("recordings")
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_RUNTIME_DIR", str(folder))
    for name, arguments in RUNS.items():
        assert run(folder / name, *arguments) == 0
    patch.undo()
    return folder


@pytest.fixture
def device(request, monkeypatch):
    """The subject of a name; the cuda device runs over its tests' stand-in driver, natively or not."""
    name, _, path = request.param.partition(" ")
    if name in ("cuda", "sim"):
        request.getfixturevalue("simulator")
    if name == "cuda":
        monkeypatch.syspath_prepend(str(ROOT / "plugins/cuda/tests"))
        monkeypatch.setenv("HAL_CUDA_NATIVE", str(int(path == "native")))
        return subject(factory="kit_native:opened")
    if name == "opencl":
        probe = pytest.importorskip("hal_opencl").OpenCLPlugin.probe()
        if not probe.available:
            pytest.skip(f"{probe.reason} ({probe.cure})")
    return subject(name)


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("device", ["cpu", "sim", "opencl", "cuda native", "cuda python"], indirect=True)
def test_a_recording_of_the_model_is_replayed_on(device, recordings, kind):
    differs, summary = replay(device, recordings / kind)
    assert not differs, summary
    assert "0 records" not in summary


@pytest.mark.parametrize("kind", LAST)
def test_the_recordings_have_what_they_are_named_for(recordings, kind):
    names = set()
    for frame in frames.Recording(recordings / kind).frames():
        names.add(frame.name)
        if frame.name == "insert_tasks":
            names |= {row[0].name.lower() for row in frame.given[0]}
    assert LAST[kind] in names


@pytest.mark.parametrize(
    ("liar", "kind", "message"),
    [
        (StepZeroIsWarmUp, "plain", ", update_inputs of step 0: accept_num[0, 0] is "),
        (RowsByRequestId, "preemptions", ", insert_tasks (prefill -> slot "),
    ],
)
def test_liars_that_quick_does_not_kill_die_by_replay(recordings, cpu, liar, kind, message):
    RowsByRequestId.known[...] = 0
    lying = replace(cpu, open=lambda: lay_over(CpuDevice(0, {}), liar))
    differs, text = replay(lying, recordings / kind)
    assert differs
    assert re.match(rf"after call [1-9]\d*{re.escape(message)}", text)


def test_a_run_ahead_of_its_device_is_replayed(simulator, tmp_path, monkeypatch):
    """Tokens are made on the device, and records are taken one step late."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    mixed = ("--runner", "hal_sim.mixing:MixRunner", "--temperature", "0", "--overlap", "on")
    for name, more in (("plain", ()), ("drafts", ("--drafts", "3"))):
        assert run(tmp_path / name, *mixed, "--slots", "2", "--max-tokens", "12", *more, device="sim") == 0
        differs, summary = replay(subject("sim"), tmp_path / name)
        assert not differs, summary


def test_equal_runs_make_equal_calls(recordings, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    again, other = tmp_path / "again", tmp_path / "other"
    assert run(again, *RUNS["plain"]) == run(other, *RUNS["plain"], "--seed", "1") == 0
    first, equal, unequal = [[*frames.Recording(path).frames()] for path in (recordings / "plain", again, other)]
    assert first == equal
    assert first != unequal


def test_the_command_replays(recordings, command):
    done = command("conform", "cpu", "--replay", recordings / "plain")
    assert (done.status, done.out[:5]) == (0, "cpu: ")
    done = command("conform", "cpu", "--replay", recordings / "plain", "--liar", "NoRowReset")
    assert done.status == 1
    assert done.out.startswith("NoRowReset: after call ")


def test_a_full_disk_is_one_line(command, private_folders):
    done = command("run", "--device", "cpu", "--max-tokens", "2", "--prompt", "x", "-q", "--record", "/dev/full")
    assert done.status == 2
    assert done.err.startswith("hal: error: --record: No space left on device")


def test_a_sink_that_nobody_reads_is_named_as_typed(command, monkeypatch):
    """Another program listens there."""
    monkeypatch.setenv("HAL_SECONDS_SINK_CLOSE", "0.1")
    with socket.create_server(("127.0.0.1", 0)) as other:
        url = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        done = command("run", "x", "--device", "cpu", "--max-tokens", "2", "-q", "--sink", url)
    assert done.status == 2
    assert done.err.startswith("hal: error: --sink: not acknowledged by a reader: r0 at 0 ")
    assert f"no reader answers on {url}" in done.err


def test_without_the_kit_record_says_how_to_install_it(command, monkeypatch):
    find = importlib.util.find_spec
    assert find("hal_conformance") is not None
    monkeypatch.setitem(sys.modules, "hal_conformance", None)
    monkeypatch.setitem(sys.modules, "hal_conformance.replay.recorder", None)
    done = command("run", "--device", "cpu", "--max-tokens", "2", "--prompt", "x", "--record", "x")
    assert done.status == 2
    assert "pip install ./conformance in hal's checkout" in done.err
