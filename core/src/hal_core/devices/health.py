"""Faults of a device, and whether it may still be used."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import DeviceClosed, HalError


class Health:
    """The device's fault while it ran accepted work, and whether the device may still be used.

    As with CUDA, a fault affects the whole device: from then on every checked ticket fails, and so does every later
    call. ``reported``: an error of the runtime's own has reached a caller, so closing need not raise it again.
    """

    def __init__(self, device: str, cure: str) -> None:
        self.device, self.cure = device, cure
        self.fault: Exception | None = None
        self.forked = self.unusable = self.reported = False

    def report(self, error: Exception, spoils: Callable[[Exception], bool]) -> Exception:
        """Take an error that an event gave, return it, and keep it as the device's fault if ``spoils`` says so."""
        if isinstance(error, HalError):
            error.located(device=self.device)
        if self.fault is None and spoils(error):
            self.fault, self.unusable = error, True
        return error

    def note_reported(self, error: BaseException) -> None:
        """Note that an error reaches a caller; those of the contract refuse one call, and are no fault."""
        self.reported = self.reported or not type(error).__module__.startswith("hal_core.")

    def check(self) -> None:
        """Raise if the device has a fault, or is the copy in a fork's child."""
        if self.forked:
            raise DeviceClosed(
                "the device was opened before a fork, which its streams do not survive",
                cure="open a device in this process",
                device=self.device,
            )
        if self.fault is not None:
            self.reported = True
            what = self.fault.what if isinstance(self.fault, HalError) else repr(self.fault)
            raise DeviceClosed(f"earlier work failed on the device: {what}", cure=self.cure, device=self.device)
