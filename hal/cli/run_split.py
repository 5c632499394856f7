"""``hal run --split P,D``: P workers that prefill and D that decode, each of ranks of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from hal_core import OutputRecord, SplitRole, admit, lay_out

from hal.distributed.crew import Crew
from hal.distributed.launch import PaddleLaunch
from hal.distributed.split import SplitEngine, SplitWorker
from hal.distributed.team import Team
from hal.engine import Scheduler
from hal.engine.roles import DecodeScheduler, PrefillScheduler

from . import signals

if TYPE_CHECKING:
    from hal_core import AdmittedRequest, Request

    from hal.distributed.words import Setup

    from .run_options import Options, RankOptions
    from .run_plan import Plan
    from .run_ray import RayRanks


def ranks_told(ranks: RankOptions) -> str:
    """How the closing line calls the ranks."""
    if ranks.split is None:
        return f"tp {ranks.tp} x dp {ranks.dp}"
    return f"split {ranks.split[0]},{ranks.split[1]} of tp {ranks.tp}"


def split_engine(
    plan: Plan,
    options: Options,
    setup: Setup,
    on_record: Callable[[OutputRecord], None],
    note: Callable[[str], None],
    on_ray: RayRanks | None = None,
) -> SplitEngine:
    """Start the workers, here or ``on_ray``, and the engine that they share.

    ``note`` gets a line for each worker that is lost. Raises as :class:`SplitEngine`."""
    assert options.ranks.split is not None
    prefill, decode = options.ranks.split
    tp, layout = options.ranks.tp, lay_out(plan.sizes)
    vocabularies = {plan.config.vocab_size}  # and of each worker's runner that is up

    def admits(request: Request) -> AdmittedRequest:
        return admit(request, layout=layout, vocab_size=min(vocabularies))

    def crew(role: SplitRole, place: int) -> Crew:
        mine = msgspec.structs.replace(setup, role=role, number=place)
        if on_ray is not None:
            return on_ray.crew(mine, wait=False)
        starter = PaddleLaunch(tp, before=place * tp, among=(prefill + decode) * tp)
        return Crew(mine, starter, look=signals.check, wait=False)

    def limits(kind: type[Scheduler]) -> Scheduler:
        return kind(layout, plan.blocks, chunk=options.chunk, step_tokens=options.step_tokens, admit=admits)

    def prefills(made: Crew, told: Callable[[OutputRecord], None]) -> Team[PrefillScheduler]:
        vocabularies.add(made.abilities.vocab_size)
        return Team(made, [limits(PrefillScheduler)], told)  # type: ignore[list-item]

    def decodes(made: Crew, told: Callable[[OutputRecord], None]) -> Team[DecodeScheduler]:
        vocabularies.add(made.abilities.vocab_size)
        return Team(made, [limits(DecodeScheduler)], told)  # type: ignore[list-item]

    return SplitEngine(
        [
            SplitWorker(SplitRole.PREFILL, number, partial(crew, SplitRole.PREFILL, number), prefills)
            for number in range(prefill)
        ],
        [
            SplitWorker(SplitRole.DECODE, number, partial(crew, SplitRole.DECODE, place), decodes)
            for number, place in enumerate(range(prefill, prefill + decode))
        ],
        limits(Scheduler).check,
        restarts=options.ranks.restart,
        on_record=on_record,
        note=note,
        drafts=not setup.rejection,
    )
