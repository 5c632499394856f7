"""NCCL itself: the library, found at run time, and one communicator of it for each group of this process.

No toolkit and no framework is needed for it: the library that the process has loaded is used, else that of the package
``nvidia-nccl``, else the one on the library path; ``HAL_CUDA_NCCL`` names another. (The package comes before the path,
because torch and Paddle want theirs, and a process has one library of a name.)
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

from hal_core import GroupLost, HalError, Unavailable
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
CONNECTING = 60.0
"""Seconds, at least, in which the ranks of a group must have found each other: NCCL's start alone takes some."""
ENDING = 5.0
"""Seconds that NCCL may take to give a communicator up, or back, before one goes on without."""
UNDEFINED = -(1 << 31)


class NcclError(HalError, RuntimeError):
    """A call of NCCL failed."""


class Id(ctypes.Structure):
    """``ncclUniqueId``, which is passed by value."""

    _fields_ = [("internal", ctypes.c_char * ID_BYTES)]


class Config(ctypes.Structure):
    """``ncclConfig_t`` as of NCCL 2.17; a later library takes what it lacks for undefined.

    One channel is enough for what is sent, and leaves the worker the memory of all others. The communicator blocks: of
    one that does not, some versions start a thread for each collective, and it may be late on the stream.
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
        """One that blocks, with one channel."""
        return cls(ctypes.sizeof(cls), 0xCAFEBEEF, 21700, 1, UNDEFINED, 1, 1, None)


class Library:
    """NCCL's functions. ``version`` as NCCL counts (22809), ``path`` where it was found."""

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
            # with the interpreter's lock kept: it only looks, and nobody frees the communicator meanwhile
            self.async_error = ctypes.PyDLL(None, handle=loaded._handle).ncclCommGetAsyncError
            self._text, self._last = loaded.ncclGetErrorString, loaded.ncclGetLastError
            loaded.ncclGetVersion(ctypes.byref(number))
        except AttributeError as error:
            raise Unavailable(f"{path} is no NCCL of today: {error}", cure=CURE, device="cuda") from error
        self.version = number.value
        if self.version < OLDEST:
            raise Unavailable(f"NCCL {self.told} ({path}) is older than 2.18", cure=CURE, device="cuda")
        self._init.argtypes = [ctypes.POINTER(handle), ctypes.c_int, Id, ctypes.c_int, ctypes.POINTER(Config)]
        self.broadcast.argtypes = [handle, handle, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, handle, handle]
        self.abort.argtypes = self.destroy.argtypes = self._last.argtypes = [handle]
        self.async_error.argtypes = [handle, ctypes.POINTER(ctypes.c_int)]
        self._text.restype = self._last.restype = ctypes.c_char_p

    @property
    def told(self) -> str:
        """The version in words."""
        return f"{self.version // 10000}.{self.version // 100 % 100}.{self.version % 100}"

    def address(self, name: str) -> int:
        """Of a function, for native calls."""
        return int(ctypes.cast(getattr(self, name), ctypes.c_void_p).value or 0)

    def check(self, status: int, call: str) -> None:
        """Raise :class:`NcclError` for a status that is not success."""
        if status:
            text, last = self._text(status) or b"", self._last(None) or b""
            said = ": ".join(filter(None, (text.decode(errors="replace"), last.decode(errors="replace").strip())))
            raise NcclError(f"{call}: {said}", cure="NCCL_DEBUG=INFO says what NCCL does", device="cuda")

    def new_id(self) -> bytes:
        """What the ranks of a new communicator find each other by."""
        made = Id()
        self.check(self._get_id(ctypes.byref(made)), "ncclGetUniqueId")
        return bytes(made)

    def init(self, handle: ctypes.c_void_p, ident: bytes, size: int, place: int) -> None:
        """Make this rank's communicator, on the GPU whose context is current; waits for the others."""
        config = Config.made()
        status = self._init(ctypes.byref(handle), size, Id.from_buffer_copy(ident), place, ctypes.byref(config))
        self.check(status, "ncclCommInitRankConfig")


def _places() -> list[str]:
    """Where the library may be, in the order in which it is looked for."""
    if named := os.environ.get(VARIABLE):
        return [named]
    packages = [Path(folder or ".") / "nvidia/nccl/lib" / NAME for folder in sys.path]
    return [*[str(file) for file in packages if file.is_file()], NAME]


@cache
def library() -> Library:
    """NCCL, loaded. Raises :class:`Unavailable` where there is none."""
    if not os.environ.get(VARIABLE):
        try:
            return Library(ctypes.CDLL(NAME, mode=os.RTLD_NOLOAD), f"{NAME}, loaded before")
        except OSError:
            pass  # nobody has loaded it yet
    why = ""
    for place in _places():
        try:
            return Library(ctypes.CDLL(place), place)
        except OSError as error:
            why = str(error)
    raise Unavailable(f"NCCL does not load: {why}", cure=CURE, device="cuda", argument="group")


def described() -> str:
    """Which NCCL there is, or that there is none, in a few words."""
    try:
        found = library()
    except Unavailable as error:
        return f"no ranks: {error.what} ({error.cure})"
    return f"NCCL {found.told} ({found.path})"


class Comm:
    """One rank's part in a group: made with all its ranks, kept for the process, given up by the watchdog.

    ``index``: the GPU. ``lock``: held around each call that uses ``handle``, which is 0 once it was given up or back.
    """

    def __init__(self, found: Library, index: int, ranks: Sequence[int]) -> None:
        self.library, self.index, self.ranks = found, index, tuple(ranks)
        self.lock, self.handle = threading.Lock(), 0
        self._ended, self._until = threading.Event(), 0.0
        self._code = ctypes.c_int()
        self._told = ctypes.byref(self._code)

    @property
    def ended(self) -> bool:
        """Whether nothing waits for the group any more, on the device neither."""
        return self._ended.is_set()

    @property
    def settled(self) -> bool:
        """Of a group that is given up: whether NCCL has ended what waits, or takes longer than it may.

        Before that nobody hears of the loss. Whoever heard of it could wait for the stream with the interpreter's lock
        kept, as Paddle does when it makes a tensor, and the thread that lets the stream go on could not run.
        """
        return self._ended.is_set() or 0.0 < self._until < monotonic()

    def settle(self) -> None:
        """Wait until it is :attr:`settled`, ``ENDING`` at most."""
        poll(lambda: self.settled, ENDING)

    def connect(self, device: OnGpu, ident: bytes, place: int, timeout: float) -> None:
        """Make the communicator, and the first collective: NCCL connects the ranks only then. All are here now.

        NCCL waits for a rank that does not come without end. So a thread makes the calls; after ``timeout`` seconds
        :class:`GroupLost` is raised, and the thread stays behind.
        """
        deadline, met = monotonic() + timeout, []
        made, memory, stream = ctypes.c_void_p(), device.primitives.allocate(ID_BYTES), device.stream()

        def work() -> None:
            try:
                with device.context.entered(), device.driver.beside_captures():
                    self.library.init(made, ident, len(self.ranks), place)
                    self.handle = made.value or 0
                    self.broadcast(memory, ID_BYTES, 0, stream.handle)
            except Exception as error:  # noqa: BLE001 (raised by the caller)
                met.append(error)

        thread = threading.Thread(target=work, name="hal-nccl-connect", daemon=True)
        thread.start()
        thread.join(timeout)
        if met:
            self.abort()
            why = f"{self.ranks}: {met[0]}"
            cure = "see what NCCL says with NCCL_DEBUG=INFO, and that each rank of the group has a GPU of its own"
            raise GroupLost(f"the group {why}", cure=cure, device="cuda", argument="group") from met[0]
        if thread.is_alive() or not stream.record().wait(max(0.0, deadline - monotonic())):
            if not thread.is_alive():
                self.abort()
            raise GroupLost(
                f"the ranks of the group {self.ranks} did not find each other within {timeout:g} s",
                cure="see what became of the others (NCCL_DEBUG=INFO says what NCCL does), and that each rank of the "
                "group has a GPU of its own",
                device="cuda",
                argument="group",
            )
        device.primitives.free(memory)

    def broadcast(self, address: int, nbytes: int, source: int, stream: int) -> None:
        """One broadcast in place on a stream, from a place in the group."""
        with self.lock:
            if not self.handle:
                raise self.gone()
            status = self.library.broadcast(address, address, nbytes, UINT8, source, self.handle, stream)
        self.library.check(status, "ncclBroadcast")

    def gone(self) -> NcclError:
        """The error of a call without a communicator."""
        return NcclError("the communicator was given up", cure="open the group again", device="cuda")

    def failure(self) -> NcclError | None:
        """What NCCL itself has met since, in its own threads; None also while another call has the communicator."""
        if not self.lock.acquire(blocking=False):
            return None
        try:
            if not self.handle:
                return None
            status = self.library.async_error(self.handle, self._told) or self._code.value
        finally:
            self.lock.release()
        try:
            self.library.check(status, "NCCL met")
        except NcclError as error:
            return error
        return None

    def abort(self) -> None:
        """End what waits in NCCL, on the device too, whose streams go on. By a thread: it may wait for the device."""
        self._end_by_thread(self.library.abort)

    def close(self) -> None:
        """Give the communicator back; waits for that, but not for ever."""
        if self.handle and (thread := self._end_by_thread(self.library.destroy)):
            thread.join(ENDING)

    def _end_by_thread(self, call: Any) -> threading.Thread | None:  # noqa: ANN401 (a function of NCCL's)
        """None at the end of the process, which gives everything back: Python 3.12 starts no thread any more."""
        self._until = monotonic() + ENDING
        thread = threading.Thread(target=self._end, args=(call,), name="hal-nccl-end", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self._until = monotonic()
            return None
        return thread

    def _end(self, call: Any) -> None:  # noqa: ANN401 (a function of NCCL's)
        if not self.lock.acquire(timeout=ENDING):
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
    """The communicator of a group, as all its members make it together (``hal_core``'s ``Maker``)."""
    found = library()
    comm = Comm(found, device.index, ranks)
    ident = share(found.new_id() if me == ranks[0] else bytes(ID_BYTES))
    comm.connect(device, ident, list(ranks).index(me), max(timeout, CONNECTING))
    return comm
