"""A GPU's primary context, shared with every framework, and its properties, queried once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hal_core import InvalidValue, Unavailable
from hal_core.devices import RingOptions

from .driver import Driver


@dataclass(frozen=True, slots=True)
class Options(RingOptions):
    """Options of ``open``: sizes of the ring of pinned memory; most bytes of pinned memory for staged requests (0: no
    staging); the framework's stream, or its handle (the field stores the handle)."""

    admission_limit: int = 64 << 20
    stream: int | None = None

    def __post_init__(self) -> None:
        RingOptions.__post_init__(self)
        if not isinstance(self.admission_limit, int) or self.admission_limit < 0:
            raise InvalidValue(
                f"admission_limit = {self.admission_limit!r}", cure="give bytes, 0 for none", argument="options"
            )
        if self.stream is not None:
            object.__setattr__(self, "stream", _handle(self.stream))


def _handle(stream: Any) -> int:  # noqa: ANN401 (a framework's)
    """Return the handle of an object with ``__cuda_stream__``, a torch or Paddle stream, or a handle itself."""
    protocol = getattr(stream, "__cuda_stream__", None)
    handle = protocol()[1] if callable(protocol) and not isinstance(stream, type) else stream
    handle = getattr(handle, "cuda_stream", handle)
    if type(handle) is not int or handle < 0:
        cure = "give a stream of a framework on this GPU, or its handle"
        raise InvalidValue(f"stream = {stream!r}", cure=cure, argument="options")
    return handle


@dataclass(frozen=True, slots=True)
class Context:
    """A GPU's primary context, retained and current; ``arch`` is its machine code ("sm_90")."""

    driver: Driver
    device: Any
    handle: Any
    arch: str

    @classmethod
    def open(cls, driver: Driver, index: int) -> Context:
        """Make GPU ``index`` current. Raise :class:`Unavailable`, or :class:`InvalidValue` for an index that does not
        exist."""
        api = driver.api
        try:
            driver.ok(api.cuInit(0), "cuInit")
            count = int(driver.ok(api.cuDeviceGetCount(), "cuDeviceGetCount"))
        except RuntimeError as error:
            raise Unavailable(str(error), cure="check nvidia-smi", device="cuda") from error
        if not 0 <= index < count:
            raise InvalidValue(
                f"index {index}, there are {count} GPUs",
                cure=f"give 0 to {count - 1}; CUDA_VISIBLE_DEVICES hides the other GPUs",
                device="cuda",
                argument="index",
            )
        device = driver.ok(api.cuDeviceGet(index), "cuDeviceGet")
        handle = driver.ok(api.cuDevicePrimaryCtxRetain(device), "cuDevicePrimaryCtxRetain")
        driver.ok(api.cuCtxSetCurrent(handle), "cuCtxSetCurrent")
        driver.use(int(handle))
        attribute = api.CUdevice_attribute
        major = driver.ok(
            api.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device), "attribute"
        )
        minor = driver.ok(
            api.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device), "attribute"
        )
        return cls(driver, device, handle, f"sm_{int(major)}{int(minor)}")

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make the context current in a ``with`` block, for threads with another context or none."""
        driver = self.driver
        driver.ok(driver.api.cuCtxPushCurrent(self.handle), "cuCtxPushCurrent")
        try:
            yield
        finally:
            driver.ok(driver.api.cuCtxPopCurrent(), "cuCtxPopCurrent")

    def make_pool(self) -> Any:  # noqa: ANN401 (a CUmemoryPool)
        """Return hal's own memory pool on this GPU, which returns unused memory to the system.

        Raises :class:`Unavailable` if the driver has no pools, as on some virtual GPUs.
        """
        driver, api = self.driver, self.driver.api
        properties = api.CUmemPoolProps()
        properties.allocType = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = int(self.device)
        try:
            return driver.ok(api.cuMemPoolCreate(properties), "cuMemPoolCreate")
        except RuntimeError as error:
            cure = "use a GPU and a driver with memory pools (CUDA 11.2 or later, no vGPU without them)"
            raise Unavailable(str(error), cure=cure, device="cuda") from error

    def make_host_pool(self) -> Any:  # noqa: ANN401 (a CUmemoryPool)
        """Return a pool of page-locked host memory that this GPU reads and writes; None if the driver has none."""
        driver, api = self.driver, self.driver.api
        kind = getattr(api.CUmemLocationType, "CU_MEM_LOCATION_TYPE_HOST", None)
        if kind is None:
            return None
        properties = api.CUmemPoolProps()
        properties.allocType = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = kind
        access = api.CUmemAccessDesc()
        access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = int(self.device)
        access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        status, *made = api.cuMemPoolCreate(properties)
        if status != driver.success:
            return None
        if api.cuMemPoolSetAccess(made[0], [access], 1)[0] != driver.success:
            api.cuMemPoolDestroy(made[0])
            return None
        return made[0]

    def check_stream(self, handle: int) -> int:
        """Return the handle. Raise :class:`InvalidValue` for a stream of another context."""
        if handle in (0, 1, 2):  # the default streams belong to the current context
            return handle
        owner = self.driver.ok(self.driver.api.cuStreamGetCtx(handle), "cuStreamGetCtx")
        if int(owner) != int(self.handle):
            raise InvalidValue(
                f"stream {handle:#x} belongs to another context",
                cure="give a stream of the GPU that was opened",
                device="cuda",
                argument="stream",
            )
        return handle

    def close(self) -> None:
        """Release the context."""
        self.driver.api.cuDevicePrimaryCtxRelease(self.device)
