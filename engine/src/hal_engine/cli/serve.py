"""``hal serve``: an HTTP server with OpenAI's routes."""

from __future__ import annotations

import ctypes
import errno
import logging
import math
import os
import socket
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from hal_core import HalError, InvalidValue, Unavailable

from hal.cli import logs, signals
from hal.cli.console import LineWriter, lines_by_thread, say
from hal.cli.failures import as_typed
from hal.cli.tree import name_origin
from hal_engine.children import API_KEY
from hal_engine.options import EngineOptions, engine_options

from .config_file import read_config
from .parameters import described, parameters, read, set_parameters, variable_of, was_given
from .server_options import Server

if TYPE_CHECKING:
    from hal_engine.serving import Allowed

_M_MMAP_THRESHOLD, _LARGE = -3, 128 << 10
"""Of malloc.h, and glibc's threshold, in bytes, until a larger block is freed: then it grows, and what was read of
bodies stays in the heap after their clients have left. Once it is set, it stays."""


def _take_config(context: typer.Context, path: str | None) -> str | None:
    """Have the file's values in place of defaults: the command line and the environment go before them."""
    if path:
        context.default_map = read_config(path, (Server, EngineOptions))
    return path


def command(
    ctx: typer.Context,
    config: Annotated[  # its values have become defaults
        str | None,
        typer.Option(
            metavar="FILE",
            help="Options from a TOML file, as port = 8000; HAL_SERVE_NAME in the environment goes before it.",
            envvar="HAL_SERVE_CONFIG",
            is_eager=True,
            callback=_take_config,
        ),
    ] = None,
    **given: Any,  # noqa: ANN401 (as the options say)
) -> None:
    """Serve a model over HTTP with OpenAI's routes: completions, chats, models; /health, /metrics and a page at /."""
    for name in sorted(_unknown_variables()):
        say(f"hal: {name} is the variable of no option, and ignored")
    wanted = Server(**read(Server, given))
    options = engine_options(read(EngineOptions, given))
    host, port, drain = wanted.host, wanted.port, wanted.drain
    key = "" if wanted.api_key is None else _checked_key(wanted.api_key)
    try:
        import uvicorn

        from hal_engine import serving
    except ImportError as error:
        what = f"{(error.name or str(error)).partition('.')[0]} is missing"
        raise Unavailable(what, cure="pip install 'paddle-hal[serve]>=1.1,<2'", argument="hal serve") from error
    allowed = _allowed(wanted, has_key=bool(key))
    if wanted.uds is not None:
        if unused := [name for name in ("host", "port") if was_given(ctx, name)]:
            raise InvalidValue("it contradicts --uds", cure="leave it out", argument=f"--{unused[0]}")
        serving.check_path(wanted.uds)
    from hal_engine.generation import AsyncEngine
    from hal_engine.generation.plan import ModelPlan
    from hal_engine.timeouts import TIMEOUTS

    with as_typed(model="--model"):
        plan = ModelPlan(options.model, options)
        setup = plan.serve(options, timed=True)
    if (template := serving.ChatTemplate(plan.path)).fault:
        say(f"hal: /v1/chat/completions is off: {template.fault}")
    shown = wanted.name or given["model"] or "default"
    settings = serving.Settings(model=shown, api_key=key, lenient=wanted.lenient, allowed=allowed)
    failures: list[HalError] = []

    def on_failure(error: HalError, ran: bool) -> None:
        say(f"hal: error: {name_origin(error, ctx)}")
        if not ran:
            failures.append(error)
            server.should_exit = True

    draining, gate, readiness = serving.Drain(drain), serving.Gate(serving.Limits.of_machine()), serving.Readiness(say)
    lines = None if wanted.access_log == "off" else LineWriter(sys.stdout, "standard output")
    line_of = serving.formatter(wanted.access_log)
    engine = AsyncEngine.of(plan, setup, wanted.max_waiting)
    app = serving.Server(
        engine,
        settings,
        template=template,
        drain=draining,
        gate=gate,
        on_failure=on_failure,
        on_ready=readiness.opened,
        log=None if lines is None else lambda fields: lines.put(line_of(fields)),
    ).app()
    settings_of_uvicorn = uvicorn.Config(
        app,
        host,
        port,
        uds=wanted.uds,
        root_path=wanted.root_path,
        forwarded_allow_ips=None if wanted.uds is None else "*",  # whoever may open the socket names the client
        **wanted.tls(),
        http=partial(serving.Connection, gate=gate),  # type: ignore[arg-type]  # a class, or what makes its instances
        ws="none",
        log_level="warning",
        log_config=None,
        access_log=False,
        lifespan="on",
        backlog=gate.limits.burst,
        timeout_keep_alive=math.ceil(TIMEOUTS.request_head),
        timeout_graceful_shutdown=math.ceil(drain + TIMEOUTS.last_event) + 1,  # of what ends in no other way
        server_header=False,
    )

    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
    kept = _ServerLog()
    parts = serving.Parts(title=shown, drain=draining, gate=gate, readiness=readiness, lines=lines, on_error=kept.keep)
    server = serving.Listening(settings_of_uvicorn, parts)
    logging.getLogger("uvicorn.error").addFilter(kept)
    signals.grace = drain
    try:
        with lines_by_thread(TIMEOUTS.shown), logs.of_libraries():
            server.run()
    except SystemExit:  # uvicorn's way to end if it cannot listen
        if kept.error is None:
            raise
        raise _cannot_listen(wanted, kept.error) from None
    finally:
        signals.grace = 0.0
    if failures:
        raise typer.Exit(2)


VARIABLES = "HAL_SERVE_"
"""The beginning of the variables of options: HAL_SERVE_PORT for ``--port``."""
set_parameters(command, parameters(Server, VARIABLES) | parameters(EngineOptions, VARIABLES), first=("model", "device"))


def _unknown_variables() -> set[str]:
    """Return those that look like an option's and are none's, as one that is misspelt."""
    options = {**described(Server), **described(EngineOptions)}
    known = {variable_of(name, meta, VARIABLES) for name, (_, meta) in options.items()}
    return {name for name in os.environ if name.startswith(VARIABLES)} - known - {f"{VARIABLES}CONFIG"}


class _ServerLog(logging.Filter):
    """Uvicorn's log, in hal's words. ``error``: why it cannot listen on the address, for the command's own line."""

    error: OSError | None = None

    def keep(self, error: OSError) -> None:
        """Keep an error that uvicorn raises and does not log."""
        self.error = error

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep the error instead of printing it."""
        if isinstance(record.msg, OSError):
            self.error = record.msg
        elif str(record.msg).startswith("ASGI callable returned without completing response"):
            record.msg = "a stream was cut off at the end of --drain"
        elif str(record.msg).startswith("Cancel ") and record.args == (0,):  # such a stream's last bytes are unsent
            return False
        return self.error is None


def _allowed(wanted: Server, *, has_key: bool) -> Allowed:
    """Return whose requests are taken. Raises :class:`InvalidValue` for an address of other hosts without a key.

    A page can be led to a loopback address by its name (``Host``), and to no Unix socket.
    """
    from hal_engine.serving.browsers import Allowed, host_name, is_loopback, origin

    is_loopback_address = wanted.uds is None and is_loopback(wanted.host)
    if wanted.uds is None and not is_loopback_address and not has_key:
        cure = f"set {API_KEY} to a key for clients, or give --api-key"
        raise InvalidValue(f"{wanted.host} is reached from other hosts", cure=cure, argument="--host")
    hosts = tuple(map(host_name, wanted.allowed_host or ()))
    return Allowed(hosts if is_loopback_address or hosts else None, tuple(map(origin, wanted.cors_origin or ())))


def _cannot_listen(wanted: Server, error: OSError) -> Unavailable:
    host, port = wanted.host, wanted.port
    if wanted.uds is not None:
        cure = "name a socket in a folder that this user may write"
        return Unavailable(f"{wanted.uds}: {error.strerror}", cure=cure, argument="--uds")
    unknown = isinstance(error, socket.gaierror)
    if unknown or error.errno in (errno.EADDRNOTAVAIL, None):  # asyncio of Python 3.13 leaves the number out
        what = f"unknown: {error.strerror}" if unknown else "is no address of this host"
        return Unavailable(f"{host}: {what}", cure="give an address of this host, or 0.0.0.0", argument="--host")
    return Unavailable(f"{host}:{port}: {error.strerror}", cure="choose another port", argument="--port")


def _checked_key(given: str) -> str:
    """Return a key as clients can send it: a header has no white space at its ends, and clients differ in how they
    encode other characters than ASCII."""
    key = given.strip()
    if not key:
        raise InvalidValue("an empty key", cure="give one, or leave the option out", argument="--api-key")
    if not (key.isascii() and key.isprintable()):
        what = "characters that clients cannot send in a header"
        raise InvalidValue(what, cure="give a key of ASCII letters, digits and signs", argument="--api-key")
    return key
