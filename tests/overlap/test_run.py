"""``hal run --runner`` and ``--overlap``: any runner, and a clear message where steps cannot overlap."""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
from hal_core import (
    CapabilityMissing,
    InvalidValue,
    MemorySink,
    PluginError,
    Request,
    SamplingParams,
    StateConfig,
    Step,
)
from hal_core.contract.capabilities import Capabilities
from hal_core.devices.cpu import CpuPlugin
from hal_core.runtime.bound import bind
from hal_engine.stepping import Stepper, make_runner, overlap_of

HOST = "its tokens are chosen on the host"
pytestmark = pytest.mark.usefixtures("private_folders")


@pytest.fixture
def run(command):
    """Run the command here."""

    return partial(command, "run", "--json", "--prompt", "def main(")


def test_auto_says_in_one_line_why_steps_do_not_overlap(run):
    done = run("--device", "cpu", "--temperature=0", "--max-tokens", 2, "-v")
    (line,) = [line for line in done.err.splitlines() if "overlap" in line]
    assert done.status == 0
    assert f"steps do not overlap: the Paddle model needs the host between two steps: {HOST}" in line


def test_a_runner_refuses_by_name_what_it_does_not_do(run, simulator):
    done = run("--device", "sim", "--runner", "hal_sim.mixing:MixRunner", "--temperature", 0.5)
    assert done.status == 2
    assert "temperature: 0.5 is not supported by MixRunner (give 0.0)" in done.answers[0]["message"]


ABLE = {"async_h2d": True, "async_d2h": True, "fused_scatter": True, "pinned_host": True, "can_hold_stream": True}


def device_with(**changed):
    reasons = {} if changed.get("async_h2d", True) else {"fallbacks": {"async_set_value": "a test"}}
    able = Capabilities(**{**ABLE, "collective": "", "async_update": True, **changed, **reasons})
    return SimpleNamespace(name="some:0", capabilities=able)


@pytest.mark.parametrize(
    ("changed", "needs_host", "says"),
    [
        ({}, "", ""),
        ({"async_update": False}, "", "some:0 has no kernel for update_inputs"),
        ({"async_d2h": False}, "", "some:0 copies while the host waits"),
        ({"async_h2d": False}, "", "some:0 copies while the host waits"),
        ({}, "it samples there", "a runner needs the host between two steps: it samples there"),
    ],
)
def test_steps_overlap_where_device_and_runner_let_them(changed, needs_host, says):
    device = device_with(**changed)
    assert overlap_of("off", device, "a runner", needs_host) == (False, "")
    overlaps, why = overlap_of("auto", device, "a runner", needs_host)
    assert overlaps == (not says)
    assert says in why
    if says:
        with pytest.raises(CapabilityMissing, match=says):
            overlap_of("on", device, "a runner", needs_host)
    else:
        assert overlap_of("on", device, "a runner", needs_host) == (True, "")


def test_what_makes_no_runner_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "some_runners", SimpleNamespace(nothing=lambda setup: None))
    with pytest.raises(PluginError, match="made NoneType, which has no check, launch, propose, needs_host"):
        make_runner("some_runners:nothing", None)
    with pytest.raises(InvalidValue, match="has no attribute 'missing'"):
        make_runner("some_runners:missing", None)
    monkeypatch.setitem(
        sys.modules, "bad_runners", SimpleNamespace(fails=lambda setup: 1 // 0, exits=lambda _: exit(3))
    )
    with pytest.raises(PluginError, match="could not make a runner: ZeroDivisionError"):
        make_runner("bad_runners:fails", None)
    with pytest.raises(PluginError, match="could not make a runner: SystemExit: 3"):
        make_runner("bad_runners:exits", None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = (", "SyntaxError: '(' was never closed"),
        ("1 // 0", "ZeroDivisionError"),
        ("raise SystemExit(4)", "SystemExit: 4"),
        ("import math; math.no_such_name", "AttributeError: module 'math' has no attribute"),
    ],
)
def test_a_module_that_fails_as_it_is_imported_is_named_in_one_line(run, monkeypatch, tmp_path, text, says):
    (tmp_path / "my_broken_runner.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    done = run("--runner", "my_broken_runner:Runner")
    assert (done.status, done.out, len(done.err.splitlines())) == (2, "", 1)
    assert f"--runner: importing my_broken_runner failed: {says}" in done.err


class Idle:
    """A runner without effect."""

    needs_host, vocab_size, supports = "", 5, ("seed",)

    def check(self, request): ...
    def propose(self, state, step, stream): ...
    def launch(self, state, step, stream):
        return step.step


@pytest.mark.parametrize("vocab", [True, 0, -5, 2.5, None])
def test_a_runner_without_a_sound_vocabulary_is_refused_before_it_runs(monkeypatch, vocab):
    monkeypatch.setitem(sys.modules, "idle_runners", SimpleNamespace(make=lambda _: Idle()))
    assert isinstance(make_runner("idle_runners:make", None), Idle)
    monkeypatch.setattr(Idle, "vocab_size", vocab)
    with pytest.raises(PluginError, match=r"has no vocab_size \(a whole number of at least 1\)"):
        make_runner("idle_runners:make", None)


@pytest.mark.parametrize("listed", [None, 5, "seed", ("seed", "top_q")])
def test_a_runner_that_does_not_list_what_it_supports_is_refused_before_it_runs(monkeypatch, listed):
    monkeypatch.setitem(sys.modules, "idle_runners", SimpleNamespace(make=lambda _: Idle()))
    if listed is None:
        monkeypatch.delattr(Idle, "supports")
    else:
        monkeypatch.setattr(Idle, "supports", listed)
    with pytest.raises(PluginError, match=r"idle_runners:make made Idle, which has no supports \(names of fields of "):
        make_runner("idle_runners:make", None)


def test_one_place_refuses_a_parameter_that_a_runner_does_not_list():
    with bind(CpuPlugin.open(0, {})) as device:
        stepper = Stepper(device, device.state(StateConfig(2, 16)), Idle(), MemorySink(), blocks=4)
        stepper.admit(Request("r", [1], SamplingParams(max_tokens=2, seed=9)))
        with pytest.raises(InvalidValue, match=r"top_k: 3 is not supported by Idle \(give 0\)"):
            stepper.admit(Request("r", [1], SamplingParams(max_tokens=2, temperature=0.0, top_k=3)))


@pytest.mark.parametrize("other", [None, "step", Step(7, {"target": []})], ids=["None", "text", "another"])
def test_a_runner_that_returns_another_step_is_named(monkeypatch, other):
    monkeypatch.setattr(Idle, "launch", lambda *_: other)
    with bind(CpuPlugin.open(0, {})) as device:
        stepper = Stepper(device, device.state(StateConfig(2, 16)), Idle(), MemorySink(), blocks=4)
        with pytest.raises(PluginError, match=r"Idle\.launch returned .* for step 0") as raised:
            stepper.step([])
    assert "return step.step" in raised.value.cure
