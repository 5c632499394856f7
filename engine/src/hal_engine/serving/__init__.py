"""An HTTP server with OpenAI's routes over :class:`hal.AsyncEngine`."""

from __future__ import annotations

from .app import Server
from .browsers import Allowed
from .chat import ChatTemplate
from .connection import Connection
from .drain import Drain
from .gate import Gate
from .limits import Limits
from .listening import Listening, Parts, check_path
from .readiness import Readiness
from .requests_log import formatter
from .settings import Settings

__all__ = [
    "Allowed",
    "ChatTemplate",
    "Connection",
    "Drain",
    "Gate",
    "Limits",
    "Listening",
    "Parts",
    "Readiness",
    "Server",
    "Settings",
    "check_path",
    "formatter",
]
