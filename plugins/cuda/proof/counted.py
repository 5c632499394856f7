"""The fallback of the cuda device with its driver's calls counted below the plugin, for the conformance kit.

Native calls are not made through the bindings, so calls of the native path cannot be counted here.

The kit opens it by ``--hal-device-factory=counted:opened``, with this folder on the path of modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from hal_core import Counters
from hal_cuda.conformance import CudaSupport
from hal_cuda.device import CudaDevice
from hal_cuda.driver import Driver, load_bindings

UPLOADS = ("cuMemcpyHtoDAsync",)
LAUNCHES = ("cuLaunchKernel", "cuMemsetD32Async")
COPIES_OUT = ("cuMemcpyDtoHAsync",)
WAITS = ("cuEventSynchronize", "cuStreamSynchronize", "cuCtxSynchronize")


class CountedApi:
    """The bindings, counting every call by name."""

    def __init__(self, api: Any) -> None:  # noqa: ANN401 (the bindings' module)
        self._api, self.calls = api, Counter[str]()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (a call, a constant or a type)
        found = getattr(self._api, name)
        if not (name.startswith("cu") and callable(found)):
            return found

        def counted(*arguments: Any) -> Any:  # noqa: ANN401
            self.calls[name] += 1
            return found(*arguments)

        self.__dict__[name] = counted
        return counted


class CountedCudaDevice(CudaDevice):
    """The device with :meth:`probe_counts`; ``bindings`` replace the driver's own."""

    def __init__(self, index: int, options: Mapping[str, object], bindings: object = None) -> None:
        self._api = CountedApi(load_bindings() if bindings is None else bindings)
        super().__init__(index, options, Driver(self._api))

    def probe_counts(self) -> Counters:
        """Return the counts of calls that reached the driver since the device was opened."""
        calls = self._api.calls
        count: Callable[[tuple[str, ...]], int] = lambda names: sum(calls[name] for name in names)  # noqa: E731
        uploads, launches = count(UPLOADS), count(LAUNCHES)
        return Counters(
            submissions=uploads + launches,
            uploads=uploads,
            launches=launches,
            copies_out=count(COPIES_OUT),
            host_waits=count(WAITS),
        )


def opened() -> CountedCudaDevice:
    """Open the first GPU."""
    return CountedCudaDevice(0, {})


opened.support = CudaSupport  # type: ignore[attr-defined]  # read by the kit
