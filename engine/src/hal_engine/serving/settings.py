"""What a server is asked to be."""

from __future__ import annotations

from dataclasses import dataclass, field

from .browsers import Allowed


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Limits and names of a server.

    - ``model``: the name in ``/v1/models``, and the only one that requests may give.
    - ``api_key``: what requests have to bring as a bearer token; "" if none.
    - ``lenient``: ignore fields of requests that are not offered, in place of refusing them by name.
    - ``body_bytes``: largest body of a request.
    - ``choices``: most answers of one request, its prompts times ``n``; at most as many as the engine has room for.
    - ``allowed``: which requests of web pages are taken.
    """

    model: str
    api_key: str = ""
    lenient: bool = False
    body_bytes: int = 4 << 20
    choices: int = 128
    allowed: Allowed = field(default_factory=Allowed)
