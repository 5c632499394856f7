"""``hal serve``: an HTTP server with OpenAI's routes."""

from __future__ import annotations

import errno
import gc
import logging
import math
import socket
from functools import partial
from typing import Annotated

import typer
from hal_core import HalError, InvalidValue, Unavailable

from hal.cli import deadline, logs
from hal.cli.console import behind, say, written
from hal.cli.failures import as_typed, check_seconds
from hal_engine.children import API_KEY

_PORT = 8000
_PENDING = 2048
"""Connections that the kernel holds until the server takes them."""


def command(
    model: Annotated[
        str | None,
        typer.Option(metavar="DIR|ORG/NAME", help="A checkpoint; without it the small model that ships."),
    ] = None,
    device: Annotated[str | None, typer.Option(metavar="NAME", help="The device (hal devices).")] = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to listen; one that is not this host's alone needs a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="0: any free one.")] = _PORT,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            envvar=API_KEY,
            help="What clients send as a bearer token; ps shows the option, not the variable.",
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A name in Host that is taken beside this host's own; * for any."),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="A web page that may use the server, such as https://app.example."),
    ] = None,
    name: Annotated[str | None, typer.Option(metavar="TEXT", help="The model's name in requests.")] = None,
    slots: Annotated[int, typer.Option(metavar="N", min=1, help="Most requests that run at once.")] = 8,
    max_waiting: Annotated[int, typer.Option(metavar="N", min=0, help="Most requests that wait.")] = 256,
    blocks: Annotated[int | None, typer.Option(metavar="N", min=1, help="KV blocks of 16 tokens.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="Most tokens of a request with its prompt.")
    ] = None,
    drain: Annotated[float, typer.Option(metavar="SECONDS", help="For running requests, after SIGTERM.")] = 30.0,
    lenient: Annotated[bool, typer.Option("--lenient", help="Ignore fields of requests that are not offered.")] = False,
    runner: Annotated[
        str, typer.Option(metavar="NAME", help="auto, torch, paddle or MODULE:NAME.", rich_help_panel="scheduling")
    ] = "auto",
    dtype: Annotated[str, typer.Option(metavar="NAME", help="auto or float32.", rich_help_panel="scheduling")] = "auto",
    overlap: Annotated[
        str, typer.Option(metavar="auto|on|off", help="Steps overlap.", rich_help_panel="scheduling")
    ] = "auto",
    speculate: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="What drafts tokens: naive, ngram, suffix, mtp, hybrid, an installed one, or first+second.",
            rich_help_panel="speculation",
        ),
    ] = "none",
    drafts: Annotated[
        int | None,
        typer.Option(metavar="N", help="Most drafts that a step verifies, 1 to 5.", rich_help_panel="speculation"),
    ] = None,
    acceptance: Annotated[
        str, typer.Option(metavar="NAME", help="exact or rejection.", rich_help_panel="speculation")
    ] = "exact",
    tp: Annotated[int, typer.Option(metavar="N", min=1, help="Ranks of a model.", rich_help_panel="ranks")] = 1,
    dp: Annotated[int, typer.Option(metavar="N", min=1, help="Copies of the model.", rich_help_panel="ranks")] = 1,
    split: Annotated[
        str | None, typer.Option(metavar="P,D", help="Workers that prefill, and decode.", rich_help_panel="ranks")
    ] = None,
    restart: Annotated[
        int, typer.Option(metavar="N", min=0, help="How often lost ranks are started again.", rich_help_panel="ranks")
    ] = 0,
    launcher: Annotated[
        str, typer.Option(metavar="paddle|ray", help="What starts ranks.", rich_help_panel="ranks")
    ] = "paddle",
) -> None:
    """Serve a model over HTTP with OpenAI's routes: completions, chats, models; /health, /metrics and a page at /."""
    check_seconds(drain, "--drain")
    key = "" if api_key is None else _checked_key(api_key)
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
    hosts = tuple(map(host_name, allowed_host or ()))
    allowed = Allowed(hosts if is_local or hosts else None, tuple(map(origin, cors_origin or ())))
    from hal_engine.generation import AsyncEngine, Ranks
    from hal_engine.generation.plan import ModelPlan
    from hal_engine.model.hub import find_checkpoint
    from hal_engine.timeouts import TIMEOUTS

    from .run_options import split_of

    if launcher not in ("paddle", "ray"):
        raise InvalidValue(repr(launcher), cure="give paddle or ray", argument="--launcher")
    with as_typed(split="--split"):
        ranks = Ranks(tp=tp, dp=dp, split=split_of(split), restart=restart, launcher=launcher)  # type: ignore[arg-type]
    if ranks.workers * tp * dp == 1 and (restart or launcher != "paddle"):
        option = "--restart" if restart else "--launcher"
        raise InvalidValue(
            "there are no ranks", cure="leave it out, or give --tp, --dp or --split too", argument=option
        )
    with as_typed(model="--model"):
        plan = ModelPlan(None if model is None else find_checkpoint(model))
        serve = plan.serve(
            device=device,
            ranks=None if ranks == Ranks() else ranks,
            slots=slots,
            blocks=blocks,
            max_model_len=max_model_len,
            runner=runner,
            dtype=dtype,
            overlap=overlap,
            speculate=speculate,
            drafts=drafts,
            acceptance=acceptance,
            timed=True,
        )
    if (template := ChatTemplate(plan.path)).fault:
        say(f"hal: /v1/chat/completions is off: {template.fault}")
    settings = Settings(model=name or model or "default", api_key=key, lenient=lenient, allowed=allowed)
    failures: list[HalError] = []

    def on_failure(error: HalError, ran: bool) -> None:
        say(f"hal: error: {error}")
        if not ran:
            failures.append(error)
            server.should_exit = True

    draining, gate = Drain(drain), Gate(Limits.of_machine())
    engine = AsyncEngine.of(plan, serve, max_waiting)
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

    class Server(uvicorn.Server):
        """Prints where it listens, and has its requests end within the drain."""

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            draining.begin()
            await super().shutdown(sockets)
            if draining.cut:
                say(f"hal: {draining.cut} request{'s' * (draining.cut > 1)} ended with an error at the end of --drain")
            written(TIMEOUTS.shown)  # the signal that uvicorn raises again ends the process at once

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

    server, log_filter = Server(config), _Said()
    logging.getLogger("uvicorn.error").addFilter(log_filter)
    deadline.grace = drain
    try:
        with behind(TIMEOUTS.shown), logs.of_libraries():
            server.run()
    except SystemExit:  # uvicorn's way to end if it cannot listen
        if log_filter.error is None:
            raise
        raise _cannot_listen(host, port, log_filter.error) from None
    finally:
        deadline.grace = 0.0
    if failures:
        raise typer.Exit(2)


class _Said(logging.Filter):
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
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        what = "is no address of this host" if error.errno == errno.EADDRNOTAVAIL else f"unknown: {error.strerror}"
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
