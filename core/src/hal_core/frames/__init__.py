"""Records as bytes, and what transports and readers of them share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import face

if TYPE_CHECKING:
    from ..output.sinks import PendingOutput as PendingOutput
    from ..output.sinks import is_ready as is_ready
    from ..output.sinks import new_session as new_session
    from ..output.sinks import complete_with as complete_with
    from ..output.sinks import unknown as unknown
    from ..output.sinks import unresolved as unresolved
    from .bodies import Part as Part
    from .envelope import Frame as Frame
    from .envelope import FrameHeader as FrameHeader
    from .envelope import FrameKind as FrameKind
    from .envelope import decode as decode
    from .envelope import decode_frame as decode_frame
    from .envelope import encode as encode
    from .envelope import read_body as read_body
    from .envelope import seal as seal
    from .envelope import split as split

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "hal_core.frames.bodies": "Part",
        "hal_core.frames.envelope": """
            Frame FrameHeader FrameKind decode decode_frame encode read_body seal split
            """,
        "hal_core.output.sinks": "PendingOutput is_ready new_session complete_with unknown unresolved",
    },
)
