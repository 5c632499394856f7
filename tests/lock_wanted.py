"""A thread that always wants the GIL, to detect code that releases it."""

import ctypes
import gc
import sys
import threading
from pathlib import Path


class Waiting:
    """A thread that waits for a semaphore of the C library, and then for the GIL; ``ran`` counts its turns, and
    ``where`` is the call stack of the test's thread at the last one.
    """

    def __init__(self):
        self.ran, self.where, self._over, self._done = 0, "", False, threading.Semaphore(0)
        self._place = ctypes.create_string_buffer(64)
        self._freely, self._kept = ctypes.CDLL(None), ctypes.PyDLL(None)  # the second keeps the interpreter's lock
        self._kept.sem_init(self._place, 0, 0)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        while True:
            self._freely.sem_wait(self._place)
            if self._over:
                return
            self.where = stack(sys._current_frames()[threading.main_thread().ident])
            self.ran += 1
            self._done.release()

    def __enter__(self):
        gc.collect()  # garbage of other tests, which may free a device's memory
        gc.disable()
        self._former = sys.getswitchinterval()
        sys.setswitchinterval(1000)
        self._thread.start()
        return self

    def __exit__(self, *_):
        sys.setswitchinterval(self._former)
        gc.enable()
        self._over = True
        self._kept.sem_post(self._place)
        self._thread.join(30)

    def gets_in(self, call):
        """Return the stack at which the call released the interpreter's lock, or ""."""
        before, left = self.ran, ctypes.c_int(1)
        self._kept.sem_post(self._place)
        while left.value:  # it has passed the semaphore, and wants the interpreter's lock now
            self._kept.sem_getvalue(self._place, ctypes.byref(left))
        for _ in range(2000):
            pass
        assert self.ran == before, "it was let in before"
        call()
        found = self.ran != before and self.where
        self._done.acquire()
        return found or ""


def stack(frame):
    """The innermost calls, the last one first."""
    calls = []
    while frame is not None and len(calls) < 5:
        calls.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(calls)
