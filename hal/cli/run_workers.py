"""``hal run --workers URL,…``: workers of both roles that were started by themselves, on any host."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from hal_core import HalError, InvalidValue, Unavailable

from hal.distributed.crew import Crew
from hal.distributed.hiring import Met, RemoteWorker, job_keys
from hal.distributed.rank import versions
from hal.distributed.returning import ReturningWorker
from hal.distributed.words import PROTOCOL
from hal.model.digest import checkpoint_digest
from hal.transport.urls import scheme_of

from . import signals

if TYPE_CHECKING:
    from hal.distributed.words import Setup
    from hal.transport.curve import CurveKeys

    from .run_options import Options


@dataclass
class Hired:
    """Workers that have answered, those that prefill first. A context manager, with which they are dismissed.

    ``options``: as if ``--split`` had named as many.
    """

    workers: list[tuple[RemoteWorker, Met]]
    keys: CurveKeys | None
    options: Options
    begun: dict[int, str] = field(default_factory=dict)
    """Places of workers whose ranks were started once, with this host's address as they see it: who is asked for there
    again was lost, and the way to it may be gone just now."""

    def crew(self, setup: Setup, place: int) -> Crew:
        """Have a worker start its ranks, which come to this host by the address that the worker's host sees. One that
        was lost is waited for at its url."""
        worker, met = self.workers[place]
        if place in self.begun:
            worker = ReturningWorker(worker.url, self.keys, versions(), partial(self._check_again, worker.url, met))
            self.workers[place] = worker, met
        else:
            self.begun[place] = worker.own_address()
        setup = msgspec.structs.replace(setup, host=met.host)
        own = self.begun[place]
        url = f"tcp://{own}:*" if own else None
        return Crew(
            setup,
            worker,
            url=url,
            records=url,
            curve=self.keys,
            look=signals.check,
            wait=False,
        )

    def _check_again(self, url: str, before: Met, met: Met) -> None:
        if met.role != before.role:
            what = f"the worker at {url} was a {before.role} worker, and is a {met.role} worker now"
            raise InvalidValue(what, cure=f"start it with --role {before.role}", argument="--workers")
        _check(url, met, before.tp, before.checkpoint, before.versions)

    def __enter__(self) -> Hired:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        for worker, _met in self.workers:
            if isinstance(error, InvalidValue | Unavailable):
                worker.dismiss(error.what, error.cure)
            else:
                worker.dismiss()


def hire(options: Options, timeout: float) -> Hired:
    """Meet all workers within ``timeout`` seconds each.

    Raises :class:`Unavailable` for one that does not answer, and :class:`InvalidValue` where they do not fit each other
    or this command; those that were met are told why.
    """
    ranks = options.ranks
    of_sink = options.sends_by_tcp and scheme_of(ranks.workers[0]) == "ipc"
    keys, own = job_keys(ranks.workers[0], None if of_sink else ranks.key), versions()
    digest = checkpoint_digest(options.model)  # before anybody waits for this engine: it may take long
    workers: list[tuple[RemoteWorker, Met]] = []
    named: list[RemoteWorker] = []

    def look() -> None:
        signals.check()
        for one, _met in workers:  # which end if they hear nothing of the engine while it waits for the others
            if how := one.ended():
                raise InvalidValue(how, cure="start it anew, and all others first", argument="--workers")

    try:
        named += [RemoteWorker(url, keys) for url in ranks.workers]
        for one in named:
            workers.append((one, one.meet(own, timeout, look)))
        for one, met in workers:
            _check(one.url, met, ranks.tp, digest, own)
        count = {role: sum(met.role == role for _, met in workers) for role in ("prefill", "decode")}
        for role, found in count.items():
            if not found:
                cure = f"start one: hal worker --role {role} --listen URL, and name it too"
                raise InvalidValue(f"none of the workers is a {role} worker", cure=cure, argument="--workers")
    except BaseException as error:
        for one in named:
            if isinstance(error, HalError):
                one.dismiss(error.what, error.cure)
            else:
                one.dismiss()
        raise
    workers.sort(key=lambda one: one[1].role != "prefill")
    split, key = (count["prefill"], count["decode"]), ranks.key if options.sends_by_tcp else None
    return Hired(workers, keys, replace(options, ranks=replace(ranks, workers=(), key=key, split=split)))


def _check(url: str, met: Met, tp: int, digest: str, own: dict[str, str]) -> None:
    """Raise :class:`InvalidValue` by the first thing in which a worker and this command differ."""
    for what, its, mine, cure in (
        ("protocol", met.protocol, PROTOCOL, "install one version on all hosts"),
        ("versions", met.versions, own, "install one version on all hosts"),
        ("--tp", met.tp, tp, "give hal run and every hal worker the same --tp"),
        ("checkpoint", met.checkpoint, digest, "give hal run and every hal worker the same --model"),
    ):
        if its != mine:
            raise InvalidValue(f"{what} of the worker at {url}: {its}, here {mine}", cure=cure, argument="--workers")
