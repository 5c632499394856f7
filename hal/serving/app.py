"""The routes of a server."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from hal_core import HalError, InvalidValue
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from hal.generation import AsyncEngine, Part
from hal.timeouts import TIMEOUTS

from .answers import Wanted, parts_of, wanted_of
from .bodies import PAGE as GUIDE
from .bodies import read_body
from .chat import ChatTemplate
from .drain import Drain
from .errors import ApiError, error_object, error_of, error_response
from .messages import Message
from .metrics import Metrics
from .schemas import Chat, Completion, Detokenize, Sampling, StreamOptions, Tokenize
from .settings import Settings
from .shapes import ChatShape, CompletionShape, Shape, usage_of

PAGE = Path(__file__).with_name("page.html")
_LOADING = "loading"
"""The state of a server before its engine takes requests."""
_TOKENS = 16
"""``max_tokens`` of a completion that gives none (OpenAI's default)."""
Result = TypeVar("Result")
Endpoint = Callable[[Request], Awaitable[Response]]
OnFailure = Callable[[HalError, bool], object]
"""Is called with the error of an engine that has failed, and whether it had taken requests before."""


class Server:
    """Serves one engine, which it opens when it starts: until then, and once the engine has failed, it answers 503."""

    def __init__(
        self,
        engine: AsyncEngine,
        settings: Settings,
        drain: Drain,
        on_failure: OnFailure,
        template: ChatTemplate | None = None,
    ) -> None:
        self.engine, self.settings = engine, settings
        self.metrics, self.template = Metrics(settings.model), template or ChatTemplate(engine.plan.path)
        self._drain, self._opened, self._on_failure = drain, asyncio.Event(), on_failure
        self._error: HalError | None = None

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
            Route("/", self.page, methods=["GET"]),
        ]
        return Starlette(routes=routes, lifespan=self._lifespan, exception_handlers={HTTPException: _http_error})

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(self._serve())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _serve(self) -> None:
        try:
            async with self.engine:
                self._opened.set()
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
            except _ClientLeft:
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

    async def _body(self, request: Request) -> bytes:
        """Return the body, of which at most so many bytes are read."""
        data, most = bytearray(), self.settings.body_bytes
        async for piece in request.stream():
            data += piece
            if len(data) > most:
                what = f"the body has more than {most} bytes (send the prompts in several requests)"
                raise ApiError(413, what, code="request_too_large")
        return bytes(data)

    def _ready(self, model: str | None) -> None:
        """Raise :class:`ApiError` unless the engine takes requests for this model."""
        self._check_model(model)
        if state := self._down():
            what = "the engine is loading (try again soon)" if state == _LOADING else state
            raise ApiError(503, what, code="engine_unavailable")

    def _check_model(self, model: str | None) -> None:
        if model not in (None, self.settings.model):
            what = f"there is no model {model!r}: this server has {self.settings.model!r}"
            raise ApiError(404, what, param="model", code="model_not_found")

    def _down(self) -> str:
        """Return why requests are refused; "" if they are not."""
        error = self._error or self.engine.error
        return str(error) if error is not None else "" if self._opened.is_set() else _LOADING

    # -- routes ---------------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        body = read_body(Completion, await self._body(request), lenient=self.settings.lenient)
        self._ready(body.model)
        changed = body.changed() | ({} if body.logprobs is None else {"logprobs": body.logprobs})
        shape = CompletionShape(self.settings.model, self.engine.plan.tokenizer, logprobs=body.logprobs is not None)
        asked = self._wanted(body, body.prompts(), body.max_tokens or _TOKENS, changed)
        wanted = await _unless_gone(request, asked)
        return await self._answer(request, body, wanted, shape)

    async def chat(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        body = read_body(Chat, await self._body(request), lenient=self.settings.lenient)
        self._ready(body.model)
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs (give logprobs: true)", param="top_logprobs")
        changed = body.changed() | ({"logprobs": body.top_logprobs or 0} if body.logprobs else {})
        shape = ChatShape(self.settings.model, self.engine.plan.tokenizer, logprobs=body.logprobs)
        prompt = self._rendered(body, body.messages)
        asked = self._wanted(body, [prompt], body.max_completion_tokens or body.max_tokens, changed)
        wanted = await _unless_gone(request, asked)
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
        body = read_body(Tokenize, await self._body(request), lenient=self.settings.lenient)
        self._check_model(body.model)
        if body.messages is not None and body.prompt is None:
            text, raw = self._rendered(body, body.messages), False
        elif body.prompt is not None and body.messages is None:
            text, raw = body.prompt, True
        else:
            raise ApiError(400, "prompt or messages: give one of the two", param="prompt")
        special = raw if body.add_special_tokens is None else body.add_special_tokens
        encoded = self.engine.encode([text], add_special_tokens=special)
        (ids,) = await _unless_gone(request, encoded)
        return _json({"tokens": ids, "count": len(ids), "max_model_len": self.engine.max_model_len})

    async def detokenize(self, request: Request) -> Response:
        """``POST /detokenize``."""
        body = read_body(Detokenize, await self._body(request), lenient=self.settings.lenient)
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

    async def show_metrics(self, _request: Request) -> Response:
        """``GET /metrics``."""
        if (stats := self.engine.stats) is not None:
            self.metrics.take(msgspec.structs.asdict(stats))
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def page(self, _request: Request) -> Response:
        """``GET /``."""
        return HTMLResponse(PAGE.read_bytes())

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
        parts = parts_of(self.engine, wanted, self.metrics)
        with _named(body):
            if not body.stream:
                return _json(await _unless_gone(request, _whole(parts, wanted, shape)))
            first = await _unless_gone(request, anext(parts))  # what is refused has a status of its own
        events = _events(first, parts, wanted, shape, body.stream_options or StreamOptions(), self._drain)
        grace = self._drain.seconds + TIMEOUTS.last_event
        return EventSourceResponse(events, sep="\n", ping=60, shutdown_grace_period=grace)


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


async def _whole(parts: AsyncIterator[tuple[int, Part]], wanted: Wanted, shape: Shape) -> dict[str, Any]:
    """Return the object of all answers."""
    found: dict[int, list[Part]] = {}
    async with aclosing(parts):  # type: ignore[type-var]
        async for index, part in parts:
            found.setdefault(index, []).append(part)
    choices = [shape.choice(index, found[index]) for index in sorted(found)]
    tokens = sum(len(part.token_ids) for answer in found.values() for part in answer)
    return shape.answer(choices, usage_of(wanted.prompt_tokens, tokens))


async def _events(
    first: tuple[int, Part],
    parts: AsyncIterator[tuple[int, Part]],
    wanted: Wanted,
    shape: Shape,
    options: StreamOptions,
    drain: Drain,
) -> AsyncIterator[dict[str, str]]:
    """Give the events of a stream; an error of the engine, or the end of the drain, is the last one."""
    tokens, begun = 0, set[int]()
    async with aclosing(parts):  # type: ignore[type-var]
        try:
            found: tuple[int, Part] | None = first
            while found is not None:
                index, part = found
                tokens += len(part.token_ids)
                if index not in begun:
                    begun.add(index)
                    if (opening := shape.opening(index)) is not None:
                        yield _event(shape.event([opening]))
                if part.text or part.logprobs or part.finish_reason is not None:
                    usage = usage_of(wanted.prompt_tokens, tokens) if options.continuous_usage_stats else None
                    yield _event(shape.event([shape.piece(index, part)], usage))
                async with drain.bound():
                    found = await anext(parts, None)
        except (ApiError, HalError) as error:
            yield {"data": error_object(error_of(error)).decode()}
            return
        if options.include_usage:
            yield _event(shape.event([], usage_of(wanted.prompt_tokens, tokens)))
        yield {"data": "[DONE]"}


class _ClientLeft(Exception):
    """The client has closed the connection."""


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Result] | Awaitable[Result]) -> Result:
    """Return what ``work`` returns; cancel it and raise :class:`_ClientLeft` if the client leaves first."""

    async def wait() -> Result:
        return await work

    task, gone = asyncio.create_task(wait()), asyncio.create_task(_left(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise _ClientLeft
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(found: dict[str, Any]) -> dict[str, str]:
    return {"data": msgspec.json.encode(found).decode()}


def _json(found: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(found), status, media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what, path = error.detail, request.url.path
    if error.status_code == 404:
        routes = ", ".join(route.path.replace(":path", "") for route in request.app.routes)
        what = f"there is no route {path} (there are {routes}; {GUIDE} says what offers others)"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        what = f"{path} takes no {request.method} (send {allowed})"
    return error_response(ApiError(error.status_code, what))


def make_app(
    engine: AsyncEngine,
    settings: Settings,
    *,
    template: ChatTemplate | None = None,
    drain: Drain | None = None,
    on_failure: OnFailure = lambda error, ran: None,
) -> Starlette:
    """Return the ASGI application of a server. ``template``: of chats; None: the model's. ``drain``: what its requests
    have when it stops, which the caller begins; None: 30 s."""
    return Server(engine, settings, drain or Drain(30.0), on_failure, template).app()
