"""Transfer of keys and values between workers (``hal_core.handover``), over channels."""

from __future__ import annotations

from hal_engine.handover.choosing import TransferSetup, make_transfer
from hal_engine.handover.socket_wire import open_transfer

__all__ = ["TransferSetup", "make_transfer", "open_transfer"]
