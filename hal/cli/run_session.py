"""``hal run`` at work: an engine with its worker, and a reader in a thread that shows what arrives."""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from hal_core import ALONE, HalError, InvalidValue, SamplingParams, Unavailable
from hal_core.devices import check_processor

from hal.distributed.rollcall import Launched
from hal.engine import Engine
from hal.model.split import check_split
from hal.opening import open_as_asked
from hal.reading import Event, OutputReader, SessionEnded, StreamLoss
from hal.stepping import AUTO, PADDLE, RunnerSetup, Stepper, choose_runner, make_runner, overlap_of
from hal.transport import open_sink
from hal.transport.copies import Copies, close_all
from hal.transport.descriptors import check_descriptors
from hal.worker import ModelRunner, Worker

from . import failures, signals
from .console import say
from .failures import cure_of, one_line
from .imports import uncollected
from .run_device import facts_of, where
from .run_drive import drive, summarize
from .run_options import PADDLE_MODEL, Options
from .run_output import Answers
from .run_plan import make_plan
from .run_screen import open_screen
from .run_speculation import REJECTION, closing_well, open_proposer, summed_up

if TYPE_CHECKING:
    from hal_core import BoundDevice, OutputRecord, Sink, SlotState

    from hal.model.llama import LlamaModel
    from hal.stepping import Runner
    from hal.transport.curve import CurveKeys

    from .run_plan import Plan

FAILED = 2
"""Exit status: a request ended with an error."""
_CLOSE_SECONDS, _LOOK_SECONDS, _SHOW_SECONDS = 10.0, 0.2, 0.005
#: After a signal. A reader of standard output that takes nothing is not waited for any longer.
_LEAVE_SECONDS = 2.0
#: Reader and sink with their connection (22), the private folder's lock, and what Paddle and a device open meanwhile.
_DESCRIPTORS = 28


def generate(texts: Sequence[str], params: SamplingParams, options: Options) -> int:
    """Generate for all prompts and show it; the exit status. Raises :class:`HalError` for what cannot be."""
    if options.runner == PADDLE or (options.runner == AUTO and options.paddle_alone):
        _check_paddle()
    plan = make_plan(texts, params, options)
    check_descriptors(_DESCRIPTORS, "hal run")
    with signals.noted(), ExitStack() as stack:
        stack.enter_context(_plain_logs())
        if (launched := Launched.of(os.environ)) is not None:
            from .run_launched import take_part

            if options.ranks.split or options.ranks.workers:
                cure = "leave it out, or start hal run by itself"
                argument = "--split" if options.ranks.split else "--workers"
                raise InvalidValue("these ranks are started by a launcher of yours", cure=cure, argument=argument)
            if not options.named_runner:
                check_split(plan.config, options.ranks.tp)
            return take_part(launched, options)
        keys = options.sink_keys()
        if options.ranks.size > 1 or options.ranks.split or options.ranks.workers:
            from .run_ranks import generate_on_ranks

            return generate_on_ranks(plan, params, options)
        device = stack.enter_context(_open(options))
        name, why_paddle = _choose(options, device)
        if name == PADDLE:  # known before much is loaded
            overlap_of(options.overlap, device, PADDLE_MODEL, ModelRunner.needs_host)
        with signals.at_once(device.close):  # there may be much to load, and nothing to tidy up but the device
            model = _load_model(options) if name == PADDLE else None
            runner = None if name == PADDLE else _open_runner(name, device, plan, options)
        screen = open_screen()
        stack.callback(screen.close)
        for note in plan.notes:
            screen.note(note)
        facts = facts_of(device) if options.as_json else None
        answers = Answers(plan, screen, device=facts, logprobs=params.logprobs is not None)
        rejection, vocab = options.acceptance == REJECTION, plan.config.vocab_size
        proposer = open_proposer(options.speculate, plan.sizes, vocab, model, rejection=rejection)
        if proposer is not None:
            stack.enter_context(closing_well(proposer))
            answers.speculate = options.speculate, proposer.drafted
        with _Show(answers, options.sink, keys) as show:
            worker: Stepper
            if runner is None:
                assert model is not None
                worker = Worker(
                    device, model, plan.sizes, plan.blocks, show.sink, proposer=proposer, rejection=rejection
                )
            else:
                worker = Stepper(device, runner[1], runner[0], show.sink, blocks=plan.blocks)
            who, needs_host = PADDLE_MODEL if runner is None else name, worker.runner.needs_host
            overlap, why = overlap_of(options.overlap, device, who, needs_host)
            engine = Engine(worker, chunk=options.chunk, step_tokens=options.step_tokens, overlap=overlap)
            began = time.perf_counter()
            drive(engine, plan, answers, show)
            seconds = time.perf_counter() - began
        if answers.incomplete:
            raise HalError(f"no record told the end of {answers.incomplete}", cure="report it: the output path lost it")
        scheduler = engine.scheduler
        drafts = summed_up(options.speculate, worker.acceptance) if isinstance(worker, Worker) else ""
        used = (scheduler.most_running, plan.sizes.num_slots, scheduler.preemptions)
        place = f"model on {options.model_place}" if runner is None else _called(name, runner[0])
        said = where(device, place, no_overlap=why, why_paddle=why_paddle)
        summarize(screen, answers, seconds, used, drafts, said)
    signals.check()
    return FAILED if answers.failed else 0


class _Show:
    """The output path: the worker's sink, and the thread that reads what comes out of it and shows it."""

    def __init__(self, answers: Answers, also: str | None, keys: CurveKeys | None) -> None:
        """``also``: a url to which the records go as well, with ``keys``."""
        self._answers = answers
        self._over = False
        self.error: BaseException | None = None
        reader = OutputReader(on_event=self._hear)
        self._sinks: list[Sink] = []
        try:
            self._sinks.append(open_sink(reader.url))
            self._sinks += [open_sink(also, curve=keys)] if also else []
        except BaseException:
            close_all(self._sinks, 0.0)
            reader.close()
            raise
        self._own: Any = self._sinks[0]
        self.sink: Sink = Copies(self._sinks) if also else self._own
        self._thread = threading.Thread(target=self._read, args=(reader,), name="hal-run-reader", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            close_all(self._sinks, 0.0)
            reader.close()
            raise

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

    def _shows(self) -> bool:
        """Whether the thread has still something to show."""
        counts = self._own.counters()
        return self._thread.is_alive() and bool(counts["queued"] or counts["unacknowledged"])

    def __enter__(self) -> _Show:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Have everything shown, however slowly it is read; after an error only leave nothing behind."""
        while kind is None and self.error is None and signals.came() is None and self._shows():
            self._thread.join(_SHOW_SECONDS)
        failed = kind is not None or self.error is not None
        patience = _CLOSE_SECONDS if signals.came() is None else _LEAVE_SECONDS
        try:
            close_all(self._sinks, 0.0 if failed else patience)
        except HalError:
            if not failed and self.error is None and signals.came() is None:  # that one says why
                raise
        finally:
            unused = not self._own.counters()["frames"]  # no good-bye comes if the two never met
            self._over = self._over or failed or unused or signals.came() is not None
            self._thread.join(patience)
        if self._thread.is_alive() and signals.came() is not None:
            say("hal: standard output takes nothing: what was left of the text is not shown")
            signals.end_now()
        if kind is None and self.error is not None:
            raise self.error


def _choose(options: Options, device: BoundDevice) -> tuple[str, str]:
    """The runner's name, and why ``auto`` took the Paddle model; without Paddle, that is an error."""
    if options.runner == AUTO and options.paddle_alone:
        return PADDLE, options.paddle_alone
    name, why = choose_runner(options.runner, device, options.model)
    if name == PADDLE:
        _check_paddle()
    return name, why


def _called(name: str, runner: Runner) -> str:
    """A runner in the line that sums a run up: its name, and what it says of itself, if anything."""
    note = getattr(runner, "note", "")
    return f"runner {name} ({note})" if note else f"runner {name}"


def _open_runner(name: str, device: BoundDevice, plan: Plan, options: Options) -> tuple[Runner, SlotState]:
    """The runner of that name, and the state that it runs on."""
    state = device.state(plan.sizes)
    vocab, place = plan.config.vocab_size, options.model_place
    setup = RunnerSetup(device, state, plan.blocks, options.model, place, vocab, ALONE, options.dtype)
    runner = make_runner(name, setup)
    overlap_of(options.overlap, device, name, runner.needs_host)
    return runner, state


def _open(options: Options) -> BoundDevice:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="paddle")  # it says what it cannot compile
        return open_as_asked(options.device, options.require)


def _check_paddle() -> None:
    """Raise before anything else is done if the model cannot run for want of Paddle."""
    if find_spec("paddle") is None:
        raise ModuleNotFoundError("No module named 'paddle'", name="paddle")
    check_processor()


def _load_model(options: Options) -> LlamaModel:
    try:
        with warnings.catch_warnings(), signals.kept(), uncollected():
            warnings.filterwarnings("ignore", module="paddle")  # on import, it says what it cannot compile
            from hal.model.llama import LlamaModel
    except (ImportError, OSError, RuntimeError) as error:  # RuntimeError: for a library of its own that it cannot load
        if isinstance(error, ModuleNotFoundError):
            raise
        what = f"Paddle, which the model runs on, cannot be imported: {one_line(error)[:400]}"
        raise Unavailable(what, cure=f"reinstall it: {cure_of('paddle')}") from error
    return LlamaModel.load(options.model, place=options.model_place)


class _Said(logging.Handler):
    """Says each record as a line of the command's own."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


@contextmanager
def _plain_logs() -> Iterator[None]:
    """Say what hal logs in a plain line; not the device's fallbacks, which the command says itself."""
    handler = _Said()
    handler.setFormatter(logging.Formatter("hal: %(message)s"))
    handler.addFilter(lambda record: record.module != "bound")
    log = logging.getLogger("hal")
    former = log.handlers, log.propagate, log.level
    log.handlers, log.propagate = [handler], False
    if failures.verbose:
        log.setLevel(logging.DEBUG)  # the tracebacks of runners that failed
    try:
        yield
    finally:
        log.handlers, log.propagate = former[:2]
        log.setLevel(former[2])
