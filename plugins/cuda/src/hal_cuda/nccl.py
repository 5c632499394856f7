"""The communicator of a group over NCCL, through Paddle; ``hal_core.devices.paddle.ranks`` has what device libraries
share.

A broadcast is put on the stream and returns; its ticket is done when the GPU is. NCCL cannot be told to give up from
outside, so a rank that is lost leaves the stream waiting: the ticket then raises :class:`hal_core.errors.GroupLost`
within the timeout, every later call does so too, and the process has to be ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from hal_core import InvalidValue, Unavailable
from hal_core.devices import DEFAULT_TIMEOUT, open_collectives

from .frameworks import current_stream

if TYPE_CHECKING:
    from hal_core import ByteRange, Group
    from hal_core.devices import AsyncStream, AsyncTicket, Communicator, Memory, RecordedEvent

    from .base import OnGpu


_NOTHING = nullcontext()


class Collectives:
    """What the cuda device does around a collective (:class:`CollectiveDevice`)."""

    def __init__(self, device: OnGpu, place: Any) -> None:  # noqa: ANN401 (a Paddle place)
        self.device, self.place = device, place

    @property
    def default_stream(self) -> AsyncStream:
        """Paddle's current stream, whatever stream the device was opened with."""
        return self.device.stream_at(current_stream(self.device.index)[0])

    def before_write(self, memory: Memory, stream: Any) -> None:  # noqa: ANN401 (ours, or a framework's)
        """Let the collective wait for copies out that still read the memory: it writes there."""
        self.device.order_after_reads(stream, memory)

    def current(self, stream: Any) -> AbstractContextManager[None]:  # noqa: ANN401 (ours, or a framework's)
        """Paddle orders a collective by its own current stream: another waits for it, and it for the other."""
        own, paddles = self.device.own(stream), self.default_stream
        return _NOTHING if paddles.handle == own.handle else self._around(own, paddles)

    @contextmanager
    def _around(self, own: AsyncStream, paddles: AsyncStream) -> Iterator[None]:
        paddles.wait(own.record())
        yield
        own.wait(paddles.record())

    def after_work(self, stream: Any, keep: object) -> tuple[RecordedEvent, AsyncTicket]:  # noqa: ANN401 (ours, or another's)
        """The event after the collective. Paddle's allocator keeps memory until NCCL's own stream is done with it."""
        own = self.device.own(stream)
        event = self.device.mark(own)
        return event, self.device.ticket_type(event)

    def count(self, name: str, by: int = 1) -> None:
        """Add to one of the device's counts."""
        self.device.count(name, by)


def tensor_over(memory: Memory, part: ByteRange) -> Any:  # noqa: ANN401 (a Paddle tensor)
    """The part as uint8 that shares the memory: the whole int64 base that Paddle allocated, viewed, then sliced.

    That order is the one on which all Paddle versions agree. Not one byte behind the part is sent.
    """
    base = getattr(memory, "keep", None)
    if base is None or not hasattr(base, "data_ptr"):
        raise InvalidValue(
            "the state's memory is not Paddle's, and NCCL is reached through Paddle",
            cure="import a CUDA build of paddle before the state is made",
            argument="state",
        )
    return base.view("uint8")[part.offset : part.end]


def open_communicator(device: OnGpu, group: Group, timeout: float = DEFAULT_TIMEOUT) -> Communicator:
    """The group, which ``hal_core.devices.open_groups`` has opened, or which is all ranks of the job.

    All its ranks call this in one order, each with a GPU of its own.
    """
    try:
        import paddle
    except ImportError as error:
        raise Unavailable(
            f"NCCL is reached through Paddle, which does not import: {error}",
            cure="install a CUDA build of Paddle (paddlepaddle-gpu)",
            device="cuda",
            argument="group",
        ) from error
    if not paddle.is_compiled_with_cuda():
        raise Unavailable(
            "NCCL is reached through Paddle, and this Paddle is built without CUDA",
            cure="install paddlepaddle-gpu in place of paddlepaddle",
            device="cuda",
            argument="group",
        )
    collectives = Collectives(device, paddle.CUDAPlace(device.index))
    return open_collectives(collectives, group, "nccl", timeout, tensor_over)
