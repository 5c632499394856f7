"""Which requests of web pages a server takes.

Any page that a person opens can send requests to a server on the same machine. A browser tells of each what it is:
``Host`` is the name by which the page reaches the server (a foreign one, which leads to this machine, is an attack by
DNS), and ``Origin`` the server of the page itself.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from hal_core import InvalidValue
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError, error_response

ANY = "*"


@dataclass(frozen=True)
class Allowed:
    """``hosts``: names in ``Host`` beside those of loopback addresses; None: any. ``origins``: what ``Origin`` may be
    beside the server itself. Both may have ``*`` for any."""

    hosts: Sequence[str] | None = None
    origins: Sequence[str] = ()


class Browsers:
    """ASGI middleware: refuses requests for a foreign ``Host``, and those of a page of another ``Origin``."""

    def __init__(self, app: ASGIApp, *, allowed: Allowed) -> None:
        self._app, self._allowed = app, allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            try:
                self._check(headers.getlist("host"), headers.getlist("origin"))
            except ApiError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, hosts: Sequence[str], origins: Sequence[str]) -> None:
        for host in hosts:
            if not self._takes(host):
                what = f"Host is {host!r}, which is no name of this server (start it with --allowed-host NAME)"
                raise ApiError(403, what, code="host_not_allowed")
        for origin in origins:
            if not (ANY in self._allowed.origins or origin in self._allowed.origins or _is_of(origin, hosts)):
                what = f"the page of {origin!r} may not use this server (start it with --cors-origin ORIGIN)"
                raise ApiError(403, what, code="origin_not_allowed")

    def _takes(self, host: str) -> bool:
        known = self._allowed.hosts
        if known is None or ANY in known:
            return True
        name = _name_of(host)
        return is_loopback(name) or name in known


def is_loopback(name: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def host_name(given: str) -> str:
    """Return a name for :class:`Allowed`. Raises :class:`InvalidValue` for what no ``Host`` can be."""
    name = given if given == ANY else _name_of(given)
    if not name or name != given.lower().strip("[]"):
        raise InvalidValue(repr(given), cure="give a name without port, such as gpu.example", argument="--allowed-host")
    return name


def origin(given: str) -> str:
    """Return an origin for :class:`Allowed`. Raises :class:`InvalidValue` for what no ``Origin`` can be."""
    try:
        parts = urlsplit(given)
        is_one = bool(parts.scheme and parts.netloc) and given == f"{parts.scheme}://{parts.netloc}"
    except ValueError:
        is_one = False
    if not (is_one or given in (ANY, "null")):
        cure = "give a scheme and a host without a path, such as https://app.example"
        raise InvalidValue(repr(given), cure=cure, argument="--cors-origin")
    return given


def _name_of(host: str) -> str:
    """Return the name in ``Host``, without its port; "" if it is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_of(origin: str, hosts: Sequence[str]) -> bool:
    """Whether a page comes from the server itself."""
    scheme, _, place = origin.partition("://")
    return scheme in ("http", "https") and [place.lower()] == [host.lower() for host in hosts]
