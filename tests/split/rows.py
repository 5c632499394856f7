"""The job of :mod:`tests.distributed.rows` on workers of two roles, whose ranks are those of pools."""

from hal_engine.distributed.engine import engine_of_ranks
from hal_engine.distributed.rank_executor import RankExecutor

from tests.distributed.rows import Delivered, Pooled, served
from tests.ranks import ForkedRanks


class Own(Pooled):
    """Ranks of a separate pool, which ends with them."""

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


def engine_of(row, split, starter, delivered, made_by=RankExecutor, restarts=0, **options):
    """An engine whose ranks come from ``starter``: by the worker's number, prefill workers first.

    ``made_by``: makes the ranks' rank_executors.
    """
    return engine_of_ranks(
        row.setup(split=split, restart=restarts),
        lambda setup: made_by(setup, starter(setup.number)),
        on_record=delivered.take,
        **options,
    )


def run(row, split, starter, chosen=None, **options):
    """Run a row; return the delivered records."""
    delivered = Delivered()
    engine = engine_of(row, split, starter, delivered, **options)
    served(engine, delivered, chosen)
    delivered.preempted = engine.preemptions
    return delivered
