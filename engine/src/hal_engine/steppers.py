"""The stepper of one process: what runs the steps of an engine's setup on an opened device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hal_core import HalError

from hal_engine.proposers import NONE
from hal_engine.stepping import RunnerSetup, Stepper, check_drafts, make_runner

if TYPE_CHECKING:
    from hal_core import BoundDevice, Sink

    from hal_engine.options import EngineSetup


@contextmanager
def open_runner(
    name: str,
    setup: EngineSetup,
    device: BoundDevice,
    sink: Sink,
    **fields: Any,  # noqa: ANN401 (of the runner's setup)
) -> Iterator[Stepper]:
    """Open the stepper of the runner of that name, with a state of its own; the runner is closed at the end.

    ``fields``: of its :class:`RunnerSetup`, besides those that the engine's setup gives. Raises as the runner's maker
    does, and :class:`InvalidValue` if it makes no drafts where drafts are asked of it.
    """
    given = {field: getattr(setup, field) for field in ("dtype", "everywhere", "speculate", "rejection")}
    made = RunnerSetup(device, setup.sizes, setup.blocks, Path(setup.model), **given, **fields)
    runner = make_runner(name, made)
    with closed_at_end(runner):
        if setup.speculate == NONE:
            check_drafts(name, runner, setup.sizes.max_draft_tokens)
        yield Stepper(device, made.state, runner, sink, blocks=setup.blocks, group=made.group)


@contextmanager
def closed_at_end(runner: object) -> Iterator[None]:
    """Close the runner at the end, if it has ``close``. After an error that one is raised, with an error of closing as
    its note."""
    close: Callable[[], object] = getattr(runner, "close", lambda: None)
    try:
        yield
    except BaseException as error:
        try:
            close()
        except HalError as second:
            error.add_note(str(second))
        raise
    close()
