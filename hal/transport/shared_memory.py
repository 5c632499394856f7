"""Large frames in shared memory, over iceoryx2: one queue a session, which its reader makes and its sink fills.

A frame is written once, into memory that the sink has borrowed, and decoded where it lies. Words about it travel over
ZeroMQ (:mod:`hal.transport.protocol`), and so does every frame that finds no room here. iceoryx2 is an extra, [shm].
:mod:`hal.transport.shared_queue` is the reader's side.

Ports, and the samples that records are views of, count in memory that both processes share. A forked child must not
count for its parent, so there they are never freed.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import weakref
from pathlib import Path
from typing import Any

from hal_core import HalError, Unavailable

from hal.transport import domains
from hal.transport.large import Parts

#: Samples that wait for the reader, and samples that it may hold: records that are views of them, one that is looked
#: at, and one that came before its turn.
QUEUED, VIEWS = 4, 4
BORROWED = VIEWS + 2
SLOTS = QUEUED + BORROWED + 1  #: of a sink; in one more it writes
_LEAST_SLOT = 1 << 17  #: bytes
_log = logging.getLogger("hal.transport")
owned: weakref.WeakSet[Any] = weakref.WeakSet()  #: whoever has something that a forked child must not free


def library() -> Any:  # noqa: ANN401  # iceoryx2 has no types
    """Return the module iceoryx2. Raises Unavailable where it is not installed."""
    silent = "iceoryx2" not in sys.modules  # else its user has set what it tells
    try:
        import iceoryx2
    except ImportError as error:
        cure = "pip install 'iceoryx2>=0.10,<0.11' (wheels: x86-64 Linux, glibc 2.34), or use ipc:// on both sides"
        raise Unavailable(f"no shared memory without iceoryx2: {error}", cure=cure, argument="url") from error
    if silent:  # what fails is raised, so it need not be on stderr too
        iceoryx2.set_log_level_from_env_or(iceoryx2.LogLevel.Fatal)
    return iceoryx2


def errors(iox: Any) -> tuple[type[BaseException], ...]:  # noqa: ANN401
    """What iceoryx2 raises when ports are made or used, what the system does, and we do."""
    names = "NodeCreationFailure PublishSubscribeCreateError PublishSubscribeOpenError PublisherCreateError "
    names += "SubscriberCreateError LoanError SendError ReceiveError ConnectionFailure SemanticStringError"
    return (HalError, OSError, *(getattr(iox, name) for name in names.split()))


def make_node(iox: Any, name: str, folder: Path) -> Any:  # noqa: ANN401
    domains.check_room()
    config = iox.config.default()
    config.global_cfg.root_path = iox.Path.new(str(folder))
    config.global_cfg.prefix = iox.FileName.new(domains.prefix_of(name))
    builder = iox.NodeBuilder.new().config(config)
    node = builder.signal_handling_mode(iox.SignalHandlingMode.Disabled).create(iox.ServiceType.Ipc)
    for path in domains.MEMORY.glob(f"{domains.prefix_of(name)}*.global_mgmt"):
        if path.stat().st_mode & 0o077:
            path.chmod(0o600)  # the one file that iceoryx2 makes for everybody
    return node


def builder_of(iox: Any, node: Any, session: int) -> Any:  # noqa: ANN401
    name = iox.ServiceName.new(f"{session:016x}")
    return node.service_builder(name).publish_subscribe(iox.Slice[ctypes.c_uint8])


_Bytes = ctypes.c_ubyte * (1 << 40)  #: of a length that no view has; a type for each length would be made anew


class Loan:
    """Memory that belongs to a sample: alive as long as something views it."""

    __slots__ = ("__weakref__", "sample")
    owns = ("sample",)  #: what a forked child must not free

    def __init__(self, sample: Any) -> None:  # noqa: ANN401
        self.sample = sample
        owned.add(self)

    def view(self, length: int) -> memoryview:
        """Return the first ``length`` bytes."""
        memory = _Bytes.from_address(self.sample.payload_ptr)
        memory._loan = self  # type: ignore[attr-defined]  # the view keeps the memory, and this what it lies in
        return memoryview(memory).cast("B")[:length]


class SharedSender:
    """The sink's side, for its thread alone. Its slots have at most ``most`` bytes together."""

    owns = ("_publisher", "_service", "_node")

    def __init__(self, socket: Path, session: int, most: int) -> None:
        self._iox = library()
        self._errors = errors(self._iox)
        self._socket, self._session, self._most = socket, session, most
        self._name: str | None = None  # the reader's domain, "" for none
        self._usable = False
        self._node: Any = None
        self._service: Any = None
        self._publisher: Any = None
        self._slot = self._wanted = 0  # bytes; what is wanted, but has to wait
        self._laid = 0  # the last frame in these slots
        self._folder: Path | None = None  # of the domain, once it was found to be one
        self.sent = 0  #: frames
        owned.add(self)

    def follow(self, name: str) -> None:
        """Use the domain that the reader's cursor names, "" for none."""
        if name != self._name:
            self.close()
            self._name, self._usable = name, True
            if not name:
                self._refuse("the reader takes none: open it with a shm:// url too")

    def offer(self, frame: Parts, sequence: int, unacknowledged: int) -> bool:
        """Lay the frame of that number where the reader finds it. False: it has to travel as bytes.

        ``unacknowledged`` is the first frame that the reader has not acknowledged.
        """
        if not self._usable:
            return False
        try:
            if not self._has_slots(len(frame), unacknowledged):
                return False
            loan = self._publisher.loan_slice_uninit(len(frame))
            frame.write_to(Loan(loan).view(len(frame)))
            taken = loan.assume_init().send()
        except self._errors as error:
            self._refuse(str(error))
            return False
        if taken:
            self.sent, self._laid = self.sent + 1, sequence
        return bool(taken)

    def close(self) -> None:
        """Give everything back. What the reader has not taken out yet is gone for it, and comes as bytes."""
        self._close_publisher()
        self._service = self._node = self._folder = None

    def _close_publisher(self) -> None:
        if self._publisher is not None:
            self._publisher.delete()
            self._publisher, self._slot, self._wanted, self._laid = None, 0, 0, 0

    def _has_slots(self, length: int, unacknowledged: int) -> bool:
        """Whether there are slots of ``length`` bytes; made anew where they are smaller and may grow.

        What lies in the former ones goes with them, so first the reader has to acknowledge it. Until then nothing is
        laid there any more, or that might never come to an end.
        """
        slot = max(_LEAST_SLOT, 1 << (length - 1).bit_length())
        if slot * SLOTS > self._most:
            return False
        self._wanted = max(self._wanted, slot)
        if self._wanted > self._slot:
            if self._laid >= unacknowledged:
                return False
            self._open(self._wanted)
        return True

    def _open(self, slot: int) -> None:
        """Make slots of so many bytes, in place of those that are there. Raises what :func:`errors` names."""
        iox, name = self._iox, self._name or ""
        self._folder = domains.folder_of(self._socket, name)  # iceoryx2 would make one that was removed again
        if self._service is None:
            self._node = make_node(iox, name, self._folder)
            self._service = builder_of(iox, self._node, self._session).open()
        self._close_publisher()
        domains.check_room(slot * SLOTS)
        builder = self._service.publisher_builder().initial_max_slice_len(slot).max_loaned_samples(1)
        builder = builder.allocation_strategy(iox.AllocationStrategy.Static)
        self._publisher = builder.backpressure_strategy(iox.BackpressureStrategy.DiscardData).create()
        self._reserve(slot)
        domains.folder_of(self._socket, name)  # removed meanwhile: the files are too, or _refuse() does it
        self._slot = self._wanted = slot

    def _reserve(self, slot: int) -> None:
        """Have the kernel give the memory now: where there is too little, a write would end the process (SIGBUS)."""
        pattern = f"{domains.prefix_of(self._name or '')}*_{self._publisher.id.value}.data"
        found = list(domains.MEMORY.glob(pattern))
        if len(found) != 1:
            raise Unavailable(f"{len(found)} files {pattern} in {domains.MEMORY}", cure="iceoryx2 0.10")
        descriptor = os.open(found[0], os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, os.fstat(descriptor).st_size)
        except OSError as error:
            raise Unavailable(f"{domains.MEMORY} has no room for {SLOTS} slots of {slot} bytes: {error}") from error
        finally:
            os.close(descriptor)

    def _refuse(self, why: str) -> None:
        """Frames go through the socket as long as the reader keeps this domain; said once for each."""
        folder = self._folder
        self._usable = False
        self.close()
        if folder is not None:
            domains.remove_if_revived(folder)
        _log.warning("no shared memory for %s, large frames go through the socket: %s", self._socket, why)


def _keep_in_child() -> None:
    """In a forked child: freeing a port removes the parent's files, freeing a sample hands its memory out again.

    A sample's bytes can be read in the child, but only until the parent drops its own: then the worker writes there.
    """
    for owner in list(owned):
        for name in owner.owns:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(getattr(owner, name)))
            if not isinstance(owner, Loan):
                setattr(owner, name, None)
        if hasattr(owner, "leave"):  # the lock of a domain
            owner.leave()


os.register_at_fork(after_in_child=_keep_in_child)
