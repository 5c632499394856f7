"""The CUDA driver's calls, checked: an error names the failed call, the driver's name for it, and the cure.

The bindings moved between CUDA 12 and 13 (``from cuda import cuda`` to ``cuda.bindings.driver``); only this module
handles both.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from hal_core import DeviceClosed, HalError, InvalidValue, OutOfMemory, Unavailable

from .native import Native, find

STICKY = {
    *("CUDA_ERROR_ECC_UNCORRECTABLE", "CUDA_ERROR_NVLINK_UNCORRECTABLE", "CUDA_ERROR_CONTAINED"),
    *(
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "CUDA_ERROR_LAUNCH_TIMEOUT",
        "CUDA_ERROR_CONTEXT_IS_DESTROYED",
        "CUDA_ERROR_ASSERT",
    ),
    *("CUDA_ERROR_HARDWARE_STACK_ERROR", "CUDA_ERROR_ILLEGAL_INSTRUCTION", "CUDA_ERROR_MISALIGNED_ADDRESS"),
    *("CUDA_ERROR_INVALID_ADDRESS_SPACE", "CUDA_ERROR_INVALID_PC", "CUDA_ERROR_LAUNCH_FAILED"),
    *("CUDA_ERROR_TENSOR_MEMORY_LEAK", "CUDA_ERROR_MPS_CLIENT_TERMINATED", "CUDA_ERROR_EXTERNAL_DEVICE"),
}
"""Errors that corrupt the context: every later call fails until the process is restarted. According to the driver's
description (CUresult, CUDA 13) the process must be terminated and relaunched, or the hardware is at fault."""


CAPTURED_STREAM = -1
"""``CAPTURED_STREAM`` of native.h: in place of a CUresult, for a stream that is being captured."""


def captured(stream: int) -> InvalidValue:
    """Return the error for a stream that is being captured into a graph."""
    return InvalidValue(
        f"stream {stream:#x} is being captured into a graph, which this call cannot be a part of",
        cure="call it before the capture or after the graph's launch",
        argument="stream",
    )


class CudaError(HalError, RuntimeError):
    """A call of the CUDA driver failed."""


def load_bindings() -> Any:  # noqa: ANN401 (a module whose place depends on the version)
    """Return the driver's bindings, from their place in this version of ``cuda-bindings``."""
    for name in ("cuda.bindings.driver", "cuda.cuda"):
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
    cure = "pip install './plugins/cuda[cu13]' (or [cu12]) in hal's checkout"
    raise Unavailable("cuda-bindings is missing", cure=cure, device="cuda")


class InContext:
    """The bindings' calls, each made with ``context`` current, from threads with any current context or none. The
    former current context is restored afterwards."""

    def __init__(self, api: Any) -> None:  # noqa: ANN401 (the bindings, or a stand-in)
        self._api = api
        self.context = 0

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (a function of the bindings)
        call, api, context = getattr(self._api, name), self._api, self.context

        def within(*arguments: Any) -> Any:  # noqa: ANN401
            if not context or int(api.cuCtxGetCurrent()[1]) == context:
                return call(*arguments)
            pushed = api.cuCtxPushCurrent(context)
            if pushed[0] != api.CUresult.CUDA_SUCCESS:
                return pushed
            try:
                return call(*arguments)
            finally:
                api.cuCtxPopCurrent()

        return within


def _nobody_waits() -> None:
    """Do nothing: before a device is opened no work is in flight."""


class Driver:
    """The driver's bindings with checked results. ``ok(call, name)`` returns the call's result without its status.

    ``on`` has the same calls, made in the device's context (:meth:`use`). ``when_full``: a weak reference to the
    function that waits for room, as native code holds this object and must not hold a device. ``native``: the native
    part over the same driver, or None, for the reason ``why_fallback``. After a sticky error every later call raises it
    again, with the cure.
    """

    def __init__(
        self,
        bindings: Any = None,  # noqa: ANN401 (tests give a stand-in)
        module: Any = None,  # noqa: ANN401 (the native part, over a stand-in's library)
        library: ctypes.CDLL | None = None,
    ) -> None:
        self.why_fallback = "it was opened without the native part"
        if bindings is None:
            bindings = load_bindings()
            module, self.why_fallback = find()
        self.api = bindings
        self.when_full: Callable[[], Callable[[int, Any], None] | None] = _nobody_waits
        self.native = None if module is None else Native(module, self._failed, self.full, library)
        self.on = InContext(bindings)
        self.success = self.api.CUresult.CUDA_SUCCESS
        self.not_ready = self.api.CUresult.CUDA_ERROR_NOT_READY
        self.broken = ""
        self._relaxed = self.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED

    @contextmanager
    def during_captures(self) -> Iterator[None]:
        """Relax this thread's capture mode, for calls that another thread's graph capture forbids and that would
        invalidate it (memory, modules, queries of events and streams)."""
        if self.native is not None:  # the bindings would release the GIL twice around a wait
            mode = self.native.calls.exchange(int(self._relaxed))
            try:
                yield
            finally:
                self.native.calls.exchange(mode)
            return
        exchange = self.api.cuThreadExchangeStreamCaptureMode
        status, before = exchange(self._relaxed)
        try:
            yield
        finally:
            if status == self.success:
                exchange(before)

    def ok(self, result: tuple[Any, ...], call: str) -> Any:  # noqa: ANN401 (the call's result)
        """Return the value of a successful call; raises :class:`CudaError`, or :class:`OutOfMemory`, for another."""
        if result[0] is not self.success and result[0] != self.success:
            self._raise(result[0], call)
        return result[1] if len(result) > 1 else None

    def check_sound(self) -> None:
        """Raise if an earlier error corrupted the context."""
        if self.broken:
            raise DeviceClosed(
                f"the CUDA context is spoilt by an earlier error: {self.broken}",
                cure="restart the process; run it under compute-sanitizer to find the faulty kernel",
                device="cuda",
            )

    def use(self, context: int) -> None:
        """Make later calls in this context, from any thread."""
        self.on.context = context
        if self.native is not None:
            self.native.calls.context(context)

    def full(self, stream: int, event: Any) -> None:  # noqa: ANN401 (a CUevent)
        """Make the device wait for an event of a stream whose launch queue may be full."""
        wait = self.when_full()
        if wait is not None:
            wait(stream, event)

    def _failed(self, status: int, call: str) -> None:
        """Raise the error of a native call."""
        if status == CAPTURED_STREAM:
            raise captured(int(call))
        self._raise(self.api.CUresult(status), call)

    def _raise(self, status: Any, call: str) -> None:  # noqa: ANN401 (a CUresult)
        name = str(getattr(status, "name", status))
        text = f"{call}: {name}"
        if name == "CUDA_ERROR_OUT_OF_MEMORY":
            raise OutOfMemory(
                text, cure="free memory, or lower ring_limit, admission_limit and the state's sizes", device="cuda"
            )
        if "CAPTURE" in name:
            cure = "put hal's work on another stream, before the capture or after the graph's launch"
            raise InvalidValue(f"{text}: it met a graph that is being captured", cure=cure, device="cuda")
        if name in STICKY:
            self.broken = self.broken or text
            raise CudaError(
                text, cure="the context is corrupted; restart the process, under compute-sanitizer", device="cuda"
            )
        raise CudaError(text, cure="see the CUDA driver API's description of this error", device="cuda")
