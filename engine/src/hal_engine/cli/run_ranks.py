"""``hal run`` on ranks: this process is the engine and imports no framework."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from hal_core import HalError, InvalidValue, Undelivered

from hal.cli import signals
from hal.cli.console import say, status
from hal_engine.distributed.control_messages import Setup
from hal_engine.distributed.engine import open_engine
from hal_engine.distributed.errors import RankLost
from hal_engine.distributed.starting import RankStart
from hal_engine.distributed.state_check import VARIABLE
from hal_engine.model.split import check_split
from hal_engine.proposers import NONE
from hal_engine.proposers.asked import REJECTION
from hal_engine.stepping import AUTO, Acceptance, overlap_of
from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport.descriptors import check_rank_limit
from hal_engine.worker import ModelRunner

from .run_options import PADDLE_MODEL, Options, RankOptions
from .run_output import Answers, Shown, drive, facts_of, reasons, summarize, summed_up, used_up
from .run_plan import Plan
from .screen import Screen, open_screen

if TYPE_CHECKING:
    from hal_core import SamplingParams

    from hal_engine.engine import Engine

LOST, FAILED = 1, 2
"""Exit statuses: ranks were lost; a request ended with an error."""


def generate_on_ranks(plan: Plan, options: Options) -> int:
    """Generate for all prompts on ranks and show the answers. Return the exit status."""
    ranks = options.ranks
    if ranks.launcher == "paddle":  # checked before a rank fails deep in a library
        option = "--split" if ranks.split else "--tp" if ranks.tp > 1 else "--dp"
        check_rank_limit(ranks.size, argument=option)
    if options.named_runner and _asked_to_check():
        raise InvalidValue(
            "the comparison of the ranks' states goes with the Paddle model's steps, and not with a runner's",
            cure="unset it, or leave --runner out",
            argument=VARIABLE,
        )
    if options.named_runner and len({_drawn(request.params) for request in plan.requests}) > 1:
        raise InvalidValue(
            "lines differ in how they sample, and ranks check their runner for one way",
            cure="give these parameters as options, or leave --runner out",
            argument="--prompts",
        )
    if not options.named_runner:
        check_split(plan.config, options.ranks.tp)
        overlap_of(options.overlap, None, PADDLE_MODEL, ModelRunner.needs_host)
    start = RankStart(ranks.ranks(), options.device, signals.check)
    try:
        status = _generate(plan, options, start)
    except RankLost as error:
        say(f"hal: error: {_told(error)}")
        return LOST
    signals.check()
    return status


def _generate(plan: Plan, options: Options, start: RankStart) -> int:
    with ExitStack() as stack:
        status("starting the ranks")
        screen = open_screen(quiet=options.quiet)
        stack.callback(screen.close)
        stack.enter_context(start)
        shown = Shown()
        engine = _engine(plan, options, shown, screen, start)
        stack.callback(lambda: engine.close())
        able = engine.worker.rank_info
        facts = facts_of(able) if options.as_json else None
        answers = Answers(plan, screen, device=facts)
        if options.speculate != NONE:
            answers.speculate = options.speculate, engine.drafted
        elif options.asks_runner:
            answers.speculate = options.named_runner, None
        with shown.by(answers):
            began = time.perf_counter()
            drive(engine, plan, answers, shown)
            seconds = time.perf_counter() - began
        engine.stop()
        if engine.undelivered:
            raise Undelivered(
                f"not acknowledged by a reader of {options.sink}: {_listed(engine.undelivered)}",
                engine.undelivered,
                cure="start the reader first, and run these requests again",
            )
        if answers.incomplete:
            raise HalError(f"no record ended {answers.incomplete}", cure="report it: the output path lost it")
        who_drafts = options.named_runner if options.asks_runner else options.speculate
        drafts = summed_up(options.most_drafts, who_drafts, Acceptance(*engine.drafts))
        named, placed = options.named_runner, f" on devices {', '.join(map(str, able.indices))}"
        ranks = _ranks_told(options.ranks) + placed * (len(set(able.indices)) > 1)
        decode = options.ranks.split[1] if options.ranks.split else options.ranks.dp
        used = used_up(engine.most_running, plan.sizes.num_slots * decode, engine.preemptions)
        again = [f"ranks were started again {engine.restarts} time(s)"] if engine.restarts else []
        why = options.paddle_alone if options.runner == AUTO else ""
        place = f"runner {named}" if named else f"model on {options.model_place}"
        summarize(
            screen,
            answers,
            options,
            seconds=seconds,
            place=f"device {able.name}, {place}, {ranks}",
            details=[used, *drafts],
            notes=[*again, *plan.notes, *reasons(able, no_overlap=able.no_overlap, why_paddle=why)],
        )
    return FAILED if answers.failed else 0


def _setup(plan: Plan, options: Options) -> Setup:
    ranks = options.ranks
    return Setup(
        model=str(options.model.resolve()),
        place=options.model_place,
        device=options.device or os.environ.get("HAL_DEVICE"),
        require=dict(options.require),
        sizes=plan.sizes,
        blocks=plan.blocks,
        **ranks.ranks().fields(),
        records="",
        timeout=TIMEOUTS.collective,
        everywhere=ranks.sampling == "every-rank",
        check=_asked_to_check(),
        sink=options.sink or "",
        sink_key="" if (keys := options.sink_keys()) is None else keys.secret,
        speculate=options.speculate,
        rejection=options.acceptance == REJECTION,
        runner=options.named_runner,
        dtype=options.dtype,
        transfer=ranks.transfer or "",
        overlap=options.overlap,
        params=plan.requests[0].params,
    )


def _engine(plan: Plan, options: Options, shown: Shown, screen: Screen, start: RankStart) -> Engine:
    ranks = options.ranks
    return open_engine(
        _setup(plan, options),
        start,
        vocab_size=plan.config.vocab_size,
        split=ranks.split,
        chunk=options.chunk,
        step_tokens=options.step_tokens,
        restarts=ranks.restart,
        on_record=shown.take,
        note=screen.note if ranks.split else lambda text: None,
    )


def _ranks_told(ranks: RankOptions) -> str:
    """Return the ranks as the closing line names them."""
    if ranks.split is None:
        return f"tp {ranks.tp} x dp {ranks.dp}"
    return f"split {ranks.split[0]},{ranks.split[1]}{f' of tp {ranks.tp}' * (ranks.tp > 1)}"


def _drawn(params: SamplingParams) -> SamplingParams:
    """Return parameters without those that every runner supports."""
    return replace(params, seed=0, min_tokens=0, max_tokens=1)


def _asked_to_check() -> bool:
    return os.environ.get(VARIABLE, "") not in ("", "0")


def _told(error: RankLost) -> str:
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
