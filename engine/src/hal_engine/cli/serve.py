"""``hal serve``: an HTTP server with OpenAI's routes."""

from __future__ import annotations

import ctypes
import errno
import gc
import logging
import math
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any

import msgspec
import typer
from hal_core import HalError, InvalidValue, Unavailable

from hal.cli import logs, signals
from hal.cli.console import lines_are_written, lines_by_thread, say
from hal.cli.failures import as_typed, check_seconds
from hal_engine.children import API_KEY
from hal_engine.options import EngineOptions, engine_options, option

from .parameters import parameters, read, set_parameters

_PENDING = 2048
"""Connections that the kernel holds until the server takes them."""
_M_MMAP_THRESHOLD, _LARGE = -3, 128 << 10
"""Of malloc.h, and glibc's threshold, in bytes, until a larger block is freed: then it grows, and what was read of
bodies stays in the heap after their clients have left. Once it is set, it stays."""


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


def command(**given: Any) -> None:  # noqa: ANN401 (as the options say)
    """Serve a model over HTTP with OpenAI's routes: completions, chats, models; /health, /metrics and a page at /."""
    wanted = Server(**read(Server, given))
    options = engine_options(read(EngineOptions, given))
    host, port, drain = wanted.host, wanted.port, wanted.drain
    key = "" if wanted.api_key is None else _checked_key(wanted.api_key)
    try:
        import uvicorn

        from hal_engine.serving import Allowed, ChatTemplate, Connection, Drain, Gate, Limits, Settings, make_app
        from hal_engine.serving.browsers import host_name, is_loopback, origin
    except ImportError as error:
        what = f"{(error.name or str(error)).partition('.')[0]} is missing"
        raise Unavailable(what, cure="pip install 'paddle-hal[serve]>=1.1,<2'", argument="hal serve") from error
    is_local = is_loopback(host)
    if not is_local and not key:
        cure = f"set {API_KEY} to a key for clients, or give --api-key"
        raise InvalidValue(f"{host} is reached from other hosts", cure=cure, argument="--host")
    hosts = tuple(map(host_name, wanted.allowed_host or ()))
    allowed = Allowed(hosts if is_local or hosts else None, tuple(map(origin, wanted.cors_origin or ())))
    from hal_engine.generation import AsyncEngine
    from hal_engine.generation.plan import ModelPlan
    from hal_engine.timeouts import TIMEOUTS

    with as_typed(model="--model"):
        plan = ModelPlan(options.model)
        setup = plan.serve(options, timed=True)
    if (template := ChatTemplate(plan.path)).fault:
        say(f"hal: /v1/chat/completions is off: {template.fault}")
    shown = wanted.name or given["model"] or "default"
    settings = Settings(model=shown, api_key=key, lenient=wanted.lenient, allowed=allowed)
    failures: list[HalError] = []

    def on_failure(error: HalError, ran: bool) -> None:
        say(f"hal: error: {error}")
        if not ran:
            failures.append(error)
            server.should_exit = True

    draining, gate = Drain(drain), Gate(Limits.of_machine())
    engine = AsyncEngine.of(plan, setup, wanted.max_waiting)
    app = make_app(engine, settings, template=template, drain=draining, gate=gate, on_failure=on_failure)
    config = uvicorn.Config(
        app,
        host,
        port,
        http=partial(Connection, gate=gate),  # type: ignore[arg-type]  # a class, or what makes its instances
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

    class Listening(uvicorn.Server):
        """Prints where it listens, and has its requests end within the drain."""

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            ignored = [number for number in signals.NUMBERS if signal.getsignal(number) is signal.SIG_IGN]
            with super().capture_signals():
                for number in ignored:  # as nohup and a background job have it
                    signal.signal(number, signal.SIG_IGN)
                yield

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            draining.begin()
            await super().shutdown(sockets)
            if draining.cut:
                say(f"hal: {draining.cut} request{'s' * (draining.cut > 1)} ended with an error at the end of --drain")
            lines_are_written(TIMEOUTS.shown)  # the signal that uvicorn raises again ends the process at once

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                gc.freeze()  # a collection among all that is imported takes 50 ms, in which no client is served
                at, number, *_ = self.servers[0].sockets[0].getsockname()
                place = f"[{at}]:{number}" if ":" in at else f"{at}:{number}"
                for one in self.servers[0].sockets:
                    with socket.fromfd(one.fileno(), one.family, one.type) as listening:
                        listening.listen(_PENDING)  # uvicorn's number is also that of those taken at once
                most = f"at most {gate.limits.connections} connections, {gate.limits.bytes >> 20} MiB of requests"
                say(f"hal: {settings.model} on http://{place} ({most}); /health is 200 when its engine is loaded")

    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
    server, log_filter = Listening(config), _ServerLog()
    logging.getLogger("uvicorn.error").addFilter(log_filter)
    signals.grace = drain
    try:
        with lines_by_thread(TIMEOUTS.shown), logs.of_libraries():
            server.run()
    except SystemExit:  # uvicorn's way to end if it cannot listen
        if log_filter.error is None:
            raise
        raise _cannot_listen(host, port, log_filter.error) from None
    finally:
        signals.grace = 0.0
    if failures:
        raise typer.Exit(2)


set_parameters(command, parameters(Server) | parameters(EngineOptions), first=("model", "device"))


class _ServerLog(logging.Filter):
    """What uvicorn logs, in hal's words. ``error``: why it cannot listen on the address, which the command says."""

    error: OSError | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep the error instead of printing it."""
        if isinstance(record.msg, OSError):
            self.error = record.msg
        elif str(record.msg).startswith("ASGI callable returned without completing response"):
            record.msg = "a stream was cut off at the end of --drain"
        elif str(record.msg).startswith("Cancel ") and record.args == (0,):  # such a stream's last bytes are unsent
            return False
        return self.error is None


def _cannot_listen(host: str, port: int, error: OSError) -> Unavailable:
    unknown = isinstance(error, socket.gaierror)
    if unknown or error.errno in (errno.EADDRNOTAVAIL, None):  # asyncio of Python 3.13 leaves the number out
        what = f"unknown: {error.strerror}" if unknown else "is no address of this host"
        return Unavailable(f"{host}: {what}", cure="give an address of this host, or 0.0.0.0", argument="--host")
    return Unavailable(f"{host}:{port}: {error.strerror}", cure="choose another port", argument="--port")


def _checked_key(given: str) -> str:
    """Return a key as clients can send it: a header has no white space at its ends, and clients differ in how they
    encode what is not ASCII."""
    key = given.strip()
    if not key:
        raise InvalidValue("an empty key", cure="give one, or leave the option out", argument="--api-key")
    if not (key.isascii() and key.isprintable()):
        what = "characters that clients cannot send in a header"
        raise InvalidValue(what, cure="give a key of ASCII letters, digits and signs", argument="--api-key")
    return key
