"""A latch looks at the thread that it watches, and leaves nothing behind."""

import gc
import sys
import threading
from contextlib import nullcontext

import pytest
from hal_conformance.harness import places
from hal_conformance.kit import Latch


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_while_frames_are_gathered(monkeypatch, enabled):
    """A finalizer there could give up the interpreter's lock, which CPython's own lock must not outlive."""
    gather, seen = sys._current_frames, []
    monkeypatch.setattr(sys, "_current_frames", lambda: (seen.append(gc.isenabled()), gather())[1])
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        frame = places.frame_of(threading.get_ident())
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert seen == [False]
    assert frame is not None


def test_a_thread_that_is_gone_has_no_frame():
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert places.frame_of(thread.ident) is None


def test_no_thread_is_left_of_a_latch_that_was_let_go():
    """Hundreds of them would wait for the interpreter's lock at once."""
    before = threading.active_count()
    for _ in range(20):
        with Latch(nullcontext(), 10.0) as latch:
            pass
        assert latch._timer.finished.is_set(), "its thread waits for the next look"
        latch._timer.join(10.0)
    assert threading.active_count() <= before
