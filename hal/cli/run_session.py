"""``hal run`` at work: an engine with its worker, and a reader in a thread that shows what arrives."""

from __future__ import annotations

import logging
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from hal_core.errors import HalError
from hal_core.requests import SamplingParams

from hal.engine import Engine
from hal.opening import open_device
from hal.reading import Event, OutputReader, SessionEnded, StreamLoss
from hal.transport import open_sink

from .run_options import Options
from .run_output import Answers
from .run_plan import Plan, make_plan
from .run_screen import Screen, open_screen

if TYPE_CHECKING:
    from hal_core.bound import BoundDevice
    from hal_core.records import OutputRecord
    from hal_core.sinks import Sink

    from hal.model.llama import LlamaModel

FAILED, INTERRUPTED = 2, 130
"""Exit statuses: a request ended with an error; Ctrl-C."""
_CLOSE_SECONDS, _LOOK_SECONDS = 10.0, 0.2


def generate(texts: Sequence[str], params: SamplingParams, options: Options) -> int:
    """Generate for all prompts and show it; the exit status. Raises :class:`HalError` for what cannot be."""
    plan = make_plan(texts, params, options)
    with ExitStack() as stack:
        stack.enter_context(_plain_logs())
        device = stack.enter_context(_open(options.device))
        model = _load_model(options)
        from hal.worker import Worker

        screen = open_screen()
        stack.callback(screen.close)
        answers = Answers(
            plan.named_prompts, plan.tokenizer, screen, as_json=options.as_json, logprobs=params.logprobs is not None
        )
        with _interrupts() as interrupted, _Show(answers) as show:
            engine = Engine(Worker(device, model, plan.sizes, plan.blocks, show.sink), chunk=options.chunk)
            began = time.perf_counter()
            _drive(engine, plan, answers, show, interrupted)
            seconds = time.perf_counter() - began
        if answers.incomplete:
            raise HalError(f"no record told the end of {answers.incomplete}", cure="report it: the output path lost it")
        _summarize(screen, engine, answers, seconds)
    if interrupted.is_set():
        return INTERRUPTED
    return FAILED if answers.failed else 0


class _Show:
    """The output path: the worker's sink, and the thread that reads what comes out of it and shows it."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._over = False
        reader = OutputReader(on_event=self._hear)
        self.sink: Sink = open_sink(reader.url)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, args=(reader,), name="hal-run-reader", daemon=True)
        self._thread.start()

    def _read(self, reader: OutputReader) -> None:
        try:
            with reader:
                while not self._over:
                    if (frame := reader.read(_LOOK_SECONDS)) is not None and self.error is None:
                        self._take(frame.record)
        except BaseException as error:  # noqa: BLE001 (handed to the command's thread, which raises it)
            self.error = error

    def _take(self, record: OutputRecord) -> None:
        """Show the record. After an error reading goes on all the same: the sink would wait for that to close."""
        try:
            self._answers.take(record)
        except BaseException as error:  # noqa: BLE001 (handed on, as above)
            self.error = error

    def _hear(self, event: Event) -> None:
        if isinstance(event, StreamLoss):
            raise event
        self._over = self._over or isinstance(event, SessionEnded)

    def __enter__(self) -> _Show:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Have everything shown; after an error only leave nothing behind."""
        failed = kind is not None or self.error is not None
        try:
            self.sink.close(0.0 if failed else _CLOSE_SECONDS)
        except HalError:
            if not failed and self.error is None:  # that one says why
                raise
        finally:
            self._over = self._over or failed
            self._thread.join(_CLOSE_SECONDS)
        if kind is None and self.error is not None:
            raise self.error


def _drive(engine: Engine, plan: Plan, answers: Answers, show: _Show, interrupted: threading.Event) -> None:
    """Run every request to its end, which may be that all are aborted."""
    for request in plan.requests:
        engine.submit(request)
    aborted = False
    while engine.busy and show.error is None:
        for finished in engine.step():
            if not finished.reported:
                answers.end(finished)
        if interrupted.is_set() and not aborted:
            aborted = True
            for request in plan.requests:
                engine.abort(request.request_id)


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets; the second is a KeyboardInterrupt."""
    event = threading.Event()

    def first(*_: object) -> None:
        event.set()
        signal.signal(signal.SIGINT, former)

    former = signal.signal(signal.SIGINT, first)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, former)


def _open(name: str | None) -> BoundDevice:
    try:
        return open_device(name)
    except HalError as error:
        if name is not None and error.argument == "name":
            error.argument = "--device"
        raise


def _load_model(options: Options) -> LlamaModel:
    with warnings.catch_warnings(), _interrupts_held_back():
        warnings.filterwarnings("ignore", module="paddle")  # on import, it says what it cannot compile
        from hal.model.llama import LlamaModel
    return LlamaModel.load(options.model, place=options.model_place)


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Ctrl-C takes effect at the end: an import of Paddle that it breaks off fails as if Paddle were damaged."""
    came = threading.Event()
    former = signal.signal(signal.SIGINT, lambda *_: came.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
    if came.is_set():
        raise KeyboardInterrupt


@contextmanager
def _plain_logs() -> Iterator[None]:
    """Say what hal logs in a plain line; not the device's fallbacks, which ``hal devices --open`` shows."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("hal: %(message)s"))
    handler.addFilter(lambda record: record.module != "bound")
    log = logging.getLogger("hal")
    former = log.handlers, log.propagate
    log.handlers, log.propagate = [handler], False
    try:
        yield
    finally:
        log.handlers, log.propagate = former


def _summarize(screen: Screen, engine: Engine, answers: Answers, seconds: float) -> None:
    scheduler = engine.scheduler
    speed = answers.tokens / seconds if seconds else 0.0
    slots = f"{scheduler.most_running} of {engine.worker.layout.sizes.slots} slots used"
    preempted = f"{scheduler.preemptions} preemption{'s' * (scheduler.preemptions != 1)}"
    screen.close()
    screen.note(f"{answers.tokens} tokens in {seconds:.2f} s ({speed:.1f} tokens/s), {slots}, {preempted}")
