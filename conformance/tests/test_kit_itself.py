"""The parts of the kit: its tests and their numbers, its oracle, its bounds, its faults and liars."""

import ast
import subprocess
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import hal_conformance
import pytest
from hal_conformance import kit
from hal_conformance.harness import properties
from hal_conformance.harness.guarantees import GUARANTEES
from hal_conformance.harness.reached import Reached
from hal_conformance.liars import Lie, faults, lay_over
from hal_conformance.report.report import cause_of
from hal_core.devices.cpu.device import CpuDevice
from hal_core.errors import OutOfMemory
from hal_core.memory.views import ByteRange
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.internal.conjecture import engine

KIT = Path(hal_conformance.__file__).parent


def test_pytest_loads_nothing_heavy_for_the_plugin():
    code = (
        "import sys, hal_conformance.plugin\n"
        "heavy = ('numpy', 'hypothesis', 'hal_core.runtime.policy', 'pluggy._x', 'paddle')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_oracle_shares_no_code_with_what_it_judges():
    """Of the core it uses types, and the poison bytes: no code that computes."""
    types = {
        "OutputRecord",
        "SlotStatus",
        "FinishReason",
        "SamplingParams",
        "SplitRole",
        "TaskKind",
        "Task",
        "DType",
        "StateLayout",
        "StateField",
    }
    allowed = types | {"AdmittedRequest", "Request", "Model", "Bytes", "poisoned", "stored"}
    files = [path for path in (KIT / "oracle").glob("*.py") if path.stat().st_size]
    taken = {
        alias.name
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("hal"))
        for alias in node.names
    }
    assert taken == allowed
    plain = [node for path in files for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import)]
    assert not [alias.name for node in plain for alias in node.names if alias.name.startswith("hal")]


def test_every_test_of_the_kit_carries_the_number_in_its_name():
    for path in KIT.glob("test_*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                marks = [
                    call
                    for call in node.decorator_list
                    if getattr(getattr(call, "func", None), "id", "") == "guarantee"
                ]
                assert len(marks) == 1, f"{path.name}: {node.name} has no @guarantee"
                assert node.name.startswith(f"test_g{marks[0].args[0].value:02d}_"), f"{path.name}: {node.name}"


def test_every_guarantee_has_a_test():
    numbers = {
        int(node.name[6:8])
        for path in KIT.glob("test_*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
        if node.name.startswith("test_g")
    }
    assert numbers == {guarantee.number for guarantee in GUARANTEES} == set(range(1, 33))


def test_failures_of_different_causes_stay_apart():
    causes = []
    for text in ("row 3 is [1, 2]", "row 4 is [7]", "no row at all"):
        try:
            raise AssertionError(text)
        except AssertionError as error:
            causes.append(cause_of(error))
    assert causes[0] == causes[1] != causes[2]
    wrapped = AssertionError("wrapped")
    wrapped.__cause__ = KeyError("x")
    assert cause_of(wrapped).startswith("KeyError at "), "what a check wraps is the cause"


def test_a_declared_waiting_update_is_excused_without_async_update(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    from kit_devices import SaysThatItWaits, waits
    from queued_device import queued

    assert ["overlapped_update" in SaysThatItWaits().offers(make()) for make in (waits, queued)] == [False, True]
    assert "update_inputs waits for the device" in SaysThatItWaits().why_not("overlapped_update")


def test_doctor_says_what_the_kit_says_of_an_update_that_waits(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    from hal_core.runtime.bound import bind
    from kit_devices import waits
    from queued_device import queued

    from hal.cli import doctor_child

    for make, mode in ((waits, doctor_child.UPDATE_WAITS), (queued, "async")):
        found = {}
        with bind(make()) as device:
            doctor_child.one_step(device, lambda stage, found=found, **more: found.update(more))
        assert found["step"]["update_inputs"] == mode


@pytest.mark.parametrize("met", [[], ["large"], ["small", "small"]])
def test_a_class_of_sizes_never_drawn_fails_the_check_by_name(met):
    reached = Reached(["small", "large"])
    for name in met:
        reached.note(name)
    with pytest.raises(AssertionError, match="has not reached"):
        reached.check()
    for name in ("small", "large"):
        reached.note(name)
    reached.check()
    with pytest.raises(AssertionError, match="none of"):
        reached.note("huge")


def shrunk(monkeypatch, seconds):
    """Run a property that fails, whose examples take so long; return the examples from the first failure on."""
    clock, tried = count(step=seconds), []
    monkeypatch.setattr(properties, "monotonic", lambda: next(clock))

    @kit.examples()
    def test_sums(kit, draw):
        tried.append(draw(st.lists(st.integers(0, 10**6), min_size=30), "numbers"))
        assert sum(tried[-1]) < 1000

    with pytest.raises(AssertionError):
        test_sums(SimpleNamespace(effort=kit.Effort("default", seed=3), bound=SimpleNamespace(name="none:0")))
    first = next(at for at, numbers in enumerate(tried) if sum(numbers) >= 1000)
    return tried[first:]


def test_a_busy_machine_shrinks_to_the_same_example(monkeypatch):
    """Shrinking ends after a number of smaller examples, whatever each takes, unless one hangs."""
    before = engine.MAX_SHRINKS
    monkeypatch.setattr(properties, "SHRINKS", 20)
    quiet, busy = shrunk(monkeypatch, 0.001), shrunk(monkeypatch, 4.9)
    assert quiet == busy
    assert sum(quiet[-1]) < sum(quiet[0])
    monkeypatch.setattr(properties, "SHRINKS", 1)
    assert len(shrunk(monkeypatch, 0.001)) < len(quiet), "the limit has ended it"
    assert len(shrunk(monkeypatch, 10.0)) <= 3
    assert before == engine.MAX_SHRINKS
    assert properties.CAN_BOUND


def test_what_is_not_bounded_is_not_shrunk(monkeypatch):
    monkeypatch.setattr(kit, "CAN_BOUND", False)
    assert Phase.shrink not in kit.Effort().settings().phases
    monkeypatch.setattr(kit, "CAN_BOUND", True)
    assert Phase.shrink in kit.Effort().settings().phases


def test_a_fault_is_laid_under_a_liar():
    class Swallows(Lie):
        def copy_out(self, memory, parts, stream):
            try:
                return super().copy_out(memory, parts, stream)
            except faults.CopyFailed:
                return "swallowed"

    device = faults.lay(lay_over(lay_over(CpuDevice(0, {}), Swallows), type("Other", (Lie,), {})), faults.FailingCopies)
    names = [kind.__name__ for kind in type(device).__mro__]
    order = [names.index(name) for name in ("Other", "Swallows", "FailingCopies", "CpuDevice")]
    assert order == sorted(order)
    device.fault.at = 1
    assert device.copy_out(device.allocate(8), [ByteRange(0, 8)], device.default_stream) == "swallowed"


def test_a_fault_over_another_strikes_alone():
    """``--fault`` lays one over the device, and a test arms its own."""
    device = faults.lay(faults.lay(CpuDevice(0, {}), faults.FailingCopies), faults.OutOfRoom)
    memory, stream = device.allocate(8), device.default_stream
    device.fault.at = 1
    device.copy_out(memory, [ByteRange(0, 8)], stream).wait(1)
    with pytest.raises(OutOfMemory):
        device.allocate(8)
    faults.lay(device, faults.FailingCopies).fault.at = 1
    device.allocate(8)
    with pytest.raises(faults.CopyFailed):
        device.copy_out(memory, [ByteRange(0, 8)], stream)


def test_the_support_of_an_example_loads_without_the_kit():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['hal_conformance', 'pytest', 'hypothesis']))\n"
        "sys.path.insert(0, 'examples/queue'); import hal_example_queue.conformance"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=KIT.parents[2])
    assert done.returncode == 0, done.stderr
