"""The proof script and the broadcast bench, as far as they run without a GPU: their steps, limits, entry points."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hal_core.contract.support import Support
from hal_core.output.sinks import MemorySink
from hal_core.slots.admission import Request
from hal_core.slots.fields import StateConfig
from hal_core.slots.step import Step
from hal_core.slots.tasks import Task, TaskKind

ROOT = Path(__file__).parents[3]
SIZES = StateConfig(num_slots=4, max_model_len=64, block_size=4, max_draft_tokens=1, max_logprobs=2)
STOPS = """
import os, signal, subprocess, sys, time
print("begun", flush=True)
subprocess.Popen([sys.executable, "-c", "import os, signal; print(os.getpid(), flush=True); os.kill(os.getpid(), 19)"])
time.sleep(60)
"""


def loaded(name):
    spec = importlib.util.spec_from_file_location(f"hal_{name}", ROOT / "plugins" / "cuda" / "proof" / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def prove():
    return loaded("prove")


@pytest.fixture
def counted(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "plugins" / "cuda" / "proof")
    yield importlib.import_module("counted")
    del sys.modules["counted"]


def test_g10_what_is_counted_below_the_plugin_is_what_the_device_counts(fallback, counted):
    """A value, a batch and an output, each counted by the device and below it."""
    bound = fallback(make=lambda options, driver: counted.CountedCudaDevice(0, options, driver.api))
    assert isinstance(counted.opened.support(), Support)
    state, stream, sink = bound.state(SIZES), bound.default_stream, MemorySink()
    request = state.admit(Request("r", [1] * 9))
    before, below = bound.counters(), bound.device.probe_counts()
    bound.async_set_value(target=state.view("accept_num"), value=3, stream=stream).wait()
    task = Task(TaskKind.PREFILL, 0, request, 0, 9, [0, 1, 2])
    bound.insert_tasks(state=state, tasks=[task], stream=stream).wait()
    bound.save_output(state=state, step=Step(1, {"target": np.array([0], np.int32)}), sink=sink, stream=stream).wait()
    spent, seen = bound.counters() - before, bound.device.probe_counts() - below
    for name in ("submissions", "uploads", "launches", "copies_out"):
        assert getattr(seen, name) == getattr(spent, name) > 0, name


def test_without_a_gpu_only_what_needs_none_is_run(prove, monkeypatch, tmp_path):
    monkeypatch.setattr(prove, "gpus", list)
    runs = {step.name: step.missing for step in prove.steps(tmp_path)}
    assert [name for name, missing in runs.items() if not missing] == ["tests of the plugin"]
    assert runs["kit, ranks over NCCL"] == "no GPU"


def test_the_step_of_the_plugins_tests_finds_all_of_them(prove, tmp_path):
    (step,) = [step for step in prove.steps(tmp_path) if step.name == "tests of the plugin"]
    found = subprocess.run(
        [sys.executable, *step.arguments, "--collect-only"], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-1000:]


@pytest.mark.parametrize(("count", "why"), [(1, "one GPU"), (2, "")])
def test_ranks_need_two_gpus_and_the_models_any_build_of_paddle(prove, monkeypatch, tmp_path, count, why):
    monkeypatch.setattr(prove, "gpus", lambda: ["NVIDIA H200"] * count)
    monkeypatch.setattr(prove, "paddle_with_cuda", lambda: False)
    monkeypatch.setattr(prove, "find_spec", lambda name: name)
    steps = {step.name: step for step in prove.steps(tmp_path)}
    ranks = ("ranks, step by step", "recorded logits, ranks over NCCL", "broadcast bench", "kit, ranks over NCCL")
    shared = ("recorded logits, cpu", *(name for name in steps if "on one GPU" in name))
    assert len(shared) == 4
    assert {steps[name].missing for name in ranks} == {why}
    assert {steps[name].missing for name in shared} == {""}
    monkeypatch.setattr(prove, "find_spec", lambda name: None)
    for step in prove.steps(tmp_path):
        if step.name in (*ranks, *shared):
            no_model = step.name.startswith("recorded logits") and "no Paddle, whose model runs"
            assert step.missing == (no_model or ("" if step.name in shared else why)), step.name


def test_tokens_are_compared_with_those_of_the_first_job(prove):
    line = lambda tokens, device: json.dumps({"request_id": "r0", "token_ids": tokens, "device": device}) + "\n"  # noqa: E731
    jobs = {"main job, cpu": line([1, 2], "cpu"), "main job, cuda": line([1, 2], "cuda"), "kit": "", "main job, b": ""}
    assert {row["step"]: row["result"] for row in prove.same_tokens(jobs)} == {
        "tokens of cuda": "ok",
        "tokens of b": "FAILED",
    }


@pytest.mark.conform
def test_ranks_draw_recorded_tokens_and_end_without_a_broadcast(tmp_path):
    pytest.importorskip("paddle")
    script, file = ROOT / "plugins" / "cuda" / "proof" / "recorded_ranks.py", tmp_path / "recorded"
    for step in (["record", file], ["replay", file, "cpu"]):
        command = [sys.executable, script, *step]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": equal") == 4


def test_a_step_over_its_limit_is_ended_with_the_processes_it_has_stopped(prove, tmp_path):
    begin = time.monotonic()
    status, output = prove.run(prove.Step("stops", ["-c", STOPS], limit=2), tmp_path)
    assert time.monotonic() - begin < 30
    begun, stopped = output.split()
    assert (status, begun) == (124, "begun")
    end = time.monotonic() + 10
    while _runs(int(stopped)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _runs(int(stopped))


def test_a_step_for_which_no_time_is_left_is_not_begun_and_says_so(prove, tmp_path):
    steps = [prove.Step("quick", ["-c", "print('here')"]), prove.Step("none", ["-c", ""], missing="no GPU")]
    rows, outputs = prove.go(steps, tmp_path, 60.0)
    assert [row["result"] for row in rows] == ["ok", "not here"]
    assert outputs == {"quick": "here\n"}
    rows, outputs = prove.go(steps, tmp_path, 10.0)
    assert [(row["result"], row["detail"]) for row in rows] == [
        ("not here", "less than 20 s left"),
        ("not here", "no GPU"),
    ]
    assert outputs == {}


def _runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_entry_points_of_what_is_not_installed_are_those_of_its_project(prove, monkeypatch, tmp_path):
    assert prove.write_entry_points(tmp_path) == []  # as if all of it were installed
    monkeypatch.setattr(prove, "installed", lambda name: "-")
    written = prove.write_entry_points(tmp_path)
    assert {"paddle-hal-cuda", "paddle-hal-conformance"} < {*written}, "pytest finds the kit by its entry point"
    (ours,) = (one for one in metadata.distributions(path=[str(tmp_path)]) if one.name == "paddle-hal-cuda")
    installed = metadata.distribution("paddle-hal-cuda")
    points = lambda found: {(point.group, point.name, point.value) for point in found.entry_points}  # noqa: E731
    assert points(ours) == points(installed)
    assert ours.version == installed.version


def test_a_fault_that_is_back_is_reported_and_fails_the_proof(opened, monkeypatch, capsys):
    """Over the stand-in driver: two cases that need no framework, one whose call raises."""
    faults, bound = loaded("faults"), opened()
    here = SimpleNamespace(cuda=SimpleNamespace(get_device_name=lambda: "stand-in"), __version__="-")
    monkeypatch.setattr(faults, "torch", lambda: here)
    monkeypatch.setattr(faults, "opened", lambda: contextlib.nullcontext(bound))
    monkeypatch.setattr(faults, "COPIES", 2000)
    monkeypatch.setattr(faults.CudaPlugin, "probe", lambda: SimpleNamespace(available=True))
    assert faults.main(["calls from", "100,000"]) == 0
    assert "0 of 2 faults are back" in capsys.readouterr().out
    monkeypatch.setattr(type(bound), "insert_tasks", None)
    monkeypatch.setitem(faults.CASES, "memory of copies out", lambda bound: (False, "fine"))
    assert faults.main(["calls from", "memory"]) == 1
    output = capsys.readouterr().out
    assert "FAULT  TypeError: 'NoneType'" in output
    assert "1 of 2 faults are back" in output


@pytest.mark.conform
def test_the_broadcast_is_measured_on_two_ranks(tmp_path):
    command = ["-m", "benchmarks.gpu.broadcast", "--device", "cpu", "--rounds", "5", "--out", tmp_path]
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "gpu-broadcast.json").read_text(encoding="utf-8"))
    verified = ["accept_tokens", "accept_num", "step_idx", "stop_flags"]
    assert found["fields"] == ["sampled_token_ids", *verified]
    ways = [row["way"] for row in found["rows"]]
    # the host's groups are hal's own: no library's to compare with
    assert ways == ["broadcast_tokens", "one collective", "4 collectives"]
    for row in found["rows"]:
        assert 0 < row["host_us"] <= row["total_us"] <= row["total_slowest_rank_us"]
    assert "broadcast of 8896 bytes" in done.stdout
