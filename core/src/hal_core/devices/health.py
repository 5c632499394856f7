"""What a device met, and whether it may be used."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import DeviceClosed, HalError


class Health:
    """What the device met while it ran work that had been accepted, and whether it may be used at all.

    A fault counts for the whole device, as with CUDA: every ticket looked at from then on fails, and so does every
    later call.
    """

    def __init__(self, device: str, cure: str) -> None:
        self.device, self.cure = device, cure
        self.fault: Exception | None = None
        self.forked = self.unusable = False

    def met(self, error: Exception, spoils: Callable[[Exception], bool]) -> Exception:
        """Remember an error that an event told of, if it ends the device as ``spoils`` says; the error."""
        if isinstance(error, HalError):
            error.located(device=self.device)
        if self.fault is None and spoils(error):
            self.fault, self.unusable = error, True
        return error

    def check(self) -> None:
        """Raise when the device has met a fault, or is the copy in a fork's child."""
        if self.forked:
            raise DeviceClosed(
                "the device was opened before a fork, which its streams do not survive",
                cure="open a device in this process",
                device=self.device,
            )
        if self.fault is not None:
            what = self.fault.what if isinstance(self.fault, HalError) else repr(self.fault)
            raise DeviceClosed(f"earlier work failed while it ran: {what}", cure=self.cure, device=self.device)
