"""The routes of a server."""

from __future__ import annotations

import asyncio
import hmac
import logging
import mmap
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from hal_core import HalError, InvalidValue
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from hal.cli.logs import Few
from hal_engine.generation import AsyncEngine, Part

from .answers import Answers, Wanted, wanted_of
from .bodies import PAGE as GUIDE
from .bodies import Body, read_body
from .browsers import Browsers
from .chat import ChatTemplate
from .drain import Drain
from .errors import ApiError, error_of, error_response
from .events import SERVERS_SEND, Events, left
from .gate import Gate
from .messages import Message
from .metrics import Metrics
from .requests_log import ENTRY, Entry
from .schemas import Chat, Completion, Detokenize, Sampling, StreamOptions, Tokenize
from .settings import Settings
from .shapes import ChatShape, CompletionShape, Shape, usage_of
from .sizes import InPieces, check_size, encoded
from .turns import Turns

log = logging.getLogger("hal.serving")
log.addFilter(Few())
PAGE = Path(__file__).with_name("page.html").read_bytes()
_NAME = 100
"""Most characters of a name that an error repeats."""
_SHORT = 1 << 14
"""Bytes of a body that is read at once; a longer one is read in a thread."""
_LOADING = "loading"
"""The state of a server before its engine takes requests."""
_PROBES = ("/health", "/live", "/ready")
_TOKENS = 16
"""``max_tokens`` of a completion that gives none (OpenAI's default)."""
Result = TypeVar("Result")
Endpoint = Callable[[Request], Awaitable[Response]]
OnFailure = Callable[[HalError, bool], object]
"""Is called with the error of an engine that has failed, and whether it had taken requests before."""


class Server:
    """Serves one engine, which it opens when it starts: until then, and once the engine has failed, it answers 503.

    ``template``: of chats; None: the model's. ``drain``: what its requests have when it stops, which the caller begins;
    None: 30 s. ``gate``: that of its connections, for ``/metrics``. ``on_ready``: called once the engine takes
    requests. ``log``: called with the fields of each request's line
    (:meth:`hal_engine.serving.requests_log.Entry.fields`).
    """

    def __init__(
        self,
        engine: AsyncEngine,
        settings: Settings,
        *,
        template: ChatTemplate | None = None,
        drain: Drain | None = None,
        gate: Gate | None = None,
        on_failure: OnFailure = lambda error, ran: None,
        on_ready: Callable[[], object] = lambda: None,
        log: Callable[[Mapping[str, Any]], object] | None = None,
    ) -> None:
        self.engine, self.settings, self._gate, self._on_ready, self._log = engine, settings, gate, on_ready, log
        self.metrics, self.template = Metrics(settings.model), template or ChatTemplate(engine.plan.path)
        self._drain, self._opened, self._on_failure = drain or Drain(30.0), asyncio.Event(), on_failure
        self._error: HalError | None = None
        self._threads = ThreadPoolExecutor(2, "hal-bodies")
        self._turns, self._pieces = (
            Turns(2, 8),
            Turns(1),
        )  # of requests that begin or are first answered; of large bodies

    def app(self) -> Starlette:
        """Return the ASGI application."""
        routes = [
            Route("/v1/completions", self._guarded(self.completions), methods=["POST"]),
            Route("/v1/chat/completions", self._guarded(self.chat), methods=["POST"]),
            Route("/v1/models", self._guarded(self.models), methods=["GET"]),
            Route("/v1/models/{model:path}", self._guarded(self.model), methods=["GET"]),
            Route("/tokenize", self._guarded(self.tokenize), methods=["POST"]),
            Route("/detokenize", self._guarded(self.detokenize), methods=["POST"]),
            Route("/metrics", self._guarded(self.show_metrics), methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/live", self.live, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/", self.page, methods=["GET"]),
        ]
        middleware = [Middleware(Browsers, allowed=self.settings.allowed)]
        if origins := self.settings.allowed.origins:
            methods, headers = ("GET", "POST"), ("*",)
            shown = ("X-Request-Id",)
            cors = Middleware(
                CORSMiddleware, origins, methods, headers, expose_headers=shown, allow_private_network=True
            )
            middleware.append(cors)
        handlers = {HTTPException: _http_error, Exception: _fault}
        made = _App(routes=routes, middleware=middleware, lifespan=self._lifespan, exception_handlers=handlers)
        made.log = None if (log := self._log) is None else partial(_log, log, routes)
        return made

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(self._serve())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def _serve(self) -> None:
        try:
            async with self.engine:
                self._opened.set()
                self._on_ready()
                self._on_failure(await self.engine.failed(), True)
                await asyncio.Event().wait()
        except HalError as error:
            self._error = error
            self._on_failure(error, self._opened.is_set())

    # -- what all routes share ------------------------------------------------------------------------------------

    def _guarded(self, endpoint: Endpoint) -> Endpoint:
        """Return an endpoint that asks for the key first, and whose errors are OpenAI's objects."""

        async def guarded(request: Request) -> Response:
            try:
                self._check_key(request)
                async with self._drain.bound():
                    return await endpoint(request)
            except (_ClientLeft, ClientDisconnect):
                return Response(status_code=499)
            except (ApiError, HalError) as error:
                return error_response(error_of(error))

        return guarded

    def _check_key(self, request: Request) -> None:
        if not self.settings.api_key:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        known = hmac.compare_digest(given.strip().encode(), self.settings.api_key.encode())
        if scheme.lower() != "bearer" or not known:
            raise ApiError(401, "no valid key (send Authorization: Bearer KEY)", code="invalid_api_key")

    async def _read(self, kind: type[Body], request: Request) -> Body:
        """Return the body of a request."""
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if "origin" in request.headers and media != "application/json":  # what pages may send without asking
            raise ApiError(415, "a page sends Content-Type: application/json", code="unsupported_media_type")
        data = await self._body(request)
        if len(data) <= _SHORT:
            return read_body(kind, data, lenient=self.settings.lenient)
        await self._apart(check_size, data, self.engine.max_model_len)
        return await self._apart(read_body, kind, data, lenient=self.settings.lenient)

    async def _apart(self, call: Callable[..., Result], *arguments: object, **options: object) -> Result:
        """Return what a call returns that takes long where a client wants it to: other requests go on meanwhile."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(call, *arguments, **options))

    async def _body(self, request: Request) -> bytes:
        """Return the body, of which at most so many bytes are read."""
        most, length = self.settings.body_bytes, request.headers.get("content-length", "")
        if len(length) < 6 and length.isdecimal() and int(length) <= min(_SHORT, most):
            data = await request.body()
            await self._turns.take()
            return data
        with mmap.mmap(-1, most) as room:  # given back as a whole, which a heap with other objects in it is not
            async for piece in request.stream():
                if room.tell() + len(piece) > most:
                    what = f"the body has more than {most} bytes (send the prompts in several requests)"
                    raise ApiError(413, what, code="request_too_large")
                room.write(piece)
                if room.tell() > _SHORT:
                    await self._pieces.take()
            return room[: room.tell()]

    def _ready(self, model: str | None) -> None:
        """Raise :class:`ApiError` unless the engine takes requests for this model."""
        self._check_model(model)
        if state := self._down():
            what = "the engine is loading (try again soon)" if state == _LOADING else state
            raise ApiError(503, what, code="engine_unavailable")

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self.settings.model:
            what = f"there is no model {model[:_NAME]!r}: this server has {self.settings.model!r}"
            raise ApiError(404, what, param="model", code="model_not_found")

    def _down(self) -> str:
        """Return why requests are refused; "" if they are not."""
        error = self._error or self.engine.error
        return str(error) if error is not None else "" if self._opened.is_set() else _LOADING

    # -- routes ---------------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        body = await self._read(Completion, request)
        self._ready(body.model)
        changed = body.changed() | ({} if body.logprobs is None else {"logprobs": body.logprobs})
        shape = CompletionShape(self.settings.model, self.engine.plan.tokenizer, logprobs=body.logprobs is not None)
        prompts = body.prompts() if len(body.prompt) <= _SHORT else await self._apart(body.prompts)
        async with _until_gone(request):
            wanted = await self._wanted(body, prompts, body.max_tokens or _TOKENS, changed)
            return await self._answer(request, body, wanted, shape)

    async def chat(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        body = await self._read(Chat, request)
        self._ready(body.model)
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs (give logprobs: true)", param="top_logprobs")
        changed = body.changed() | ({"logprobs": body.top_logprobs or 0} if body.logprobs else {})
        shape = ChatShape(self.settings.model, self.engine.plan.tokenizer, logprobs=body.logprobs)
        prompt = await self._apart(self._rendered, body, body.messages)
        async with _until_gone(request):
            wanted = await self._wanted(body, [prompt], body.max_completion_tokens or body.max_tokens, changed)
            return await self._answer(request, body, wanted, shape)

    def _rendered(self, body: Chat | Tokenize, messages: Sequence[Message]) -> str:
        variables, prompt = body.chat_template_kwargs, body.add_generation_prompt
        return self.template.render(messages, variables, add_generation_prompt=prompt)

    async def models(self, _request: Request) -> Response:
        """``GET /v1/models``."""
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """``GET /v1/models/{model}``."""
        self._check_model(request.path_params["model"])
        return _json(self._model())

    def _model(self) -> dict[str, Any]:
        one = {"id": self.settings.model, "object": "model", "created": 0, "owned_by": "hal"}
        return one | {"max_model_len": self.engine.max_model_len}

    async def tokenize(self, request: Request) -> Response:
        """``POST /tokenize``."""
        body = await self._read(Tokenize, request)
        self._check_model(body.model)
        if body.messages is not None and body.prompt is None:
            text, raw = await self._apart(self._rendered, body, body.messages), False
        elif body.prompt is not None and body.messages is None:
            text, raw = body.prompt, True
        else:
            raise ApiError(400, "prompt or messages: give one of the two", param="prompt")
        special = raw if body.add_special_tokens is None else body.add_special_tokens
        async with _until_gone(request):
            (ids,) = await self.engine.encode([text], add_special_tokens=special)
        found = {"tokens": ids, "count": len(ids), "max_model_len": self.engine.max_model_len}
        return InPieces(await self._apart(msgspec.json.encode, found), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        """``POST /detokenize``."""
        body = await self._read(Detokenize, request)
        self._check_model(body.model)
        plan, most = self.engine.plan, self.engine.max_model_len
        if len(body.tokens) > most:
            raise ApiError(400, f"tokens: {len(body.tokens)} of them (send at most {most})", param="tokens")
        if wrong := [token for token in body.tokens if not 0 <= token < plan.config.vocab_size]:
            raise ApiError(400, f"tokens: {wrong[0]} is outside the vocabulary", param="tokens")
        text = await asyncio.to_thread(plan.tokenizer.decode, body.tokens, skip_special_tokens=False)
        return _json({"prompt": text})

    async def health(self, _request: Request) -> Response:
        """``GET /health``: 200; 503 while the engine loads or a worker is lost, and once the engine has failed."""
        state = self._down() or self.engine.lost
        return _json({"status": state or "ok"}, 503 if state else 200)

    async def live(self, _request: Request) -> Response:
        """``GET /live``: 200; 503 once the engine has failed, which only a new process cures."""
        error = self._error or self.engine.error
        return _json({"status": str(error or "ok")}, 503 if error is not None else 200)

    async def ready(self, _request: Request) -> Response:
        """``GET /ready``: 200 while new requests are taken; 503 as long as they are refused, and while it stops."""
        state = "stopping" if self._drain.has_begun else self._down()
        return _json({"status": state or "ok"}, 503 if state else 200)

    async def show_metrics(self, _request: Request) -> Response:
        """``GET /metrics``."""
        if (stats := self.engine.stats) is not None:
            self.metrics.take(msgspec.structs.asdict(stats))
        if self._gate is not None:
            self.metrics.count(len(self._gate), self._gate.refused)
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def page(self, _request: Request) -> Response:
        """``GET /``."""
        return HTMLResponse(PAGE)

    # -- answers --------------------------------------------------------------------------------------------------

    async def _wanted(
        self,
        body: Completion | Chat,
        prompts: Sequence[str | Sequence[int]],
        tokens: int | None,
        params: dict[str, Any],
    ) -> Wanted:
        room = self.engine.room
        most = self.settings.choices if room is None else min(self.settings.choices, room)
        if not 1 <= len(prompts) * body.n <= most:
            answers = len(prompts) * body.n
            what = f"{answers} answers, of {len(prompts)} prompts and n = {body.n} (ask for 1 to {most})"
            raise ApiError(400, what, param="n" if body.n > 1 else "prompt")
        with _named(body):
            return await wanted_of(
                self.engine,
                prompts,
                n=body.n,
                max_tokens=tokens,
                params=params,
                stops=body.stops(),
                add_special_tokens=body.add_special_tokens,
                priority=body.priority,
            )

    async def _answer(self, request: Request, body: Sampling, wanted: Wanted, shape: Shape) -> Response:
        answers = Answers(self.engine, wanted, self.metrics)
        if (entry := request.scope.get(ENTRY)) is not None:
            entry.answers = answers
        with ExitStack() as stack:
            stack.callback(answers.close)
            with _named(body):
                if not body.stream:
                    return await self._complete(answers, wanted, shape)
                await answers.first()  # what is refused has a status of its own
                await self._turns.take()
            stack.pop_all()  # the response closes them
            return Events(answers, shape, body.stream_options or StreamOptions(), self._drain)

    async def _complete(self, answers: Answers, wanted: Wanted, shape: Shape) -> Response:
        """Return the response of all answers."""
        found = await answers.all()
        tokens = sum(len(part.token_ids) for answer in found.values() for part in answer)
        usage, choices = usage_of(wanted.prompt_tokens, tokens), list[msgspec.Raw]()
        for index in sorted(found):
            choices.append(await self._apart(_encoded_choice, shape, index, found.pop(index)))
        data = await self._apart(msgspec.json.encode, shape.answer(choices, usage))
        return InPieces(data, media_type="application/json")


@contextmanager
def _named(body: Sampling) -> Iterator[None]:
    """Have errors of the engine name the fields of a request."""
    try:
        yield
    except InvalidValue as error:
        typed = body.as_typed(error.argument)
        error.what, error.cure = (text.replace(error.argument, typed) for text in (error.what, error.cure))
        error.argument = typed
        raise


def _encoded_choice(shape: Shape, index: int, answer: Sequence[Part]) -> msgspec.Raw:
    return msgspec.Raw(encoded(shape.choice(index, answer)))


class _App(Starlette):
    """Names each request and logs it, and keeps the server's own ``send`` for events."""

    log: Callable[[Entry], object] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See :class:`Starlette`."""
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        scope[SERVERS_SEND], scope[ENTRY] = send, Entry(scope)
        try:
            await super().__call__(scope, receive, scope[ENTRY].named(send))
        finally:
            answers = scope[ENTRY].answers
            if answers is not None and answers.error is not None and error_of(answers.error).status == 500:
                log.error("request %s: %s", scope[ENTRY].name, answers.error)
            if self.log is not None:
                self.log(scope[ENTRY])


class _ClientLeft(Exception):
    """The client has closed the connection."""


@asynccontextmanager
async def _until_gone(request: Request) -> AsyncIterator[None]:
    """Inside, a wait is cancelled once the client has left, and the block ends with :class:`_ClientLeft`."""
    try:
        async with asyncio.timeout(None) as wait:
            gone = asyncio.create_task(left(request.receive))
            inside = True

            def end(_: object) -> None:
                if inside:
                    wait.reschedule(0.0)

            gone.add_done_callback(end)
            try:
                yield
            finally:
                inside = False
                gone.cancel()
    except TimeoutError as error:
        if not wait.expired():
            raise
        raise _ClientLeft from error


def _json(found: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(found), status, media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what, path = error.detail, request.url.path[:_NAME]
    if error.status_code == 404:
        routes = ", ".join(route.path.replace(":path", "") for route in request.app.routes)
        what = f"there is no route {path} (there are {routes}; {GUIDE} says what offers others)"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        what = f"{path} takes no {request.method[:_NAME]} (send {allowed})"
    return error_response(ApiError(error.status_code, what))


async def _fault(_request: Request, error: Exception) -> Response:
    """Answer for a fault of the server, which uvicorn logs."""
    return error_response(ApiError(500, f"a fault of the server: {type(error).__name__} (its log says more)"))


def _log(log: Callable[[Mapping[str, Any]], object], routes: Sequence[Route], entry: Entry) -> None:
    """Log a request, but for a probe that is content: several of them come each second."""
    fields = entry.fields(routes)
    if fields["status"] != 200 or fields["route"] not in _PROBES:
        log(fields)
