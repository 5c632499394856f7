"""The job of :mod:`tests.distributed.rows` on workers of two roles, whose ranks are those of pools."""

from __future__ import annotations

from functools import partial

import msgspec
from hal_core import SplitRole, admit, lay_out

from hal.distributed.crew import Crew
from hal.distributed.split import SplitEngine, SplitWorker
from hal.distributed.team import Team
from hal.engine import Scheduler
from hal.engine.roles import DecodeScheduler, PrefillScheduler
from hal.model import DEFAULT_CHECKPOINT
from hal.model.config import read_config
from tests.distributed.rows import Pooled, Told, requests
from tests.ranks import ForkedRanks


class Own(Pooled):
    """Ranks of a pool of their own, which ends with them."""

    def __init__(self, size, how=()):
        super().__init__(None, how)
        self._size = size

    def start(self, url):
        self.pool = self._pool = ForkedRanks(self._size)
        super().start(url)

    def end(self, patience):
        if self._pool is not None:
            if patience < 1:
                self._pool.kill()
            self._thread.join(patience)
            self._pool.kill()
            self._thread.join(10)
            self._pool.close()


def engine_of(row, split, starter, told, made_by=Crew, **options):
    """An engine whose workers' ranks ``starter`` gives: of the number of the worker, prefill workers first.
    ``made_by``: makes the crew of each."""
    layout, config = lay_out(row.sizes), read_config(DEFAULT_CHECKPOINT)
    limits = {"chunk": row.chunk, "admit": partial(admit, layout=layout, vocab_size=config.vocab_size)}

    def crew(role, number):
        setup = msgspec.structs.replace(row.setup(), role=role, number=number)
        return made_by(setup, starter(number), wait=False)

    def team(kind, made, on_record):
        return Team(made, [kind(layout, row.blocks, **limits)], on_record)

    prefill, decode = SplitRole.PREFILL, SplitRole.DECODE
    places = range(sum(split))
    return SplitEngine(
        [
            SplitWorker(prefill, n, partial(crew, prefill, n), partial(team, PrefillScheduler))
            for n in places[: split[0]]
        ],
        [SplitWorker(decode, n, partial(crew, decode, n), partial(team, DecodeScheduler)) for n in places[split[0] :]],
        Scheduler(layout, row.blocks, **limits).check,
        on_record=told.take,
        drafts=not row.rejection,
        **options,
    )


def run(row, split, starter, chosen=None, **options):
    """Run a row; what was told."""
    told = Told()
    engine = engine_of(row, split, starter, told, **options)
    try:
        for request in chosen or requests():
            engine.submit(request)
        for _ in engine.run():
            pass
    except BaseException:
        engine.close()
        raise
    told.preempted = engine.preemptions
    engine.stop()
    told.drafts = engine.drafts
    return told
