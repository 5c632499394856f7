"""One cause is reported once, and by the primitive that waited or wrote wrong."""

import contextlib
import re
import sys
import threading
from functools import partial
from types import SimpleNamespace

import pytest
from hal_conformance import kit
from hal_conformance.harness import places
from hal_conformance.report.report import cause_of

from .kit_reports import LIBRARIES

WARM = LIBRARIES


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        pytest.param("by_host", "the primitive copy_within (base.py:", marks=pytest.mark.conform),
        ("misplaced", "after copy_within (kit_devices.py:"),
    ],
)
def test_a_wrong_copy_within_stops_the_run_and_is_named(conform, factory, says):
    quick = ("--profile=quick", "--examples=2")
    out = conform(f"--device-factory=kit_devices:{factory}", *quick, code=1).stdout
    report = out[out.index("hal conformance: ") :]
    assert says in report
    assert ("the default of hal_core" in report) == (factory == "by_host")
    assert report.count("    reproduce: ") == 1
    assert "1 failed" in out
    assert len(out.splitlines()) <= 40, out


def test_the_default_copy_within_is_refused_at_opening(conform):
    done = conform("--device-factory=kit_devices:by_default", "--profile=quick", code=4)
    assert "async_h2d is declared, but copy_within is the default of hal_core" in done.stderr
    assert "(write copy_within(target, value, stream), a copy in stream order" in done.stderr
    assert len((done.stdout + done.stderr).splitlines()) <= 5, done.stdout + done.stderr


class Timer:
    """Stands for the latch's own: it looks when the device waits, and not before, on any machine."""

    def __init__(self, seconds, look):
        Device.look = staticmethod(look)

    def start(self):
        pass

    def cancel(self):
        pass


class Device:
    """A device that waits in one of its primitives."""

    look, counts = None, ()

    def __init__(self):
        self.released = threading.Event()

    @contextlib.contextmanager
    def hold(self):
        yield
        self.released.set()

    def copy_within(self):
        self.event_synchronize()

    def event_synchronize(self):
        threading.Thread(target=self.looks).start()
        self.released.wait()

    def looks(self):
        for _ in range(1000):
            if not self.released.is_set():
                Device.look()


@pytest.fixture
def failure(monkeypatch):
    """Return the error of calls that wait for a held stream."""
    monkeypatch.setattr(kit.threading, "Timer", Timer)

    def call(what, act):
        device = Device()
        with pytest.raises(AssertionError) as raised, kit.Latch(device.hold(), 0.01, what):
            act(device)
        return raised.value

    return call


def test_a_latch_names_the_primitive_that_waited(failure):
    error = failure("a value on the device", Device.copy_within)
    assert str(error).startswith("the primitive copy_within (test_one_cause.py:")
    # the last part is where it waits, or begins to
    assert re.search(
        r"for a value on the device, waited for the held stream \(let go after 0.01 s without progress\), in \w+ \(",
        str(error),
    )


def test_calls_that_are_slow_and_counted_do_not_count_as_waiting(monkeypatch):
    """However long they take: the device counts one between two looks of the latch."""
    monkeypatch.setattr(kit.threading, "Timer", Timer)
    device = SimpleNamespace(hold_stream=lambda stream: contextlib.nullcontext(), _counts={"uploads": 0})
    with kit.held_stream(device, None, 1.0) as latch:
        for _ in range(10 * kit.LOOKS):
            device._counts["uploads"] += 1
            Device.look()
        assert not latch.forced
        device._counts = {}
        for _ in range(kit.LOOKS + 1):
            assert not latch.forced
            Device.look()
        assert latch.forced
        latch.forced = False


TWICE = "def {name}(call):\n    call()\n    call()"


def positions(file, name="calls"):
    """Return the positions of a thread at two calls of a function of this file, which code of the kit has called."""
    functions = {}
    exec(compile(TWICE.format(name=name), file, "exec"), functions)
    exec(compile("def of_kit(call):\n    call()", str(places.KIT / "test_any.py"), "exec"), functions)
    found = []
    functions["of_kit"](partial(functions[name], lambda: found.append(places.position(sys._getframe(1)))))
    return found


@pytest.mark.parametrize(
    ("file", "name", "moves"),
    [
        (places.KIT / "fixtures" / "any.py", "calls", True),
        (places.CORE / "runtime" / "any.py", "calls", True),
        (places.CORE / "devices" / "primitives.py", "poll", False),
        (places.CORE / "devices" / "any.py", "event_synchronize", False),
        (places.KIT / "liars" / "any.py", "calls", False),
        ("/vendor/device.py", "calls", False),
    ],
)
def test_a_thread_moves_in_code_of_kit_and_core_and_not_in_a_loop_that_polls(file, name, moves):
    first, second = positions(str(file), name)
    assert (first != second) is moves


def test_a_device_that_holds_no_stream_is_never_late(monkeypatch):
    """However slow it is: no call of it waits for a held stream."""

    def timer(*arguments):
        return SimpleNamespace(start=lambda: pytest.fail("a timer runs"), cancel=lambda: None)

    monkeypatch.setattr(kit.threading, "Timer", timer)
    device = SimpleNamespace(capabilities=SimpleNamespace(can_hold_stream=False))
    one = kit.Kit(None, kit.Effort(hang=0.01))
    one._bound = SimpleNamespace(device=device, capabilities=device.capabilities)
    with one.held("a stream") as latch:
        assert not latch.forced


def test_failures_of_one_primitive_are_one_cause(failure):
    def fail_behind(device):
        device.copy_within()
        raise AssertionError("the ticket is done, but its work is held")

    one = failure("a call", Device.copy_within)
    other = failure("another call", fail_behind)
    assert str(other) == "the ticket is done, but its work is held"
    assert cause_of(one) == cause_of(other) == "copy_within waited"
    grouped = ExceptionGroup("several", [other])
    assert cause_of(grouped) == "copy_within waited"
    assert cause_of(AssertionError("another")) != "copy_within waited"
