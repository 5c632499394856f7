"""An HTTP server with OpenAI's routes over :class:`hal.AsyncEngine`."""

from __future__ import annotations

from .app import make_app
from .chat import ChatTemplate
from .drain import Drain
from .settings import Settings

__all__ = ["ChatTemplate", "Drain", "Settings", "make_app"]
