"""An HTTP server with OpenAI's routes over :class:`hal.AsyncEngine`."""

from __future__ import annotations

from .app import make_app
from .drain import Drain
from .settings import Settings

__all__ = ["Drain", "Settings", "make_app"]
