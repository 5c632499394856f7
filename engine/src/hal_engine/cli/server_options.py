"""Options of ``hal serve`` beside the engine's: where it listens, and what it takes of clients."""

from __future__ import annotations

import ssl
from typing import Annotated, Any

import msgspec
from hal_core import InvalidValue

from hal.cli.failures import check_seconds
from hal_engine.children import API_KEY
from hal_engine.options import option

FORMATS = ("off", "text", "json")
"""Values of ``--access-log``."""


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """Where the server listens, and what it takes of clients."""

    host: Annotated[str, option("Where to listen; one that is not this host's alone needs a key.", "ADDRESS")] = (
        "127.0.0.1"
    )
    port: Annotated[int, option("0: any free one.", "N")] = 8000
    api_key: Annotated[
        str | None,
        option("What clients send as a bearer token; ps shows the option, not the variable.", "KEY", variable=API_KEY),
    ] = None
    allowed_host: Annotated[
        list[str] | None, option("A name in Host that is taken beside this host's own; * for any.", "NAME")
    ] = None
    cors_origin: Annotated[
        list[str] | None, option("A web page that may use the server, such as https://app.example.", "ORIGIN")
    ] = None
    uds: Annotated[str | None, option("Listen on a Unix socket in place of --host and --port.", "PATH")] = None
    root_path: Annotated[
        str, option("The path under which a proxy has the server, which the proxy takes off, as /llm.", "PATH")
    ] = ""
    ssl_certfile: Annotated[str | None, option("Serve https with this certificate and its chain.", "FILE")] = None
    ssl_keyfile: Annotated[str | None, option("Its key, if that is in a file of its own.", "FILE")] = None
    ssl_ca_certs: Annotated[
        str | None, option("Take only clients with a certificate of these authorities.", "FILE")
    ] = None
    access_log: Annotated[str, option("A line for each request on standard output: off, text, or json.", "NAME")] = (
        "off"
    )
    name: Annotated[str | None, option("The model's name in requests.", "TEXT")] = None
    max_waiting: Annotated[int, option("Most requests that wait.", "N")] = 256
    drain: Annotated[float, option("For running requests, after SIGTERM.", "SECONDS")] = 30.0
    lenient: Annotated[bool, option("Ignore fields of requests that are not offered.", names=("--lenient",))] = False

    def __post_init__(self) -> None:
        check_seconds(self.drain, "--drain")
        for name, value, most in (("--port", self.port, 65535), ("--max-waiting", self.max_waiting, None)):
            if value < 0 or (most is not None and value > most):
                bounds = f"from 0 to {most}" if most is not None else "of at least 0"
                raise InvalidValue(f"{value}", cure=f"give a number {bounds}", argument=name)
        if self.access_log not in FORMATS:
            raise InvalidValue(f"{self.access_log!r}", cure=f"give {', '.join(FORMATS)}", argument="--access-log")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            cure = "give a path that begins with / and does not end with it, such as /llm"
            raise InvalidValue(repr(self.root_path), cure=cure, argument="--root-path")
        for name, given in (("--ssl-keyfile", self.ssl_keyfile), ("--ssl-ca-certs", self.ssl_ca_certs)):
            if given is not None and self.ssl_certfile is None:
                raise InvalidValue("it needs --ssl-certfile", cure="give that too, or leave it out", argument=name)

    def tls(self) -> dict[str, Any]:
        """Return uvicorn's options of TLS, {} for http. Raises :class:`InvalidValue` for files that it cannot use."""
        if self.ssl_certfile is None:
            return {}
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.ssl_ca_certs).load_cert_chain(
                self.ssl_certfile, self.ssl_keyfile, password=_no_password
            )
        except OSError as error:  # ssl.SSLError is one
            what = f"{self.ssl_certfile}: {error.strerror or error}"
            cure = "give a certificate and its key in PEM, without a password"
            raise InvalidValue(what, cure=cure, argument="--ssl-certfile") from error
        files = {"ssl_certfile": self.ssl_certfile, "ssl_keyfile": self.ssl_keyfile, "ssl_ca_certs": self.ssl_ca_certs}
        return files | ({"ssl_cert_reqs": ssl.CERT_REQUIRED} if self.ssl_ca_certs else {})


def _no_password() -> str:
    """Return none, where OpenSSL would ask for one at the terminal."""
    return ""
