"""Transfer of a request's keys and values from one worker to another: the protocol and its implementation."""

from __future__ import annotations

from ..lazy import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "hal_core.handover.device_blocks": "DeviceBlocks",
        "hal_core.handover.facts": "FACTS check_facts facts_digest first_difference",
        "hal_core.handover.protocol": """
            Arrived BlockCache Cancelled Description Handover HandoverEvent HandoverKey KvTransfer PeerLost Rejected
            """,
        "hal_core.handover.transfer": "BlockTransfer Patience",
        "hal_core.handover.wire": "Wire",
    },
)
