"""``hal run`` in one process: an engine with its worker, and a thread that shows the records."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from hal_core import ALONE, HalError, InvalidValue, Unavailable
from hal_core.devices import check_processor

from hal.cli import failures, logs, signals
from hal.cli.console import status
from hal.cli.failures import cure_of, of_option, one_line
from hal.cli.imports import uncollected
from hal.opening import open_as_asked, quiet_paddle
from hal_engine.engine import Engine
from hal_engine.engine.handed import HandedSink
from hal_engine.proposers.asked import REJECTION, drafts_beside, no_drafts
from hal_engine.proposers.counted import closing_well, open_proposer
from hal_engine.proposers.loading import NONE
from hal_engine.stepping import AUTO, PADDLE, RunnerSetup, Stepper, check_drafts, choose_runner, make_runner, overlap_of
from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport.descriptors import SENDER, check_descriptors
from hal_engine.worker import ModelRunner, Worker

from .run_options import PADDLE_MODEL, Options
from .run_output import Answers, Shown, drive, facts_of, reasons, summarize, summed_up, used_up
from .run_plan import make_plan
from .screen import open_screen

if TYPE_CHECKING:
    from hal_core import BoundDevice, Sink, SlotState

    from hal_engine.model.llama import LlamaModel
    from hal_engine.stepping import Runner
    from hal_engine.transport.curve import CurveKeys

    from .run_plan import Plan, Prompts

FAILED = 2
"""Exit status: a request ended with an error."""
_LAUNCHED = "PADDLE_TRAINERS_NUM"
"""Variable with the number of processes that Paddle's launcher started."""
_DESCRIPTORS = 8
"""File descriptors that Paddle and a device open."""


def generate(prompts: Prompts, options: Options) -> int:
    """Generate for all prompts and show the answers. Return the exit status. Raises :class:`HalError` for options that
    cannot work."""
    if os.environ.get(_LAUNCHED, "1") != "1":
        raise InvalidValue(
            "a launcher started this command once for each rank",
            cure="run it without: --tp, --dp and --split start ranks, on several hosts with --launcher ray",
            argument=_LAUNCHED,
        )
    named = options.runner == AUTO and options.paddle_alone and options.speculate == NONE
    if options.runner == PADDLE or named:  # a proposer is refused first where a runner would run
        _check_paddle()
    status("reading the tokenizer")
    plan = make_plan(prompts.prompts, options, prompts.notes)
    check_descriptors(_DESCRIPTORS + SENDER * (options.sink is not None), "hal run")
    with signals.noted(), ExitStack() as stack:
        stack.enter_context(_logs(options))
        keys = options.sink_keys()
        if options.ranks.size > 1 or options.ranks.split:
            from .run_ranks import generate_on_ranks

            return generate_on_ranks(plan, options)
        device = stack.enter_context(open_as_asked(options.device, options.require))
        if options.record is not None:
            stack.enter_context(_recorded(options.record, device))
        name, why_paddle = _choose(options, device)
        if name == PADDLE:  # checked before the model is loaded
            overlap_of(options.overlap, device, PADDLE_MODEL, ModelRunner.needs_host)
        with signals.at_once(device.close):  # loading may take long, and only the device needs cleaning up
            model = _load_model(options) if name == PADDLE else None
            runner = None if name == PADDLE else _open_runner(name, device, plan, options)
        screen = open_screen(quiet=options.quiet)
        stack.callback(screen.close)
        facts = facts_of(device) if options.as_json else None
        answers = Answers(plan, screen, device=facts)
        rejection, vocab = options.acceptance == REJECTION, plan.config.vocab_size
        proposer = open_proposer(options.speculate, plan.sizes, vocab, model, rejection=rejection)
        if proposer is not None:
            stack.enter_context(closing_well(proposer))
            answers.speculate = options.speculate, proposer.drafted
        elif options.asks_runner:
            answers.speculate = name, None
        with _open_output(options.sink, keys) as (sink, handed), Shown().by(answers) as shown:
            worker: Stepper
            if runner is None:
                assert model is not None
                worker = Worker(device, model, plan.sizes, plan.blocks, sink, proposer=proposer, rejection=rejection)
            else:
                worker = Stepper(device, runner[1], runner[0], sink, blocks=plan.blocks)
            who, needs_host = PADDLE_MODEL if runner is None else name, worker.runner.needs_host
            overlap, why = overlap_of(options.overlap, device, who, needs_host)
            handed.to = shown.take
            engine = Engine(
                worker, chunk=options.chunk, step_tokens=options.step_tokens, overlap=overlap, on_record=handed.take
            )
            began = time.perf_counter()
            drive(engine, plan, answers, shown)
            seconds = time.perf_counter() - began
        if answers.incomplete:
            raise HalError(f"no record ended {answers.incomplete}", cure="report it: the output path lost it")
        who_drafts = name if options.asks_runner else options.speculate
        used = used_up(engine.most_running, plan.sizes.num_slots, engine.preemptions)
        place = f"model on {options.model_place}" if runner is None else f"runner {name}"
        summarize(
            screen,
            answers,
            options,
            seconds=seconds,
            place=f"device {device.name}, {place}",
            details=[used, *summed_up(options.most_drafts, who_drafts, worker.acceptance), *_of_runner(name, runner)],
            notes=[*plan.notes, *reasons(device, no_overlap=why, why_paddle=why_paddle)],
        )
    signals.check()
    return FAILED if answers.failed else 0


@contextmanager
def _recorded(file: Path, device: BoundDevice) -> Iterator[None]:
    """Record the device's calls in a file."""
    from hal_conformance.replay.recorder import CallRecorder

    with of_option("--record"):
        recorder = CallRecorder(file, device)
    try:
        yield
    finally:
        with of_option("--record"):
            recorder.close()


@contextmanager
def _open_output(url: str | None, keys: CurveKeys | None) -> Iterator[tuple[Sink, HandedSink]]:
    """Open the worker's sink, which delivers records in this process and, with ``url``, also sends them there.

    At the end it sends what is left. After an error or a signal it does not wait long for that.
    """
    handed = HandedSink()
    sent: list[Sink] = []
    sink: Sink = handed
    if url is not None:
        from hal_engine.transport import open_sink
        from hal_engine.transport.fanout_sink import FanoutSink

        sent = [open_sink(url, curve=keys)]
        sink = FanoutSink([*sent, handed])
    failed = True
    try:
        yield sink, handed
        failed = False
    finally:
        handed.close(0.0 if failed or signals.came() is not None else TIMEOUTS.sink_close)
        for one in sent:
            try:
                left = TIMEOUTS.sink_close if signals.came() is None else TIMEOUTS.sink_close_signal
                one.close(0.0 if failed else left)
            except HalError:
                if not failed and signals.came() is None:  # the error or signal explains this failure
                    raise


def _choose(options: Options, device: BoundDevice) -> tuple[str, str]:
    """Return the runner's name, and why ``auto`` chose the Paddle model. Raises if that needs Paddle and it is
    missing."""
    name, why = choose_runner(options.runner, device, options.model)
    if options.runner == AUTO and options.speculate != NONE and name != PADDLE:
        raise drafts_beside(options.speculate, name)
    if options.runner == AUTO and options.paddle_alone:
        _check_paddle()
        return PADDLE, options.paddle_alone
    if name == PADDLE:
        if options.asks_runner:
            raise no_drafts(why)
        _check_paddle()
    return name, why


def _of_runner(name: str, runner: tuple[Runner, SlotState] | None) -> list[str]:
    """Return the line with a runner's own note, if it has one."""
    note = "" if runner is None else getattr(runner[0], "note", "")
    return [f"runner {name}: {note}"] if note else []


def _open_runner(name: str, device: BoundDevice, plan: Plan, options: Options) -> tuple[Runner, SlotState]:
    """Return the runner of that name, and its state."""
    state = device.state(plan.sizes)
    vocab, place = plan.config.vocab_size, options.model_place
    setup = RunnerSetup(device, state, plan.blocks, options.model, place, vocab, ALONE, options.dtype)
    status(f"preparing runner {name}")
    runner = make_runner(name, setup)
    check_drafts(name, runner, options.most_drafts)
    overlap_of(options.overlap, device, name, runner.needs_host)
    return runner, state


def _check_paddle() -> None:
    """Raise before anything else if Paddle is missing, or cannot run on this processor."""
    if find_spec("paddle") is None:
        raise ModuleNotFoundError("No module named 'paddle'", name="paddle")
    check_processor()


def _load_model(options: Options) -> LlamaModel:
    status("loading Paddle")
    try:
        with quiet_paddle(), signals.kept(), uncollected():
            from hal_engine.model.llama import LlamaModel
    except (ImportError, OSError, RuntimeError) as error:  # RuntimeError: a library of Paddle's cannot be loaded
        if isinstance(error, ModuleNotFoundError):
            raise
        what = f"Paddle, which the model runs on, cannot be imported: {one_line(error)[:400]}"
        raise Unavailable(what, cure=f"reinstall it: {cure_of('paddle')}") from error
    status("reading the model")
    return LlamaModel.load(options.model, place=options.model_place)


def _logs(options: Options) -> AbstractContextManager[None]:
    """Print hal's log records. Without ``HAL_LOG`` the device's fallbacks are left out, because the command prints them
    itself."""
    named = logs.level()
    usual = logging.DEBUG if failures.verbose else logging.ERROR if options.quiet else None  # DEBUG: tracebacks
    return logs.said(usual if named is None else named, without="bound" if named is None else "")
