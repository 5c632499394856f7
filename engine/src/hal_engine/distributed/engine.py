"""The engine of ranks: one worker of several groups, or a prefill/decode split of workers with one group each."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from hal_core import AdmittedRequest, OutputRecord, Request, SplitRole, admit, lay_out

from hal_engine.engine import Engine, Limits, Scheduler
from hal_engine.engine.engine import Wait, wait_for
from hal_engine.engine.front import Queue
from hal_engine.engine.roles import DecodeScheduler, PrefillScheduler
from hal_engine.stepping.runner import Supported

from .split import Migration
from .worker import RankWorker

if TYPE_CHECKING:
    from .control_messages import Setup
    from .rank_executor import RankExecutor

_KINDS: dict[SplitRole, type[Scheduler]] = {
    SplitRole.MIXED: Scheduler,
    SplitRole.PREFILL: PrefillScheduler,
    SplitRole.DECODE: DecodeScheduler,
}


def engine_of_ranks(
    setup: Setup,
    start: Callable[[Setup], RankExecutor],
    *,
    on_record: Callable[[OutputRecord], object] = lambda record: None,
    note: Callable[[str], object] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
    wait: Wait = wait_for,
) -> Engine:
    """Start ranks, and return the engine in front of them. Raises as
    :class:`hal_engine.distributed.rank_executor.RankExecutor`.

    - ``start``: begins to start the ranks of a worker; ``Setup.number`` counts workers, prefill workers first.
    - ``setup``: the model's vocabulary is that of its sizes; a smaller one of the ranks' runner takes precedence.
    - ``clock``: of a split.
    """
    split, layout = setup.split, lay_out(setup.sizes)
    vocabularies = {setup.sizes.vocab_size or 1}  # and of the runner of each worker that is up
    supported: dict[SplitRole, Supported] = {}  # by the runner of each role's workers

    def admits(request: Request) -> AdmittedRequest:
        for one in supported.values():
            one.check(request.params)
        return admit(request, layout=layout, vocab_size=min(vocabularies))

    def scheduler(kind: type[Scheduler], preferred: int | None = None) -> Scheduler:
        return kind(layout, setup.blocks, limits=Limits.of(setup).preferring(preferred), admit=admits)

    def schedulers(role: SplitRole, rank_executor: RankExecutor) -> list[Scheduler]:
        vocabularies.add(rank_executor.rank_info.vocab_size)
        supported[role] = Supported(setup.named_runner or "the model", rank_executor.rank_info.supports)
        return [scheduler(_KINDS[role], rank_executor.rank_info.chunk) for _ in range(setup.dp)]

    prefill, decode = SplitRole.PREFILL, SplitRole.DECODE
    places = [(setup.role, 0)] if split is None else [(prefill, n) for n in range(split[0])]
    places += [] if split is None else [(decode, n) for n in range(split[1])]
    workers = [
        RankWorker(
            role,
            number,
            partial(start, msgspec.structs.replace(setup, role=role, number=place)),
            partial(schedulers, role),
        )
        for place, (role, number) in enumerate(places)
    ]
    front: Any = Queue
    if split is not None:
        check = scheduler(Scheduler).check
        front = partial(Migration, check=check, drafts=not setup.rejection, clock=clock)
    return Engine(workers, front=front, restarts=setup.restart, on_record=on_record, note=note, wait=wait)
