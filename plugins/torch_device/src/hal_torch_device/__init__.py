"""Devices of hal over a backend of torch: a class of a few lines for each of torch's device types.

    class NpuPlugin(TorchPlugin):
        name = "npu"
        kind = "npu"
        backend = "torch_npu"
        cure = "install torch_npu, and the torch that it is made for"

What a backend can do is tried when the device is opened. Its module imports the standard library and light parts of
``hal_core`` alone, as a plugin class must.

- ``device``, ``primitives``: the asynchronous base over torch's streams, events and tensors.
- ``moves``: write plans as copies, fills and in-place scatters; ``stepping``: ``update_inputs`` as torch operations.
- ``cuda``: what streams of CUDA need besides.
- ``queues``: the substitute ``queue``, in which worker threads play the streams of a chip.
- ``conformance``: support of such devices for the conformance kit.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from hal_core import Probe
from hal_core.devices import SubstitutablePlugin

if TYPE_CHECKING:
    from hal_core import Device


class TorchPlugin(SubstitutablePlugin):
    """Base of plugin classes over torch.

    ``kind``: torch's device type. ``backend``: the package that registers it ("torch_npu"), or "" for torch's own.
    ``cure``: what to install. ``without``: the part of torch's version that says that it has no such type ("+cpu").
    ``stand_ins``: torch's CPU in the chip's place, as it is ("cpu", synchronous) or on worker threads ("queue").
    """

    cure: ClassVar[str]
    backend: ClassVar[str] = ""
    without: ClassVar[str] = ""
    stand_ins: ClassVar[Mapping[str, str]] = MappingProxyType({"cpu": "", "queue": ""})

    @classmethod
    def count(cls) -> int:
        """Return the number of chips in torch; each process has its own substitute, and host memory."""
        if cls.substituted() or cls.kind == "cpu":
            return 0
        from .device import module_of

        return int(module_of(cls).device_count())

    @classmethod
    def probe(cls) -> Probe:
        """Look for torch and the backend, in files; ``open`` looks for the chip."""
        if (refusal := cls.unknown_substitute()) is not None:
            return refusal
        try:
            torch = version("torch")
        except PackageNotFoundError:
            return Probe.no("torch is not installed", cls.cure)
        if substitute := cls.substituted():
            return Probe.yes(f"substituted: {substitute}, no chip is used")
        if cls.backend and find_spec(cls.backend) is None:
            return Probe.no(f"{cls.backend} is not installed", cls.cure)
        if cls.without and cls.without in torch:
            return Probe.no(f"torch {torch} is built without {cls.kind}", cls.cure)
        return Probe.yes(f"torch {torch}; what it can do on {cls.kind} is tried when the device is opened")

    @classmethod
    def make(cls, index: int, options: Mapping[str, object]) -> Device:
        """Return the device; a plugin with kernels of its own overrides this."""
        from .device import TorchDevice
        from .queues import QueueDevice

        chosen = QueueDevice if cls.substituted() == "queue" else TorchDevice
        return chosen(cls, index, options)

    @classmethod
    def new_stream(cls, device: Any) -> Any:  # noqa: ANN401 (torch's)
        """Return a new stream of ``device`` (a ``torch.device``) that nobody else has.

        Override it where the backend hands out its streams in turn from a pool: two users of one stream wait for each
        other, and a held one holds both.
        """
        import torch

        return torch.Stream(device=device)


class TorchCpu(TorchPlugin):
    """torch's CPU, which records no events: each call is done when it returns."""

    name = "torch_cpu"
    kind = "cpu"
    cure = "install torch"


class TorchCuda(TorchPlugin):
    """A GPU by torch alone; chosen by name. The device ``cuda`` is faster there."""

    name = "torch_cuda"
    kind = "cuda"
    cure = "install a torch build with CUDA"
    without = "+cpu"
    resource = "GPU"

    @classmethod
    def new_stream(cls, device: Any) -> Any:  # noqa: ANN401 (torch's)
        """Return a stream of the driver: torch hands out its own in turn from 32 a device (c10/cuda/CUDAStream.h)."""
        from .cuda import new_stream

        return new_stream(device)
