"""An engine for asyncio: its steps run in a process of their own, so that a busy event loop slows none of them."""

from __future__ import annotations

import asyncio
import operator
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any

from hal_core import HalError, InvalidValue, SamplingParams, Unavailable

from hal_engine.distributed.control_messages import Stats
from hal_engine.model.tokenizer import SHORT
from hal_engine.options import EngineOptions, EngineSetup, Ranks, engine_options, named_as_parameters
from hal_engine.streams import Part, append, joined

from .link import EngineLink
from .plan import SAMPLING, ModelPlan, check_known, check_request, longest_of

_OWN = ("model", "device", "executor", "slots", "max_waiting")
"""Parameters of :class:`AsyncEngine` beside its options."""
_OPTIONS = sorted({*EngineOptions.__struct_fields__} - {*Ranks.__struct_fields__, *_OWN})
"""Its options: the fields of :class:`EngineOptions` but those of its ranks, which ``executor`` has."""


def _lanes() -> tuple[ThreadPoolExecutor, ThreadPoolExecutor]:
    """Threads that encode short texts, and long ones. The interpreter's lock is free while they do."""
    return ThreadPoolExecutor(2, "hal-encode"), ThreadPoolExecutor(2, "hal-encode-long")


class QueueFull(Unavailable):
    """So many requests wait that no more are taken."""


class AsyncEngine:
    """Generates for any number of tasks of one event loop; a context manager, with which its process ends.

    - ``model``, ``device``: as of :func:`hal.generate`. ``executor``: ranks that run the steps; None: the engine
      process itself.
    - ``slots``: requests that run at once, in each group of ranks. Further requests wait, by priority and then by
      arrival.
    - ``max_waiting``: how many may wait; one more is refused (:class:`hal_core.Unavailable`). None: any number.
    - ``options``: other fields of :class:`hal_engine.options.EngineOptions`, the options of ``hal run`` of these names,
      such as ``blocks`` or ``max_model_len``.

    If the process ends, every stream ends with an error, and so does every new one. Lost ranks are started again by it
    (``Ranks.restart``).
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        device: str | None = None,
        *,
        executor: Ranks | None = None,
        slots: int = 8,
        max_waiting: int | None = None,
        **options: Any,  # noqa: ANN401 (those of EngineOptions)
    ) -> None:
        if given := [name for name in options if name in SAMPLING]:
            raise InvalidValue("a parameter of a request", cure="give it to generate(), in params", argument=given[0])
        check_known(options, _OPTIONS, _OWN)
        if executor is not None and not isinstance(executor, Ranks):
            raise InvalidValue(f"{executor!r} is no Ranks", cure="give hal.Ranks(tp=2)", argument="executor")
        with named_as_parameters():
            ranks = {} if executor is None else {name: getattr(executor, name) for name in Ranks.__struct_fields__}
            wanted = engine_options({**ranks, "device": device, "slots": slots, **options})
            plan = ModelPlan(model, wanted)
            setup = plan.serve(wanted)
        self._set(plan, setup, max_waiting)
        self._naming: Callable[[], AbstractContextManager[None]] = named_as_parameters

    @classmethod
    def of(cls, plan: ModelPlan, setup: EngineSetup, max_waiting: int | None = None) -> AsyncEngine:
        """Return the engine of a plan; its errors name options of the command."""
        engine = cls.__new__(cls)
        engine._set(plan, setup, max_waiting)
        engine._naming = nullcontext
        return engine

    def _set(self, plan: ModelPlan, setup: EngineSetup, max_waiting: int | None) -> None:
        self._plan, self._setup, self._max_waiting = plan, setup, max_waiting
        self._slots = setup.all_slots
        self._unfinished = self._count = self._encoding = 0
        self._lanes = _lanes()
        self._link: EngineLink | None = None

    async def __aenter__(self) -> AsyncEngine:
        """Start the process and wait until it takes requests. Raises as opening its device, model or ranks does."""
        if self._link is not None and self._link.error is None:
            cure = "make one for each async with"
            raise InvalidValue("the engine is open already", cure=cure, argument="AsyncEngine")
        loop, self._lanes = asyncio.get_running_loop(), _lanes()
        self._link = EngineLink(self._setup, loop)
        try:
            up = asyncio.wrap_future(self._link.up)
            up.add_done_callback(lambda done: done.cancelled() or done.exception())  # also where nobody waits any more
            with self._naming():
                await asyncio.shield(up)  # which end of it the link knows
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        for lane in self._lanes:
            lane.shutdown(wait=False, cancel_futures=True)
        self._plan.tokenizer.close()
        if self._link is not None:
            await asyncio.to_thread(self._link.close)

    @property
    def plan(self) -> ModelPlan:
        """The model's tokenizer and defaults."""
        return self._plan

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request with its prompt."""
        return longest_of(self._setup)

    @property
    def room(self) -> int | None:
        """Most requests that it can have at once, in slots and waiting. None: any number."""
        return None if self._max_waiting is None else self._slots + self._max_waiting

    def check(self, ids: Sequence[int], max_tokens: int) -> None:
        """Raise :class:`InvalidValue`, naming ``prompt`` or ``max_tokens``, for a request that can never run."""
        check_request(self._setup, ids, max_tokens)

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of texts, while the event loop continues; long texts delay no short ones.

        ``add_special_tokens``: see :meth:`hal_engine.model.tokenizer.Tokenizer.encode`. Raises :class:`InvalidValue`,
        also for a text that is too long by its bytes alone, which is not encoded, and :class:`hal_core.Unavailable` if
        as many calls wait as the engine may have requests.
        """
        if not texts:
            return []
        for text in texts:
            self._plan.tokenizer.check_length(text, self.max_model_len)
        if self.room is not None and self._encoding >= self.room:
            cure = "try again later, or raise max_waiting"
            raise QueueFull(f"{self._encoding} requests wait for their prompts to be encoded", cure=cure)
        call = partial(self._plan.tokenizer.encode_all, texts, add_special_tokens=add_special_tokens)
        lane = self._lanes[sum(map(len, texts)) > SHORT]
        try:
            encoded = asyncio.get_running_loop().run_in_executor(lane, call)
        except RuntimeError as error:  # it was shut down
            raise Unavailable("the engine was closed", cure="open another one") from error
        self._encoding += 1
        try:
            return await encoded
        finally:
            self._encoding -= 1

    @property
    def stats(self) -> Stats | None:
        """How busy the engine was a moment ago; None before its first step."""
        return None if self._link is None else self._link.stats

    @property
    def lost(self) -> str:
        """Which of the engine's workers are lost, how, and whether they are being started again; "" while all run."""
        return "" if self._link is None else self._link.lost

    @property
    def error(self) -> HalError | None:
        """Why the engine takes no requests any more; None while it does."""
        return None if self._link is None else self._link.error

    async def failed(self) -> HalError:
        """Wait until the engine takes no requests any more; return why."""
        assert self._link is not None
        return await asyncio.shield(asyncio.wrap_future(self._link.down))  # a cancelled task leaves the future alone

    @property
    def device(self) -> str:
        """The name of the device that the engine has opened."""
        assert self._link is not None
        return self._link.up.result().device

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | Mapping[str, object] | None = None,
        *,
        stop: str | Sequence[str] = (),
        number: int = 0,
        priority: int = 0,
    ) -> AsyncIterator[Part]:
        """Give the parts of an answer as they come; the last one has a ``finish_reason``. Parts that come while the
        task is behind are one.

        ``number``: which of several answers from one seed; equal seeds and numbers draw equally. ``priority``: of the
        requests that wait, the lower goes first; equal ones in the order of arrival.

        ``params``: all of a request's parameters, or some of them by name beside the checkpoint's own defaults
        (``eos_token_ids``, at most 16, beside the model's end tokens; ``ignore_eos=True`` in place of those). A task
        that is cancelled, or leaves the loop, aborts the request. Raises :class:`InvalidValue` for a request that can
        never run, and :class:`Unavailable` if the queue is full or the engine process has ended.
        """
        if self._link is None:
            raise InvalidValue("the engine is not open", cure="use it in async with", argument="AsyncEngine")
        if isinstance(prompt, str):
            (prompt,) = await self.encode([prompt])
        inbox = _Inbox()
        end = self.begin(prompt, params, inbox.put, stop=stop, number=number, priority=priority)
        try:
            while True:
                yield (part := await inbox.get())
                if part.finish_reason is not None:
                    return
        finally:
            end()

    def begin(
        self,
        prompt: Sequence[int],
        params: SamplingParams | Mapping[str, object] | None,
        put: Callable[[Part | HalError], object],
        *,
        stop: str | Sequence[str] = (),
        number: int = 0,
        priority: int = 0,
    ) -> Callable[[], None]:
        """As :meth:`generate`, without a task: the event loop calls ``put``, which raises nothing, with each part, or
        with the error that ends the answer. Returns what ends the request, to be called in any case."""
        if self._link is None:
            raise InvalidValue("the engine is not open", cure="use it in async with", argument="AsyncEngine")
        if not isinstance(prompt, Iterable):
            raise InvalidValue(f"{prompt!r} is no text", cure="give a text, or token ids", argument="prompt")
        ids = [one if type(one) is int else _integer(one, "prompt") for one in prompt]
        number, priority = _integer(number, "number"), _integer(priority, "priority")
        if isinstance(params, SamplingParams):
            wanted = self._plan.params(params)
        elif params is None or isinstance(params, Mapping):
            wanted = self._plan.params(None, **dict(params or {}))
        else:
            cure = "give SamplingParams, or some by name as a mapping"  # type: ignore[unreachable]  # the caller may ignore the annotation
            raise InvalidValue(f"{params!r} is neither", cure=cure, argument="params")
        self.check(ids, wanted.max_tokens)
        if self.error is not None:  # also where the loop of its streams has ended
            raise self.error
        answer = self._plan.answer(ids, stop, wanted)
        self._count += 1
        request = self._plan.request(f"a{self._count}", ids, wanted, number, priority)
        waiting = self._unfinished - self._slots
        if self._max_waiting is not None and waiting >= self._max_waiting:
            raise QueueFull(f"{waiting} requests wait", cure="try again later, or raise max_waiting")
        self._unfinished += 1
        link, ended = self._link, False
        link.submit(request, answer, put)

        def end() -> None:
            nonlocal ended
            if not ended:
                ended = True
                self._unfinished -= 1
                link.abort(request.request_id)  # without effect if it has ended

        return end


class _Inbox:
    """Parts for one task; those that come while it is behind are joined."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._error: HalError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, part: Part | HalError) -> None:
        """Take a part, or the error behind all parts."""
        if isinstance(part, HalError):
            self._error = part
        else:
            append(self._parts, part)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Part:
        """Return all that has come since the last call."""
        while not self._parts:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        parts, self._parts = self._parts, []
        return joined(parts)


def _integer(given: object, argument: str) -> int:
    """Return a whole number as an ``int``, as only those can be sent to the engine process."""
    try:
        if isinstance(given, bool):
            raise TypeError
        return operator.index(given)  # type: ignore[arg-type]  # raises TypeError
    except TypeError:
        raise InvalidValue(f"{given!r} is no whole number", cure="give whole numbers", argument=argument) from None
