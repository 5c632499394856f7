"""The proof script and the broadcast bench, as far as they run without a GPU: their steps, limits, entry points."""

import importlib.util
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.conform
def test_ranks_draw_recorded_tokens_and_end_without_a_broadcast(tmp_path):
    pytest.importorskip("paddle")
    script, file = ROOT / "plugins" / "cuda" / "proof" / "recorded_ranks.py", tmp_path / "recorded"
    for step in (["record", file], ["replay", file, "cpu"]):
        command = [sys.executable, script, *step]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": equal") == 4
