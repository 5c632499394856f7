# Written by tools/faces.py from the table in __init__.py.
from ..output.sinks import PendingOutput as PendingOutput
from ..output.sinks import complete_with as complete_with
from ..output.sinks import entries_of as entries_of
from ..output.sinks import is_ready as is_ready
from ..output.sinks import new_session as new_session
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
