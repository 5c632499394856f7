"""Liars whose device continues after a fault, or whose steps hide that their output was lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hal_core.devices.framework_tensors import tensor_over
from hal_core.errors import DeviceClosed, OutOfMemory
from hal_core.runtime.policy import Policy

from . import Lie, Patch, liar

if TYPE_CHECKING:
    from hal_core.memory.views import Memory, View
    from hal_core.slots.state import SlotState


@liar(26, "a broken device still gives tensors over its state", requires="primitives")
class TensorsOfABrokenDevice(Lie):
    """The one call that does not use the driver."""

    def tensor(self, view: View, framework: str = "") -> Any:  # noqa: ANN401 (a framework's)
        """Make the tensor, whatever has happened."""
        return tensor_over(view, framework)


@liar(26, "a fault of the device is forgotten once a call has raised it", requires="primitives")
class FaultForgottenOnceRaised(Lie):
    """A runtime's last error, which is cleared by reading it."""

    def check_open(self) -> None:
        """Raise, and forget."""
        device: Any = self
        try:
            super().check_open()  # type: ignore[misc]
        except DeviceClosed:
            device.health.fault, device.health.unusable = None, False
            raise


@liar(26, "a step whose output was lost gives the record of the step before it")
class LostStepsRepeat(Patch):
    """The last good record is at hand."""

    seam = "host mirror"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Return the last record in place of an error."""
        last: list[Any] = []

        def take(state: SlotState, ticket: Any) -> Any:  # noqa: ANN401 (save_output's)
            try:
                last[:] = [true(state, ticket)]
            except RuntimeError:
                if not last:
                    raise
            return last[0]

        return take


@liar(26, "the error of a lost step is raised by the take of the next one")
class LostStepsAreLate(Patch):
    """An error state that is looked at before the wait."""

    seam = "host mirror"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Return an empty record now, and raise then."""
        met: list[RuntimeError] = []

        def take(state: SlotState, ticket: Any) -> Any:  # noqa: ANN401 (save_output's)
            if met:
                raise met.pop()
            try:
                return true(state, ticket)
            except RuntimeError as error:
                met.append(error)
                return None

        return take


# -- allocations that fail without an error of the contract -----------------------------------------------------------


@liar(26, "a library's MemoryError leaves the device's state() as it is")
class RawMemoryError(Policy):
    """``except OutOfMemory`` alone."""

    def state(self, *arguments: Any, **named: Any) -> SlotState:  # noqa: ANN401 (those of the core's)
        """Raise the library's own error."""
        try:
            return super().state(*arguments, **named)
        except OutOfMemory as error:
            if isinstance(error.__cause__, MemoryError) and not isinstance(error.__cause__, OutOfMemory):
                raise error.__cause__ from None
            raise


@liar(26, "memory of a state whose next allocation fails is never given back", requires="primitives")
class HalfStatesAreKept(Lie):
    """A list of allocations that only a whole state clears."""

    def allocate(self, nbytes: int) -> Memory:
        """Keep the memory before a refused allocation."""
        kept: list[Memory] = self.__dict__.setdefault("half", [])
        try:
            memory: Memory = super().allocate(nbytes)  # type: ignore[misc]
        except MemoryError:
            self.__dict__.setdefault("lost", []).extend(kept)
            raise
        kept[:] = [memory]
        return memory
