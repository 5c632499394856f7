"""The opencl device: costs of calls, no waits of the host, refusals, and faults found late."""

import subprocess
import sys

import pytest

pytest.importorskip("hal_opencl", reason="paddle-hal-opencl is missing: pip install './plugins/opencl[pocl]'")

from hal_core import (
    CapabilityMissing,
    DeviceClosed,
    Group,
    OutOfMemory,
    Request,
    SamplingParams,
    StateConfig,
    Task,
    TaskKind,
)
from hal_opencl import cl
from hal_opencl.primitives import SHIFT, OpenCLPrimitives

import hal

PATIENCE = 60.0


def insertion(device, state, count):
    params = SamplingParams(
        temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=7, repetition_penalty=1.1, frequency_penalty=0.2,
        presence_penalty=0.3, min_tokens=1, max_tokens=9, stop_sequences=((1, 2), (3,)), bad_words=(4, 5),
        eos_token_ids=(6,), logprobs=1,
    )  # fmt: skip
    tasks = []
    for slot in range(count):
        request = state.admit(Request(f"r{count}-{slot}", [5, 6, 7 + slot], params))
        tasks.append(Task(TaskKind.PREFILL, slot, request, num_scheduled_tokens=3, blocks=[slot]))
    return device.insert_tasks(state=state, tasks=tasks, stream=device.default_stream)


# -- cost -------------------------------------------------------------------------------------------------------------


def test_the_kernels_are_compiled_once_for_all_devices(opened, monkeypatch):
    built, call = [], cl.call
    monkeypatch.setattr(cl, "call", lambda name, *given: (built.append(name), call(name, *given))[1])
    with hal.open_device("opencl") as other:
        state = other.state(StateConfig(num_slots=2, max_model_len=8))
        insertion(other, state, 2).wait(PATIENCE)
    assert "clEnqueueNDRangeKernel" in built
    assert "clBuildProgram" not in built


def test_each_event_of_the_driver_is_given_back(runtime, monkeypatch):
    made, call = [0, 0], cl.call

    def counting(name, *given):
        made[0] += name == "clEnqueueMarkerWithWaitList"
        made[1] += name == "clReleaseEvent"
        return call(name, *given)

    monkeypatch.setattr(cl, "call", counting)
    with hal.open_device("opencl") as device:
        state = device.state(StateConfig(num_slots=2, max_model_len=8))
        for value in range(1000):
            device.async_set_value(target=state.view("seed"), value=value, stream=device.default_stream).wait(PATIENCE)
        assert made[0] - made[1] <= device.device.events.made < 300
        del state
    assert made[0] == made[1]


# -- asynchrony -------------------------------------------------------------------------------------------------------


def test_host_memory_is_mapped_and_given_back_while_a_stream_is_held(opened):
    primitives, stream = opened.device.primitives, opened.default_stream
    with opened.device.hold_stream(stream):
        stream.record()
        address = primitives.allocate_host(5000)
        _, mapped, end = primitives._host[address]
        assert address % 256 == 0
        assert mapped <= address < mapped + 256
        assert end >= address + 5000
        assert primitives.is_mapped(address + 4999)
        primitives.free_host(address)
        assert address not in primitives._host


# -- refused ----------------------------------------------------------------------------------------------------------


def test_dlpack_and_groups_of_several_ranks_are_refused_by_name(opened):
    state = opened.state(StateConfig(num_slots=2, max_model_len=8))
    with pytest.raises(BufferError, match="opencl:0 has no memory that DLPack can describe"):
        state.view("seed").__dlpack_device__()
    with pytest.raises(CapabilityMissing, match="opencl:0: broadcast_tokens: group: has no collectives"):
        opened.device.communicator(Group((0, 1), 0))


def test_g26_more_memory_than_the_device_has_is_out_of_memory(opened):
    with pytest.raises(OutOfMemory, match=r"opencl:0: .*clCreateBuffer gave the OpenCL status"):
        opened.device.allocate(1 << 50)
    opened.device.allocate(64)


def test_an_address_is_a_buffer_and_a_byte_of_it(opened):
    one, two = (opened.device.allocate(nbytes) for nbytes in (0, 1 << 20))
    assert one.address >> SHIFT != two.address >> SHIFT
    assert one.address % (1 << SHIFT) == two.address % (1 << SHIFT) == 0


# -- faults that the driver finds late --------------------------------------------------------------------------------


class Faulty(OpenCLPrimitives):
    """A layer under which work on the queue ``fails`` ends with ``code``: PoCL ends the process for a real one."""

    fails, code = 0, 0

    def __init__(self, device):
        super().__init__(device)
        self.bad = set()

    def event_record(self, event, stream):
        super().event_record(event, stream)
        if stream.handle == self.fails:
            self.bad.add(event.handle)

    def event_error(self, event):
        return cl.CLError("work on a queue", self.code) if event.handle in self.bad else super().event_error(event)


@pytest.mark.parametrize("code", [-5, -14])
def test_g26_work_that_fails_late_ends_the_device_and_no_other(opened, monkeypatch, code):
    monkeypatch.setattr("hal_opencl.device.OpenCLPrimitives", Faulty)
    with hal.open_device("opencl") as device:
        state, stream = device.state(StateConfig(num_slots=2, max_model_len=8)), device.default_stream
        primitives = device.device.primitives
        primitives.code, primitives.fails = code, device.device.own_stream(stream).raw.handle
        ticket = device.async_set_value(target=state.view("seed"), value=1, stream=stream)
        with pytest.raises(cl.CLError, match=f"opencl:0: work on a queue gave the OpenCL status {code}"):
            ticket.wait(PATIENCE)
        with pytest.raises(DeviceClosed, match="earlier work failed on the device: work on a queue gave"):
            device.async_set_value(target=state.view("seed"), value=2, stream=stream)
        insertion(opened, opened.state(StateConfig(num_slots=2, max_model_len=8)), 2).wait(PATIENCE)


COLLECTED = """
import gc
import hal
from hal_core import ByteRange, StateConfig

for number in range(40):
    device = hal.open_device("opencl")
    state = device.state(StateConfig(num_slots=4, max_model_len=64))
    stream = device.default_stream
    copied = [device.copy_out(memory=state.memory, parts=[ByteRange(0, 4096)], stream=stream) for _ in range(8)]
    for one in copied:
        one.wait()
    ring = {"device": device, "tickets": copied}
    ring["ring"] = ring  # only the collector finds it
    device.close()
    del device, state, stream, copied, one, ring
    gc.collect()
print("collected")
"""


def test_copies_collected_together_with_their_device_crash_nothing(runtime):
    done = subprocess.run([sys.executable, "-c", COLLECTED], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "collected\n"), done.stderr
    assert "ignored" not in done.stderr
