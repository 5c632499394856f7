"""A runner from its setup: the model or a rank's part of it, its proposer, and its state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hal_core import Unavailable
from hal_core.devices import HOST
from hal_engine.proposers import NONE, Setup, make_proposer

from hal.cli.failures import cure_of, one_line
from hal.local_rank import HOST_PLACE
from hal.opening import quiet_paddle

from .drafting import companions_of
from .loading import load_model
from .ranks import TensorRanks, library_of, open_on_place
from .runner import ModelRunner

if TYPE_CHECKING:
    from hal_engine.proposers import Proposer
    from hal_engine.stepping import RunnerSetup

    from .model import Model

_GOLDEN = 0x9E37_79B9_7F4A_7C15
"""Multiplier that spreads the ranks' numbers: 64 bits of the golden ratio (Knuth's multiplicative hashing)."""


def make(setup: RunnerSetup) -> ModelRunner:
    """Return the runner of a setup. Raises :class:`InvalidValue` for what cannot be, and :class:`Unavailable` if Paddle
    is needed and cannot be imported."""
    group = setup.group
    if setup.place != HOST_PLACE:
        with _loading(setup):
            import paddle  # noqa: F401 (what follows needs it, and its errors are of this part)
    ranks = _ranks(setup) if group.size > 1 else None
    model = load_model(
        setup.model,
        place=setup.place,
        ranks=ranks,
        everywhere=setup.everywhere,
        loading=lambda: _loading(setup),
    )
    setup.status("preparing the model's calls")
    model.prepare(setup.sizes.num_slots)
    proposer = _proposer(setup, model)
    try:
        return ModelRunner(
            setup.device,
            setup.open_state(*companions_of(proposer)),
            model,
            setup.blocks,
            group=group,
            noise=ranks.index * _GOLDEN % (1 << 63) if setup.everywhere and ranks is not None else 0,
            proposer=proposer,
            shares_drafts=group.size > 1 and setup.speculate != NONE,
            rejection=setup.rejection,
            on_drafts=setup.on_drafts,
        )
    except BaseException:
        if proposer is not None:
            proposer.close()
        raise


@contextmanager
def _loading(setup: RunnerSetup) -> Iterator[None]:
    """Inside, Paddle is imported."""
    setup.status("loading Paddle")
    try:
        with quiet_paddle(), setup.importing():
            yield
    except (ImportError, OSError, RuntimeError) as error:  # RuntimeError: a library of Paddle's cannot be loaded
        if isinstance(error, ModuleNotFoundError):
            raise
        what = f"Paddle, which the model runs on, cannot be imported: {one_line(error)[:400]}"
        raise Unavailable(what, cure=f"reinstall it: {cure_of('paddle')}") from error


def _ranks(setup: RunnerSetup) -> TensorRanks:
    """Return the collectives over the library of the model's place, whose groups every rank opens here."""
    library = library_of(setup.place, setup.device.capabilities.collective)
    if library != HOST:
        open_on_place(setup.device, setup.groups, setup.place, library, timeout=setup.timeout)
    return TensorRanks(setup.group, backend=library, timeout=setup.timeout)


def _proposer(setup: RunnerSetup, model: Model) -> Proposer | None:
    """Return this rank's proposer. One on the host runs on the group's first rank alone, which sends its drafts to the
    others; one that runs the model's layers runs on every rank."""
    sizes = setup.sizes
    given = Setup(
        sizes.max_draft_tokens,
        sizes.num_slots,
        sizes.max_model_len,
        model.config.vocab_size,
        model,
        rejection=setup.rejection,
    )
    made = make_proposer(setup.speculate, given)
    if made is not None and not setup.group.is_first and not made.wants_hidden:
        made.close()
        return None
    return made
