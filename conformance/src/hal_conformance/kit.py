"""The kit for its tests: the opened device, the number of examples, and the running of properties."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import pytest
from hal_core.runtime.bound import BoundDevice, bind
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from .harness.claims import note_unchecked
from .harness.natives import reaching
from .harness.places import frame_of, innermost, position, primitive_of
from .harness.properties import CAN_BOUND, Results, explore

if TYPE_CHECKING:
    from hal_core.contract.capabilities import Capabilities
    from hal_core.contract.counters import Counters
    from hal_core.contract.device import Device
    from hal_core.slots.declared import StateField
    from hal_core.streams import Stream

    from .harness.subject import Recipe, Subject
    from .ranks.pool import Ranks

T = TypeVar("T")

PROFILES = {"quick": 10, "default": 40, "nightly": 400}
"""Examples per property."""
STEPS = {"quick": 20, "default": 40, "nightly": 80}
"""Steps of one run of the state machine."""
HANG = 10.0
"""Seconds without progress after which a call counts as waiting for the held stream (``--hang``)."""
LOOKS = 10
"""Looks within that time: on a machine that stands still for a moment, both they and the call do."""
WAITED = "waited for the held stream"
"""The words of the message; the report groups failures by the primitive before them."""


class Draw(Protocol):
    """Draws a value; the label is printed beside it when the example fails."""

    def __call__(self, strategy: st.SearchStrategy[T], label: str) -> T: ...


@dataclass(frozen=True)
class Effort:
    """The effort of a run."""

    profile: str = "default"
    examples: int = 0
    seed: int = 0
    shrink: bool = True
    hang: float = HANG

    def settings(self, scale: float = 1.0) -> settings:
        """Return the settings of one property: ``scale`` times the profile's examples, no database, so that a seed
        suffices."""
        count = self.examples or PROFILES[self.profile]
        phases = (Phase.explicit, Phase.generate, *((Phase.shrink,) if self.shrink and CAN_BOUND else ()))
        return settings(
            max_examples=max(1, round(count * scale)),
            stateful_step_count=STEPS[self.profile],
            deadline=None,
            database=None,
            phases=phases,
            report_multiple_bugs=False,
            print_blob=False,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
        )


class Kit:
    """One session's device under test, bound, and the effort. After a failed test the next one gets a new device."""

    def __init__(self, subject: Subject, effort: Effort) -> None:
        self.subject, self.effort = subject, effort
        self.update_waits = False
        """Set by a check of G28: tests that need a step on a held stream are impossible."""
        self.sparing = False
        """In the profile quick, unless guarantees are chosen: no ranks are started."""
        self.fields: tuple[StateField, ...] = ()
        """What a worker declares (``--fields``); without them tests of declared fields draw their own."""
        self._bound: BoundDevice | None = None

    @property
    def bound(self) -> BoundDevice:
        """The opened device with its hooks."""
        if self._bound is None:
            self._bound = self.open()
        return self._bound

    @property
    def device(self) -> Device:
        """The plugin's own object, with the primitives."""
        return self.bound.device

    @property
    def capabilities(self) -> Capabilities:
        """The device's capabilities."""
        return self.bound.capabilities

    @property
    def can_hold(self) -> bool:
        """True if a stream can be held, so that asynchrony can be tested. Tests copy out meanwhile, without a wait."""
        return self.capabilities.can_hold_stream and self.capabilities.async_d2h

    def driver_counts(self) -> Callable[[], Counters]:
        """Return what counts the calls that reach the driver (G10); skip the test where only the plugin counts them."""
        found = reaching(self.device)
        if found is None:
            if self.capabilities.fused_scatter:
                note_unchecked(10, "counters(): what reaches the driver is the plugin's word", "give probe_counts()")
            pytest.skip("needs probe_counts, or primitives of which no compound is the vendor's own")
        return found

    def open(self) -> BoundDevice:
        """Open another device, for tests that close or break theirs."""
        bound = bind(self.subject.open(), self.subject.policy)
        reaching(bound.device)  # on each alike, as events are waited for by devices of one class of primitives
        return bound

    def missing(self, needs: tuple[str, ...]) -> str:
        """Return the first of ``needs`` that the device does not offer; "" if it offers all."""
        offered = self.subject.support.offers(self.device)
        if self.subject.recipe is None:  # a test file's own subject, which another process cannot open
            offered.discard("several_ranks")
        for need in needs:
            if need == "can_hold_stream" and self.capabilities.can_hold_stream and not self.can_hold:
                return "async_d2h"
            wanted, name = (False, need[4:]) if need.startswith("not ") else (True, need)
            has = bool(getattr(self.capabilities, name)) if hasattr(self.capabilities, name) else name in offered
            if has is not wanted:
                return need
        return ""

    @property
    def ranks(self) -> Ranks:
        """The worker processes, started on first use."""
        from .ranks.pool import shared

        return shared(self.subject.support)

    @property
    def recipe(self) -> Recipe:
        """The recipe with which a rank opens the same device."""
        assert self.subject.recipe is not None, "checked by missing()"
        return self.subject.recipe

    def another(self) -> Kit:
        """Return the kit of another opened device of the same kind."""
        other = Kit(self.subject, self.effort)
        other.sparing, other.fields = self.sparing, self.fields
        return other

    def renew(self) -> None:
        """Close the device, whatever its state; the next test opens another."""
        bound, self._bound = self._bound, None
        if bound is not None:
            try:
                bound.close()
            except Exception:  # noqa: BLE001 (the failure that led here is reported; this one follows from it)
                bound.device.close()

    def held(self, stream: Stream, what: str = "a call") -> Latch:
        """Keep a stream from executing within a ``with``, if the device can; else the work is done at once."""
        if not self.can_hold:
            return Latch(nullcontext(), 0.0, what)
        return held_stream(self.device, stream, self.effort.hang, what)


def held_stream(device: Device, stream: Stream, hang: float, what: str = "a call") -> Latch:
    """Return the latch of a device's stream. What the device counts is progress."""
    return Latch(device.hold_stream(stream), hang, what, lambda: tuple(getattr(device, "_counts", {}).values()))


class Latch:
    """A held stream. A call that waits for it would hang, so it is released in the end, and the test fails.

    ``what``: the calls made while it is held, for the message. ``hang``: seconds without progress until then; 0: a
    device that holds no stream, however slow its calls are. Progress: the thread moves, or ``counted`` changes.
    """

    def __init__(
        self,
        hold: AbstractContextManager[None],
        hang: float,
        what: str = "a call",
        counted: Callable[[], object] = tuple,
    ) -> None:
        self._hold, self._lock, self._hang, self._what, self._counted = hold, threading.Lock(), hang, what, counted
        self._held = self.forced = self._over = False
        self._thread, self._who, self._where = threading.get_ident(), "", ""
        self._seen: object = None
        self._still = 0  # looks that saw what the one before them saw

    def __enter__(self) -> Latch:
        self._hold.__enter__()
        self._held = True
        if self._hang:
            self._look_later()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        __tracebackhide__ = True
        with self._lock:
            self._over = True
        if self._hang:
            self._timer.cancel()
        self.release()
        waited = f"{self._who or self._what} {WAITED} (let go after {self._hang} s without progress){self._where}"
        if self.forced and error is not None:  # the error may result from the forced release
            error.add_note(waited)
        assert not self.forced or error is not None, waited

    def _look_later(self) -> None:
        self._timer = threading.Timer(self._hang / LOOKS, self._look)
        self._timer.daemon = True
        self._timer.start()

    def _look(self) -> None:
        """Release the stream if nothing has progressed for long."""
        frame = frame_of(self._thread)
        seen = position(frame), self._counted()
        self._still = self._still + 1 if seen == self._seen else 0
        self._seen = seen
        with self._lock:
            if self._over:
                return
            if self._still < LOOKS:
                self._look_later()
                return
            if primitive := primitive_of(frame):
                self._who = f"the primitive {primitive}, called for {self._what},"
            self._where, self.forced = innermost(frame), True
        self.release()

    def release(self) -> None:
        """Release the stream."""
        with self._lock:
            if self._held:
                self._held = False
                self._hold.__exit__(None, None, None)


def examples(scale: float = 1.0) -> Callable[[Callable[[Kit, Draw], None]], Callable[[Kit], None]]:
    """Make a test ``(kit, draw)`` a property: it runs once per example, ``scale`` times the profile's count."""

    def decorate(body: Callable[[Kit, Draw], None]) -> Callable[[Kit], None]:
        @functools.wraps(body)
        def test(kit: Kit) -> None:
            __tracebackhide__ = True
            results = Results()

            @seed(kit.effort.seed)
            @kit.effort.settings(scale)
            @given(st.data())
            def run(data: st.DataObject) -> None:
                __tracebackhide__ = True
                with results.example():
                    body(kit, lambda strategy, label: data.draw(strategy, label=label))

            explore(kit.bound.name, results, run)

        del test.__wrapped__  # pytest would find it, and request `draw`
        return test

    return decorate
