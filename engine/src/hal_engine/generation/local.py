"""``hal.generate``: text from a model, in the caller's process."""

from __future__ import annotations

import atexit
import logging
import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from threading import RLock
from typing import Literal, overload

from hal_core import HalError, InvalidValue

from hal_engine.opening import open_engine
from hal_engine.options import EngineOptions, Ranks, engine_options, named_as_parameters
from hal_engine.streams import Part, Stream, Streams

from .plan import SAMPLING, ModelPlan, check_known, check_request, longest_of

Model = str | os.PathLike[str] | None
_OPTIONS = sorted({*EngineOptions.__struct_fields__} - {*Ranks.__struct_fields__, "model", "device"})

logging.getLogger("hal").addHandler(logging.NullHandler())  # a program without logging of its own sees the text alone


@overload
def generate(
    prompt: str, *, model: Model = ..., device: str | None = ..., stop: str | Sequence[str] = ...,
    stream: Literal[False] = ..., **options: object,
) -> str: ...  # fmt: skip
@overload
def generate(
    prompt: str, *, model: Model = ..., device: str | None = ..., stop: str | Sequence[str] = ...,
    stream: Literal[True], **options: object,
) -> Iterator[str]: ...  # fmt: skip
@overload
def generate(
    prompt: list[str] | tuple[str, ...], *, model: Model = ..., device: str | None = ...,
    stop: str | Sequence[str] = ..., stream: Literal[False] = ..., **options: object,
) -> list[str]: ...  # fmt: skip
def generate(
    prompt: str | list[str] | tuple[str, ...],
    *,
    model: Model = None,
    device: str | None = None,
    stop: str | Sequence[str] = (),
    stream: bool = False,
    **options: object,
) -> str | list[str] | Iterator[str]:
    """Continue a text: the text that follows, with ``stream`` an iterator of its parts; of several texts a list.

    The model and its device stay open for the next call with the same ones and the same options of an engine; another
    call closes them first.

    - ``model``: a checkpoint directory, by default the embedded one; ``device``: as ``hal devices`` lists it.
    - ``stop``: texts that end the answer, which ends with the first one in it.
    - ``options``: options of ``hal run`` that are an engine's (:class:`hal_engine.options.EngineOptions`), such as
      ``speculate="ngram"``, but those of ranks: :class:`hal.AsyncEngine` has them.
    - ``options`` for sampling: fields of :class:`hal_core.SamplingParams`, such as ``max_tokens``. The others have the
      defaults of the checkpoint's generation_config.json, else temperature 1 and 16 tokens; ``seed`` is new in each
      call. ``eos_token_ids`` (at most 16) end an answer as the model's own end tokens do. With ``ignore_eos=True``
      those are tokens like any other.

    Raises :class:`hal_core.InvalidValue` for what cannot be run, before anything is generated.
    """
    if stream and not isinstance(prompt, str):
        raise InvalidValue("a list of prompts", cure="give one text, or leave stream out", argument="stream")
    check_known(options, (*SAMPLING, *_OPTIONS), ("model", "device", "stop", "stream"))
    sampling = {name: value for name, value in options.items() if name in SAMPLING}
    wanted = {name: value for name, value in options.items() if name not in SAMPLING}
    texts = list(prompt) if isinstance(prompt, list | tuple) else [prompt]
    for text in texts:
        if not isinstance(text, str):
            raise InvalidValue(f"{text!r} is no text", cure="give a text, or a list of texts", argument="prompt")
    with _lock:
        here = _open(model, {**wanted, "device": device})
        prompts = here.encode(texts)
        if stream:
            parts = here.parts(here.submit(prompts, stop, sampling, at_end=False)[0])
            next(parts)
            return parts
        running = here.submit(prompts, stop, sampling, at_end=True)
        try:
            answers = ["".join(here.parts(one)) for one in running]
        except BaseException:
            here.left.extend([name for name, _ in running])
            raise
    return answers[0] if isinstance(prompt, str) else answers


class _Local:
    """A model that is open in this process. Several threads may use it: one at a time steps for all."""

    def __init__(self, model: Model, options: EngineOptions) -> None:
        self.key = _key(model, options)
        self._stack, self._streams, self._count = ExitStack(), Streams(), 0
        self.left = deque[str]()  # requests that nobody reads any more, which the next step aborts
        with named_as_parameters():
            self.plan = ModelPlan(model, options)
            self._setup = self.plan.serve(options)
            self.engine = self._stack.enter_context(open_engine(self._setup, self._streams.take)).engine

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of texts, in one call of the tokenizer."""
        for text in texts:
            self.plan.tokenizer.check_length(text, longest_of(self._setup))
        return self.plan.tokenizer.encode_all(texts)

    def submit(
        self, prompts: Sequence[Sequence[int]], stop: str | Sequence[str], sampling: dict[str, object], *, at_end: bool
    ) -> list[tuple[str, deque[Part | HalError]]]:
        """Begin requests; the name of each, and where its parts come: ``at_end``, all in one."""
        params, begun, requests = self.plan.params(None, **sampling), [], []
        for ids in prompts:
            check_request(self._setup, ids, params.max_tokens)
        for number, ids in enumerate(prompts):
            self._count += 1
            request, parts = self.plan.request(f"g{self._count}", ids, params, number), deque[Part | HalError]()
            stream = Stream(self.plan.answer(ids, stop, params), parts.append, at_end=at_end)
            self._streams.add(request.request_id, stream)
            requests.append(request)
            begun.append((request.request_id, parts))
        self.engine.submit_all(requests)
        return begun

    def parts(self, running: tuple[str, deque[Part | HalError]]) -> Iterator[str]:
        """The text of a request as it comes, after a first part without any: from there on it is aborted if it is left
        before its end."""
        name, parts = running
        try:
            yield ""
            while True:
                with _lock:
                    while not parts:
                        self._step()
                if isinstance(part := parts.popleft(), HalError):
                    raise part
                yield part.text
                if part.finish_reason is not None:
                    return
        finally:
            self.left.append(name)  # a collector of garbage may end this in the middle of a step

    def _step(self) -> None:
        while self.left:
            if self._streams.drop(name := self.left.popleft()):
                self.engine.abort(name)
        try:
            ended = self.engine.step()
        except BaseException as error:  # also an interrupt: what a step has done half way is not known
            lost = HalError(f"{type(error).__name__} ended the step", cure="generate the text again")
            self._streams.fail(error if isinstance(error, HalError) else lost)
            _close()
            raise
        for one in ended:
            if not one.reported:
                tokens = len(one.token_ids)
                self._streams.end(one.request_id, tokens, one.reason, one.message, refused=one.refused)
        while self._streams.stopped:
            self.engine.abort(self._streams.stopped.popleft())

    def close(self) -> None:
        """Close the model and its device."""
        self._streams.fail(HalError("the model was closed", cure="open the model again"))
        self.plan.tokenizer.close()
        self._stack.close()


_lock = RLock()
_here: _Local | None = None
_of_parents: list[_Local] = []
"""Models that were open before a fork: kept, as their devices must not be closed in this process."""


def _begin_anew() -> None:
    """In a forked child, forget the parent's model, and its lock, which another thread may have held."""
    global _here, _lock
    if _here is not None:
        _of_parents.append(_here)
    _here, _lock = None, RLock()


os.register_at_fork(after_in_child=_begin_anew)


def _key(model: Model, options: EngineOptions) -> tuple[str | None, EngineOptions]:
    """Return what a model is open for; a folder by its place, whatever the current folder."""
    return None if model is None else os.path.realpath(os.path.expanduser(model)), options


def _open(model: Model, given: dict[str, object]) -> _Local:
    global _here
    with named_as_parameters():
        options = engine_options(given)
    if _here is None or _here.key != _key(model, options):
        _close()
        _here = _Local(model, options)
    return _here


def _close() -> None:
    global _here
    here, _here = _here, None
    if here is not None:
        here.close()


atexit.register(_close)
