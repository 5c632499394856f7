"""NCCL: the library, found at run time, and one communicator for each group of this process.

It needs no toolkit and no framework. The library loaded by the process is used, else that of the package
``nvidia-nccl``, else the one on the library path; ``HAL_CUDA_NCCL`` names another. (The package comes before the path,
because torch and Paddle need theirs, and a process has one library of a name.)
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from hal_core import TIMEOUTS, GroupLost, HalError, Unavailable
from hal_core.devices import poll

if TYPE_CHECKING:
    from .base import OnGpu

log = logging.getLogger("hal")
VARIABLE, NAME = "HAL_CUDA_NCCL", "libnccl.so.2"
CURE = f"install the package nvidia-nccl-cu13 (or nvidia-nccl-cu12), or name the library by {VARIABLE}"
OLDEST = 21800
"""NCCL 2.18."""
UINT8 = 1
ID_BYTES = 128
UNDEFINED = -(1 << 31)


class NcclError(HalError, RuntimeError):
    """A call of NCCL failed."""


class Id(ctypes.Structure):
    """``ncclUniqueId``, which is passed by value."""

    _fields_ = [("internal", ctypes.c_char * ID_BYTES)]


class Config(ctypes.Structure):
    """``ncclConfig_t`` as of NCCL 2.17; a later library treats missing fields as undefined.

    One channel is enough for these messages, and leaves the worker the memory of the other channels. The communicator
    is blocking: for a non-blocking one, some versions start a thread for each collective, which may be late on the
    stream.
    """

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
    ]

    @classmethod
    def made(cls) -> Config:
        """Return the configuration of a blocking communicator with one channel."""
        return cls(ctypes.sizeof(cls), 0xCAFEBEEF, 21700, 1, UNDEFINED, 1, 1, None)


class Library:
    """NCCL's functions. ``version`` in NCCL's numbering (22809), ``path`` of the library."""

    def __init__(self, loaded: ctypes.CDLL, path: str) -> None:
        self.path, self.version = path, 0
        handle, number = ctypes.c_void_p, ctypes.c_int()
        try:
            self._get_id, self._init = loaded.ncclGetUniqueId, loaded.ncclCommInitRankConfig
            self.broadcast, self.abort, self.destroy = (
                loaded.ncclBroadcast,
                loaded.ncclCommAbort,
                loaded.ncclCommDestroy,
            )
            # without releasing the GIL: it is only a query, and the communicator is not freed meanwhile
            self.async_error = ctypes.PyDLL(None, handle=loaded._handle).ncclCommGetAsyncError
            self._text, self._last = loaded.ncclGetErrorString, loaded.ncclGetLastError
            loaded.ncclGetVersion(ctypes.byref(number))
        except AttributeError as error:
            raise Unavailable(f"{path} is not a supported NCCL: {error}", cure=CURE, device="cuda") from error
        self.version = number.value
        if self.version < OLDEST:
            raise Unavailable(f"NCCL {self.version_text} ({path}) is older than 2.18", cure=CURE, device="cuda")
        self._init.argtypes = [ctypes.POINTER(handle), ctypes.c_int, Id, ctypes.c_int, ctypes.POINTER(Config)]
        self.broadcast.argtypes = [handle, handle, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, handle, handle]
        self.abort.argtypes = self.destroy.argtypes = self._last.argtypes = [handle]
        self.async_error.argtypes = [handle, ctypes.POINTER(ctypes.c_int)]
        self._text.restype = self._last.restype = ctypes.c_char_p

    @property
    def version_text(self) -> str:
        """The version as text."""
        return f"{self.version // 10000}.{self.version // 100 % 100}.{self.version % 100}"

    def address(self, name: str) -> int:
        """Return a function's address, for native calls."""
        return int(ctypes.cast(getattr(self, name), ctypes.c_void_p).value or 0)

    def check(self, status: int, call: str) -> None:
        """Raise :class:`NcclError` for a status that is not success."""
        if status:
            text, last = self._text(status) or b"", self._last(None) or b""
            text = ": ".join(filter(None, (text.decode(errors="replace"), last.decode(errors="replace").strip())))
            raise NcclError(f"{call}: {text}", cure="NCCL_DEBUG=INFO shows what NCCL does", device="cuda")

    def new_id(self) -> bytes:
        """Return the id by which the ranks of a new communicator find each other."""
        made = Id()
        self.check(self._get_id(ctypes.byref(made)), "ncclGetUniqueId")
        return bytes(made)

    def init(self, handle: ctypes.c_void_p, ident: bytes, size: int, place: int) -> None:
        """Create this rank's communicator, on the GPU whose context is current; waits for the other ranks."""
        config = Config.made()
        status = self._init(ctypes.byref(handle), size, Id.from_buffer_copy(ident), place, ctypes.byref(config))
        self.check(status, "ncclCommInitRankConfig")


def _places() -> list[str]:
    """Return the candidate places of the library, in search order."""
    if named := os.environ.get(VARIABLE):
        return [named]
    packages = [Path(folder or ".") / "nvidia/nccl/lib" / NAME for folder in sys.path]
    return [*[str(file) for file in packages if file.is_file()], NAME]


@cache
def library() -> Library:
    """Return the loaded NCCL. Raises :class:`Unavailable` if there is none."""
    if not os.environ.get(VARIABLE):
        try:
            return Library(ctypes.CDLL(NAME, mode=os.RTLD_NOLOAD), f"{NAME}, loaded before")
        except OSError:
            pass  # not loaded yet
    why = ""
    for place in _places():
        try:
            return Library(ctypes.CDLL(place), place)
        except OSError as error:
            why = str(error)
    raise Unavailable(f"NCCL does not load: {why}", cure=CURE, device="cuda", argument="group")


def described() -> str:
    """Return a short description of the NCCL found, or of why it is missing."""
    try:
        found = library()
    except Unavailable as error:
        return f"no ranks: {error.what} ({error.cure})"
    return f"NCCL {found.version_text} ({found.path})"


class Comm:
    """One rank's part in a group: created with all its ranks, kept for the process, aborted by the watchdog.

    ``index``: the GPU. ``lock``: held around each call that uses ``handle``, which is 0 once it was aborted or
    destroyed.
    """

    def __init__(self, found: Library, index: int, ranks: Sequence[int]) -> None:
        self.library, self.index, self.ranks = found, index, tuple(ranks)
        self.lock, self.handle = threading.Lock(), 0
        self._ended, self._until = threading.Event(), 0.0
        self._code = ctypes.c_int()
        self._error = ctypes.byref(self._code)

    @property
    def ended(self) -> bool:
        """Whether no work waits for the group any more, on the host or the device."""
        return self._ended.is_set()

    @property
    def settled(self) -> bool:
        """For an aborted group: whether NCCL has ended the waiting work, or its time for that is over.

        The loss is not reported before that. A caller that got the error could wait for the stream while holding the
        GIL, as Paddle does when it makes a tensor, and the thread that ends the stream's work could not run.
        """
        return self._ended.is_set() or 0.0 < self._until < monotonic()

    def settle(self) -> None:
        """Wait until it is :attr:`settled`, for ``TIMEOUTS.group_end`` at most."""
        poll(lambda: self.settled, TIMEOUTS.group_end)

    def connect(self, device: OnGpu, ident: bytes, place: int, timeout: float) -> None:
        """Create the communicator and run a first collective: NCCL connects ranks only then, while all are present.

        NCCL waits without end for a missing rank. So a thread makes the calls. After ``timeout`` seconds
        :class:`GroupLost` is raised, and the thread remains.
        """
        deadline, met = monotonic() + timeout, []
        made, memory, stream = ctypes.c_void_p(), device.allocate(ID_BYTES), device.stream()

        def work() -> None:
            try:
                with device.context.entered(), device.driver.during_captures():
                    self.library.init(made, ident, len(self.ranks), place)
                    self.handle = made.value or 0
                    self.broadcast(memory.address, ID_BYTES, 0, stream.handle)
            except Exception as error:  # noqa: BLE001 (raised by the caller)
                met.append(error)

        thread = threading.Thread(target=work, name="hal-nccl-connect", daemon=True)
        thread.start()
        thread.join(timeout)
        if met:
            self.abort()
            why = f"{self.ranks}: {met[0]}"
            cure = "check NCCL's output with NCCL_DEBUG=INFO, and that each rank of the group has its own GPU"
            raise GroupLost(f"the group {why}", cure=cure, device="cuda", argument="group") from met[0]
        if thread.is_alive() or not device.mark(stream).wait(max(0.0, deadline - monotonic())):
            if not thread.is_alive():
                self.abort()
            raise GroupLost(
                f"the ranks of the group {self.ranks} did not find each other within {timeout:g} s",
                cure="check the other ranks (NCCL_DEBUG=INFO shows what NCCL does), and that each rank of the group "
                "has its own GPU",
                device="cuda",
                argument="group",
            )

    def broadcast(self, address: int, nbytes: int, source: int, stream: int) -> None:
        """Queue one broadcast in place on a stream, from a rank's index in the group."""
        with self.lock:
            if not self.handle:
                raise self.gone()
            status = self.library.broadcast(address, address, nbytes, UINT8, source, self.handle, stream)
        self.library.check(status, "ncclBroadcast")

    def gone(self) -> NcclError:
        """Return the error of a call without a communicator."""
        return NcclError("the communicator was given up", cure="open the group again", device="cuda")

    def failure(self) -> NcclError | None:
        """Return an error of NCCL's own threads; None also while another call uses the communicator."""
        if not self.lock.acquire(blocking=False):
            return None
        try:
            if not self.handle:
                return None
            status = self.library.async_error(self.handle, self._error) or self._code.value
        finally:
            self.lock.release()
        try:
            self.library.check(status, "NCCL met")
        except NcclError as error:
            return error
        return None

    def abort(self) -> None:
        """End waiting work in NCCL and on the device, whose streams continue. In a thread, as it may wait for the
        device."""
        self._end_by_thread(self.library.abort)

    def close(self) -> None:
        """Destroy the communicator; wait for that, but not without end."""
        if self.handle and (thread := self._end_by_thread(self.library.destroy)):
            thread.join(TIMEOUTS.group_end)

    def _end_by_thread(self, call: Any) -> threading.Thread | None:  # noqa: ANN401 (a function of NCCL's)
        """Start a thread for the call. None at the end of the process, which releases everything: Python 3.12 starts no
        thread then."""
        self._until = monotonic() + TIMEOUTS.group_end
        thread = threading.Thread(target=self._end, args=(call,), name="hal-nccl-end", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self._until = monotonic()
            return None
        return thread

    def _end(self, call: Any) -> None:  # noqa: ANN401 (a function of NCCL's)
        if not self.lock.acquire(timeout=TIMEOUTS.group_end):
            log.error("hal: a call is still inside NCCL, so its group %s cannot be ended: end this process", self.ranks)
            return
        try:
            handle, self.handle = self.handle, 0
        finally:
            self.lock.release()
        if handle and (status := call(handle)):
            log.warning("hal: NCCL could not end the group %s: status %d", self.ranks, status)
            return
        self._ended.set()


def make_group(device: OnGpu, ranks: Sequence[int], me: int, share: Callable[[bytes], bytes], timeout: float) -> Comm:
    """Return the communicator of a group, created together with all its members (``hal_core``'s ``Maker``)."""
    found = library()
    comm = Comm(found, device.index, ranks)
    ident = share(found.new_id() if me == ranks[0] else bytes(ID_BYTES))
    comm.connect(device, ident, list(ranks).index(me), max(timeout, TIMEOUTS.connecting))
    return comm
