"""``hal run``: generates text with the options of an engine, and prints it."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from hal_core import HalError, InvalidValue, PluginError, Undelivered

from hal.cli import failures, logs, signals
from hal.cli.console import say, status
from hal.cli.imports import uncollected
from hal.cli.tree import all_options
from hal_engine.mkl import kernels_note
from hal_engine.options import EngineOptions, engine_options

from .parameters import parameters, read, set_parameters, was_given
from .run_options import Output, Sampling
from .run_plan import Plan, Prompts, make_plan, read_prompts

if TYPE_CHECKING:
    from hal_engine.distributed.errors import RankLost
    from hal_engine.opening import Host, Opened

    from .run_output import Answers

LOST, FAILED = 1, 2
"""Exit statuses: ranks were lost; a request ended with an error."""
_FIRST = ("model", "device", "max_tokens", "temperature", "top_p", "seed", "as_json", "quiet", "verbose")
"""Options of the short help, in its order."""
_LAUNCHED = "PADDLE_TRAINERS_NUM"
"""Variable with the number of processes that Paddle's launcher started."""
_DESCRIPTORS = 8
"""File descriptors that Paddle and a device open."""


def command(
    ctx: typer.Context,
    *,
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="A text to continue; -: standard input, one a line.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A file with one prompt a line. FILE.jsonl: an object a line (prompt, sampling parameters).",
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="A text to continue, as PROMPT.", rich_help_panel="prompt"),
    ] = None,
    help_all: Annotated[
        bool, typer.Option("--help-all", is_eager=True, callback=all_options, help="Show all options and exit.")
    ] = False,
    **given: Any,  # noqa: ANN401 (as the options say)
) -> None:
    """Generate text with a model: the small one that ships, or a Llama-, Mistral-, Qwen2- or Qwen3-style checkpoint.

    A pipe or a file on standard input is read for prompts, one a line, where no other is given.
    """
    failures.verbose = given["verbose"]
    if given["verbose"] and (note := kernels_note(os.environ)):
        say(f"hal: {note}")
    sampling = Sampling(**read(Sampling, given))
    sampling.params()
    output = Output(**read(Output, given))
    options = engine_options(read(EngineOptions, given))
    if output.record is not None and options.several:
        cure = "leave it out, or run one rank"
        raise InvalidValue("a recording has the calls of one rank", cure=cure, argument="--record")
    if prompts is None or prompts.suffix != ".jsonl":  # its lines may sample, and do not need --json
        sampling.check_given([name for name in given if was_given(ctx, name)])
    found = read_prompts(texts or (), prompt or (), prompts, sampling)
    output.check_shown(one.sampling for one in found.prompts)
    try:
        sink = {} if output.sink is None else {"sink": "--sink"}
        with failures.as_typed(**sink, url="--sink", prompt="PROMPT", name="--device"):
            code = generate(found, options, output)
    except SystemExit as end:  # hal raises no SystemExit here, and its status could be 0
        what = f"a runner or plugin called sys.exit({'' if end.code is None else repr(end.code)}) during the run"
        raise PluginError(what, cure="have it raise an error instead; -v shows where") from end
    raise typer.Exit(code)


set_parameters(
    command,
    parameters(Sampling) | parameters(EngineOptions) | parameters(Output),
    first=("ctx", "texts", "prompts", *_FIRST),
)


def generate(prompts: Prompts, options: EngineOptions, output: Output) -> int:
    """Generate for all prompts and show the answers. Return the exit status. Raises :class:`HalError` for options that
    cannot work."""
    from hal_engine.distributed.errors import RankLost
    from hal_engine.opening import check_runner
    from hal_engine.transport.descriptors import SENDER, check_descriptors

    if os.environ.get(_LAUNCHED, "1") != "1":
        raise InvalidValue(
            "a launcher started this command once for each rank",
            cure="run it without: --tp, --dp and --split start ranks, on several hosts with --launcher ray",
            argument=_LAUNCHED,
        )
    check_runner(options)
    status("reading the tokenizer")
    with signals.held():  # it starts threads
        plan = make_plan(prompts.prompts, options, output, prompts.notes)
    check_descriptors(_DESCRIPTORS + SENDER * (output.sink is not None), "hal run")
    with signals.noted(), _logs(output):
        try:
            answers = _run(plan, output)
        except RankLost as error:
            say(f"hal: error: {_message(error)}")
            return LOST
    signals.check()
    return FAILED if answers.failed else 0


def _run(plan: Plan, output: Output) -> Answers:
    from hal_engine.opening import open_engine

    from .live import LivePanel
    from .run_output import Answers, Shown, drive, facts_of, reasons, summarize
    from .screen import open_screen

    shown, screen, standard_output = Shown(), None, sys.stdout
    with ExitStack() as stack, ExitStack() as opening:
        if not plan.setup.several:  # this process imports Paddle
            opening.enter_context(signals.held())
        opened = stack.enter_context(
            open_engine(
                plan.setup,
                shown.take,
                host=_host(),
                record=output.record,
                note=lambda text: screen.note(text) if screen is not None else None,
            )
        )
        opening.close()
        with redirect_stdout(standard_output):  # while Ray is connected, sys.stdout is hal's log
            screen = open_screen(quiet=output.quiet)
        stack.callback(screen.close)
        answers = Answers(plan, screen, device=facts_of(opened.device) if output.as_json else None)
        if output.live:
            answers.panel = LivePanel(opened, plan.setup.all_slots, reasons(opened.device))
        answers.drafts = (opened.drafter, opened.drafted) if opened.drafter else None
        with shown.by(answers):
            began = time.perf_counter()
            drive(opened.engine, plan, answers, shown)
            seconds = time.perf_counter() - began
        opened.engine.stop()
        if opened.engine.undelivered:
            listed = _listed(opened.engine.undelivered)
            what = f"not acknowledged by a reader of {output.sink}: {listed}"
            cure = "start the reader first, and run these requests again"
            raise Undelivered(what, opened.engine.undelivered, cure=cure)
        if answers.incomplete:
            raise HalError(f"no record ended {answers.incomplete}", cure="report it: the output path lost it")
        closing = _closing(plan, opened, [] if answers.panel is None else answers.panel.hooks())
    summarize(screen, answers, output, seconds=seconds, place=f"device {opened.device.name}, {opened.place}", **closing)
    return answers


def _closing(plan: Plan, opened: Opened, hooks: Sequence[str]) -> dict[str, Sequence[str]]:
    """Return the lines about a run that ``-v`` shows, and ``--live`` without the notes. ``hooks``: the line of
    their times."""
    from .run_output import reasons, summed_up, used_up

    engine, setup = opened.engine, plan.setup
    again = [f"ranks were started again {engine.restarts} time(s)"] if engine.restarts else []
    return {
        "details": [
            used_up(engine.most_running, setup.all_slots, engine.preemptions),
            *summed_up(setup.most_drafts, opened.drafter, opened.acceptance()),
            *opened.details,
            *hooks,
        ],
        "notes": [
            *again,
            *plan.notes,
            *reasons(opened.device, no_overlap=opened.no_overlap, why_default=opened.why_default),
        ],
    }


def _host() -> Host:
    """Return what this command does while an engine is opened: it shows where that is, and answers signals."""
    from hal_engine.opening import Host

    return Host(
        status=status,
        check=signals.check,
        hurried=lambda: signals.came() is not None,
        importing=uncollected,
        loading=signals.at_once,
    )


def _logs(output: Output) -> AbstractContextManager[None]:
    """Print hal's log records. Without ``HAL_LOG`` the device's fallbacks are left out, because the command prints them
    itself."""
    named = logs.level()
    usual = logging.DEBUG if failures.verbose else logging.ERROR if output.quiet else None  # DEBUG: tracebacks
    return logs.printed(usual if named is None else named, without="bound" if named is None else "")


def _message(error: RankLost) -> str:
    """Return the loss as one line, with the requests that will not be delivered."""
    lost = f"; not delivered: {_listed(error.undelivered)}" if error.undelivered else ""
    return f"{error.what}{lost} ({error.cure})"


def _listed(deliveries: Sequence[tuple[str, int, int]]) -> str:
    """Return every request once, with its first missing position (0 if unknown). Neighbouring prompts with the same
    position are one entry, because thousands may not have begun."""
    first: dict[str, int] = {}
    for name, position, _ in deliveries:
        first[name] = max(0, min(position, first.get(name, position)))
    runs: list[list[str]] = []
    for name in first:
        last = runs[-1][-1] if runs else ""
        follows = last[1:].isdecimal() and name == f"r{int(last[1:]) + 1}"
        if follows and first[last] == first[name]:
            runs[-1].append(name)
        else:
            runs.append([name])
    return ", ".join(f"{run[0]}{f' to {run[-1]}' * (len(run) > 1)} from {first[run[0]]} on" for run in runs)
