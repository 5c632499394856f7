"""Recordings of a small worker's calls, and their replay."""

from contextlib import closing
from functools import partial

import numpy as np
import pytest
from hal_conformance.replay import frames, recorder
from hal_conformance.replay.player import replay
from hal_conformance.replay.recorder import CallRecorder
from hal_core import Group, InvalidValue, Request, SamplingParams, StateConfig, Step, Task, TaskKind, Writes, bind
from hal_core.devices.cpu.device import CpuDevice

from .small_worker import (
    SIZES,
    SmallWorker,
    declared_fields_and_companions,
    departures,
    end_before_a_step,
    every_view,
    from_host,
    given_of,
    kernels_tokens,
    late_errors,
    outside_the_vocabulary,
)

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
