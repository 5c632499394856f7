"""Transfer of keys and values between workers (``hal_core.handover``): over ZeroMQ, from the paged cache."""

from __future__ import annotations

from hal.handover.choosing import TransferSetup, make_transfer
from hal.handover.socket_wire import open_transfer

__all__ = ["TransferSetup", "make_transfer", "open_transfer"]
