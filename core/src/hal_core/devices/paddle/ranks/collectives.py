"""Collectives of devices with Paddle memory: one broadcast of one slice, through ``paddle.distributed``.

Over gloo (the CPU place) that is :class:`PaddleCommunicator`. Device libraries (XCCL, BKCL) queue their work on the
stream and return; this module watches it. Paddle has no call to abort them. If a rank is lost, the ticket raises
:class:`hal_core.errors.GroupLost` within the timeout, and the process must be ended. (The cuda device calls NCCL
itself, and creates its groups by ``make_group``.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from ....ranks.watchdog import Watchdog
from ....tickets import Mode, Ticket
from ...primitives import poll
from ..memory import PaddleMemory, Tensor
from .groups import OpenGroup, PaddleCommunicator, TensorOf, open_groups, opened
from .world import exchange

if TYPE_CHECKING:
    from ....group import Group
    from ....memory.views import ByteRange, Memory
    from ....ranks.communicator import Communicator
    from ....streams import Event, Stream


class CollectiveDevice(Protocol):
    """The device calls around a collective of Paddle."""

    @property
    def place(self) -> Any:  # noqa: ANN401 (a Paddle place)
        """The place of its tensors."""

    @property
    def default_stream(self) -> Stream:
        """The stream on which Paddle computes."""

    def before_write(self, memory: Any, stream: Any) -> None:  # noqa: ANN401 (the device's own)
        """Order a write on ``stream`` after pending reads of the memory."""

    def current(self, stream: Any) -> AbstractContextManager[None]:  # noqa: ANN401 (the device's own)
        """Make Paddle's work within the context follow the order of ``stream``."""

    def after_work(self, stream: Any, keep: object) -> tuple[Event, Ticket]:  # noqa: ANN401 (the device's own)
        """Return the event and the ticket of the work just queued on ``stream``; ``keep`` must live until it is
        done."""

    def count(self, name: str, by: int = 1) -> None:
        """Add to one of the device's counts."""


class CollectiveTicket(Ticket):
    """A broadcast in flight: done when its event has passed, failed when the watchdog has given the group up.

    An event also passes when a library gives a collective up, without an error (the runtime keeps the error for the
    next wait of a stream). So the watchdog decides: if a group was given up, its data does not count as sent.
    """

    __slots__ = ("_error", "_event", "_number", "_watchdog", "mode")

    def __init__(self, event: Event, watchdog: Watchdog, mode: Mode, number: int) -> None:
        """``number``: the watchdog's call that has ended, with all before it, when the event has passed."""
        super().__init__()
        self._event, self._watchdog, self._number = event, watchdog, number
        self._error: BaseException | None = None
        self.mode: Mode = mode

    def done(self) -> bool:
        if self._error is not None:
            return True
        try:
            passed = self._event.done()
        except Exception as error:  # noqa: BLE001 (kept for wait() and the next hook: done() never raises)
            self._error = self._watchdog.failed(error)
            return True
        if self._watchdog.reason:
            self._error = self._watchdog.error(self._watchdog.reason)
            return True
        if passed:
            self._watchdog.end(self._number)
        return passed

    def _block(self, timeout: float | None) -> bool:
        return poll(self.done, timeout)

    def failure(self) -> BaseException | None:
        return self._error


class DeviceCommunicator(PaddleCommunicator):
    """One group on one device, over its own library; see :class:`hal_core.ranks.communicator.Communicator`."""

    def __init__(self, device: CollectiveDevice, group: Group, open_group: OpenGroup, tensor_of: TensorOf) -> None:
        super().__init__(group, open_group, tensor_of)
        self._device = device

    @property
    def lost(self) -> str:
        """The reason why the group was given up, or "". Work on the device that waits for it never ends."""
        return self._open.watchdog.reason

    def broadcast(self, memory: Memory, part: ByteRange, stream: Stream) -> Ticket:
        """Make ``part`` equal to that of the group's first rank, in one collective, in place."""
        self._device.before_write(memory, stream)
        ticket = self._collective(self._tensor(memory, part), self._source, stream, memory)
        self._device.count("collectives")
        return ticket

    def exchange(self, block: bytes) -> Mapping[int, bytes]:
        """Return every rank's block, by global rank."""
        stream = self._device.default_stream
        # Paddle's own copies wait for the stream without limit, and a collective that is still on it may never end.
        event, ticket = self._device.after_work(stream, None)
        CollectiveTicket(event, self._open.watchdog, ticket.mode, self._open.watchdog.calls).wait()

        def send(tensor: Tensor, source: int) -> None:
            self._collective(tensor, source, stream, tensor).wait()

        with _on(self._device):
            return exchange(block, self.group.rank, self._open.ranks, send, self._device.place)

    def _collective(self, tensor: Tensor, source: int, stream: Stream, keep: object) -> CollectiveTicket:
        """Queue one broadcast on the stream; ``keep`` lives until it is done."""
        watchdog = self._open.watchdog
        number = watchdog.begin()
        try:
            with self._device.current(stream):
                self._open.start(tensor, source)
            event, ticket = self._device.after_work(stream, keep)
        except Exception as error:  # the library's own error types differ
            raise watchdog.failed(error) from error
        return CollectiveTicket(event, watchdog, ticket.mode, number)


@contextmanager
def _on(device: CollectiveDevice, named: str = "") -> Iterator[None]:
    """Make Paddle create new tensors on the device, as it does for collectives; ``named``: Paddle's name of the
    device."""
    import paddle

    before = paddle.get_device()
    paddle.set_device(named or str(device.place).removeprefix("Place(").removesuffix(")"))
    try:
        yield
    finally:
        paddle.set_device(before)


def open_collectives(
    device: CollectiveDevice,
    group: Group,
    backend: str,
    timeout: float | None = None,
    tensor_of: TensorOf | None = None,
) -> Communicator:
    """Open the group over gloo, or over the device's own library; see :func:`hal_core.devices.open_groups`.

    ``tensor_of``: for memory that is not a :class:`hal_core.devices.paddle.memory.PaddleMemory`.
    """
    made = tensor_of or _bytes
    if backend == "gloo":
        return PaddleCommunicator(group, opened(group), made)
    with _on(device):
        return DeviceCommunicator(device, group, opened(group, backend=backend, timeout=timeout), made)


def open_job(device: Any, groups: Sequence[Sequence[int]], *, timeout: float | None = None) -> None:  # noqa: ANN401 (a device)
    """Open groups of global ranks over gloo and over the device's library.

    The device opens them if it has ``make_group``. Paddle also opens them, for a model's tensors, if it has the library
    (a device that makes groups itself reports this by ``paddle_has_library``).

    ``device``: opened, bound or not. Every rank of the job makes the same call, whether or not it is a member; see
    :func:`hal_core.devices.open_groups`.
    """
    open_groups(groups, timeout=timeout)
    device = getattr(device, "device", device)
    make = getattr(device, "make_group", None)
    if make is not None:
        open_groups(groups, backend=device.groups_by, timeout=timeout, make=make)
    kind = _KINDS.get(device.capabilities.collective)
    if kind is not None and getattr(device, "paddle_has_library", True):
        with _on(device, f"{kind}:{device.index}" if kind else ""):
            open_groups(groups, backend=device.capabilities.collective, timeout=timeout)


_KINDS = {"nccl": "gpu", "bkcl": "", "xccl": ""}
"""Library to the kind of Paddle device for it; "" if a device over Paddle itself gives its place."""


def _bytes(memory: Memory, part: ByteRange) -> Tensor:
    assert isinstance(memory, PaddleMemory)
    return memory.bytes(part.offset, part.nbytes)
