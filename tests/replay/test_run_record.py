"""``hal run --record``, and its replay on devices and on liars that the kit's tests do not kill."""

import importlib.util
import re
import socket
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hal_conformance.harness.lies import Lie, lay_over
from hal_conformance.opening import subject
from hal_conformance.replay import frames
from hal_conformance.replay.player import replay
from hal_core import DONE, hookimpl
from hal_core.devices.cpu.device import CpuDevice
from hal_core.slots.tasks import ENTERING

from hal.cli import main


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


ROOT = Path(__file__).parents[2]
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
