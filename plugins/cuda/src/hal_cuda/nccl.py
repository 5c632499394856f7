"""The communicator of a group over NCCL, through Paddle; ``hal_core.paddle.groups`` has what device libraries share.

A broadcast is put on the stream and returns; its ticket is done when the GPU is. NCCL cannot be told to give up from
outside, so a rank that is lost leaves the stream waiting: the ticket then raises :class:`hal_core.errors.GroupLost`
within the timeout, every later call does so too, and the process has to be ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hal_core.errors import InvalidValue, Unavailable
from hal_core.paddle import groups
from hal_core.paddle_world import DEFAULT_TIMEOUT

from .frameworks import current_stream
from .streams import CudaEvent, CudaStream, CudaTicket

if TYPE_CHECKING:
    from hal_core.device import Communicator, Stream
    from hal_core.group import Group
    from hal_core.layout import ByteRange
    from hal_core.views import Memory

    from .device import CudaDevice


class Collectives:
    """What the cuda device does around a collective (:class:`hal_core.paddle.groups.CollectiveDevice`)."""

    def __init__(self, device: CudaDevice, place: Any) -> None:  # noqa: ANN401 (a Paddle place)
        self.device, self.place = device, place

    @property
    def default_stream(self) -> Stream:
        """Paddle's current stream, whatever stream the device was opened with."""
        return self.device.wrap(current_stream(self.device.index)[0])

    def before_write(self, memory: object, stream: Any) -> None:  # noqa: ANN401 (ours, or a framework's)
        """Let the collective wait for copies out that still read the memory: it writes there."""
        self.device.reads.order(memory, self.device._own(stream))

    @contextmanager
    def current(self, stream: Any) -> Iterator[None]:  # noqa: ANN401 (ours, or a framework's)
        """Paddle orders a collective by its own current stream: another waits for it, and it for the other."""
        own, paddles = self.device._own(stream), self.default_stream
        if isinstance(paddles, CudaStream) and paddles.handle == own.handle:
            yield
            return
        paddles.wait(own.record())
        yield
        own.wait(paddles.record())

    def after_work(self, stream: Any, keep: object) -> tuple[CudaEvent, CudaTicket]:  # noqa: ANN401 (ours, or another's)
        """The event after the collective. Paddle's allocator keeps memory until NCCL's own stream is done with it."""
        own = self.device._own(stream)
        event = self.device.events.record(own.handle)
        return event, CudaTicket(event)

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


def open_communicator(device: CudaDevice, group: Group, timeout: float = DEFAULT_TIMEOUT) -> Communicator:
    """The group, which ``hal_core.paddle_groups.open_groups`` has opened, or which is all ranks of the job.

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
    return groups.open_communicator(collectives, group, "nccl", timeout, tensor_over)
