"""Records as bytes, and the code shared by transports and readers."""

from __future__ import annotations

from ..lazy import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "hal_core.frames.bodies": "Part",
        "hal_core.frames.envelope": """
            Frame FrameHeader FrameKind decode decode_frame encode read_body seal split
            """,
        "hal_core.output.sinks": "PendingOutput entries_of is_ready new_session complete_with unknown unresolved",
    },
)
