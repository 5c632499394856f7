"""Devices over torch on its CPU: as it is, and with worker threads that play the streams. No chip was used."""

from __future__ import annotations

import os

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")

from hal_conformance.harness.isolated import KitProcess  # noqa: E402 (torch first: where it is missing, nothing runs)
from hal_core import (  # noqa: E402
    InvalidValue,
    OutOfMemory,
    Request,
    SamplingParams,
    SlotRuns,
    StateConfig,
    Task,
    TaskKind,
    Unavailable,
    View,
    Writes,
    admit,
)
from hal_core.devices import dtype_of  # noqa: E402
from hal_torch_device import TorchCuda, TorchPlugin  # noqa: E402
from hal_torch_device.device import TorchDevice  # noqa: E402

import hal  # noqa: E402
from tests.commands import LIBRARIES  # noqa: E402

pytestmark = pytest.mark.long(60)
HANGS = 900
"""Seconds after which a run of the kit counts as hung, on a busy machine."""
SOME = "G1,G2,G3,G4,G5,G6,G9,G28"
DEVICES = {"torch_cpu": ("torch_cpu", {}), "queue": ("torch_cuda", {"HAL_TORCH_CUDA_PLACE": "queue"})}
THREADS = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(params=DEVICES)
def opened(request, monkeypatch):
    name, variables = DEVICES[request.param]
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    with hal.open_device(name) as device:
        yield device


class NoEvent:
    """What vLLM puts in the place of torch.Event on a CPU."""

    def __init__(self, **_):
        self.record = self.synchronize = lambda *_: None


def test_a_class_of_pythons_in_the_place_of_torchs_event_is_no_event(monkeypatch):
    monkeypatch.setattr(torch, "Event", NoEvent)
    with hal.open_device("torch_cpu") as device:
        assert "support events" in device.device.runtime.why["events"]


@pytest.mark.whole_kit
@pytest.mark.parametrize("which", DEVICES)
@pytest.mark.parametrize(
    "options", [(f"--hal-only={SOME}", "--hal-examples=2"), pytest.param((), marks=pytest.mark.conform)]
)
def test_the_conformance_kit(which, options):
    name, variables = DEVICES[which]
    environment = os.environ | variables | THREADS
    with KitProcess(name, "--hal-profile=quick", "-k", "not g27", *options, environment=environment) as run:
        found = run.report(HANGS)
    tests = [test for entry in found["guarantees"] for test in entry["tests"]]
    assert {test["outcome"] for test in tests} <= {"passed", "skipped"}
    if which == "queue":
        assert found["header"]["capabilities"]["substituted"] == "queue"
        reasons = {test["reason"] for test in tests if test["outcome"] == "skipped"}
        assert not [reason for reason in reasons if "overlapped_update" in reason], "a step can be held"


def test_the_main_job_gives_the_tokens_of_the_cpu(warm):
    prompts = ["--prompt", "def main(", "--prompt", "for i in range(", "--max-tokens", "12", "--slots", "2"]
    answers = []
    for name, variables in (("cpu", {}), *DEVICES.values()):
        command = ("run", "--device", name, *prompts, "--seed", "7", "--temperature", "0.8")
        done = warm.run(*command, code="from hal.cli import main; main()", env=os.environ | variables | THREADS)
        assert done.returncode == 0, done.stderr[-2000:]
        answers.append(done.stdout.partition("tokens/s")[0].rpartition("\n")[0])
    assert answers[0]
    assert answers[1:] == [answers[0]] * 2


WARM = LIBRARIES


def batch(state, count):
    params = SamplingParams(temperature=0.5, top_k=3, seed=7, stop_sequences=((1, 2),), bad_words=(4,), logprobs=1)
    requests = [admit(Request(f"r{number}", [5, 6, 7], params), state.layout) for number in range(count)]
    return [
        Task(TaskKind.PREFILL, slot, request, num_scheduled_tokens=3, blocks=[9])
        for slot, request in enumerate(requests)
    ]


def test_an_insertion_is_one_upload_and_a_write_for_each_width(opened):
    state = opened.state(StateConfig(num_slots=128, max_model_len=64))
    tasks = batch(state, 128)
    before = opened.counters()
    opened.insert_tasks(state=state, tasks=tasks, stream=opened.default_stream).wait(60)
    cost = opened.counters() - before
    assert (cost.uploads, cost.host_waits) == (1, 0)
    assert cost.launches <= 3, "elements of 8, 4 and 1 bytes"


def test_many_tensors_of_one_call_are_one_upload(opened):
    tensors = [torch.zeros(8, 16, dtype=torch.int64) for _ in range(20)]
    writes, slots = Writes(), SlotRuns([1, 5])
    for number, tensor in enumerate(tensors):
        writes.fill(opened.device.resolve(tensor), slots, number, 2, 7)
    before = opened.counters()
    opened.write(writes=writes, stream=opened.default_stream).wait(60)
    cost = opened.counters() - before
    assert (cost.uploads, cost.host_waits) == (1, 0)
    for number, tensor in enumerate(tensors):
        should = np.zeros((8, 16), np.int64)
        should[[1, 5], 2:7] = number
        assert (tensor.numpy() == should).all()


def test_tensors_of_another_place_are_refused(opened):
    for target, what in ((torch.zeros(3, device="meta"), "the tensor is on meta"), ([1, 2], "list, but the target")):
        with pytest.raises(InvalidValue, match=what):
            opened.async_set_value(target=target, value=1, stream=opened.default_stream)


def test_a_state_is_seen_as_torchs_tensors(opened):
    state = opened.state(StateConfig(num_slots=4, max_model_len=8))
    seeds = state.tensor("seed")
    assert isinstance(seeds, torch.Tensor)
    opened.async_set_value(target=state.view("seed"), value=3, stream=opened.default_stream).wait(60)
    assert seeds.tolist() == [[3]] * 4


class NoBytes(TorchPlugin):
    """A backend whose scatters write other bytes than they should."""

    name = "no_bytes"
    kind = "cpu"
    cure = "install a torch that can"


def test_memory_is_found_after_a_tensor_over_it_was_a_target(opened):
    """On a GPU all memory begins where its storage does, on the CPU some of 64."""
    memories = [opened.device.allocate(1000) for _ in range(64)]
    views = [View.contiguous(memory, 0, (125,), dtype_of("int64")) for memory in memories]
    for number, view in enumerate(views):
        tensor = opened.device.tensor(view, "torch")
        opened.async_set_value(target=tensor, value=number, stream=opened.default_stream).wait(10)
        del tensor
    opened.device.allocate(16)
    for number, view in enumerate(views):
        assert opened.device.tensor(view)[7] == number


def test_host_memory_that_torch_cannot_lock_is_out_of_memory(opened, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("CUDA error: out of memory\nmore")

    monkeypatch.setattr(opened.device.runtime, "pinned", True)
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(OutOfMemory, match="CUDA error: out of memory"):
        opened.device.runtime.allocate_host(64)


def test_a_reversed_view_has_no_tensor(opened):
    view = View.contiguous(opened.device.allocate(64), 0, (8,), dtype_of("int64"))
    for framework in ("", "torch"):
        with pytest.raises(InvalidValue, match="torch has no reversed axes"):
            opened.device.tensor(view[::-1], framework)


def test_a_backend_that_writes_other_bytes_is_refused(monkeypatch):
    for operator in ("index_copy_", "index_put_", "scatter_"):
        monkeypatch.setattr(torch.Tensor, operator, lambda tensor, *_: tensor)
    with pytest.raises(Unavailable, match=r"writes no bytes by index on cpu: .*it wrote other bytes") as refused:
        TorchDevice(NoBytes, 0, {})
    assert refused.value.cure == NoBytes.cure


def test_a_chip_that_torch_does_not_find_is_refused(monkeypatch):
    monkeypatch.setattr("hal_torch_device.version", lambda _: "2.13.0+cu130")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(Unavailable, match="finds no cuda") as refused:
        TorchCuda.open(0, {})
    assert refused.value.cure == TorchCuda.cure
