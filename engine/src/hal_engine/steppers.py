"""The stepper of one process: what runs the steps of an engine's setup on an opened device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from hal_core import ALONE, Group, HalError

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
    *,
    place: str,
    group: Group = ALONE,
    groups: Sequence[Sequence[int]] = (),
    timeout: float | None = None,
    on_drafts: Callable[[Mapping[str, int]], object] = lambda counts: None,
    status: Callable[[str], object] = lambda text: None,
    importing: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Iterator[Stepper]:
    """Open the stepper of the runner of that name, with a state of its own; the runner is closed at the end.

    The arguments are those of a :class:`RunnerSetup`. Raises as the runner's maker does, and :class:`InvalidValue` if
    it makes no drafts where drafts are asked of it.
    """
    made = RunnerSetup(
        device,
        setup.sizes,
        setup.blocks,
        Path(setup.model),
        place,
        group,
        setup.dtype,
        groups,
        timeout,
        everywhere=setup.everywhere,
        speculate=setup.speculate,
        rejection=setup.rejection,
        on_drafts=on_drafts,
        status=status,
        importing=importing,
    )
    runner = make_runner(name, made)
    with closed_at_end(runner):
        if setup.speculate == NONE:
            check_drafts(name, runner, setup.sizes.max_draft_tokens)
        yield Stepper(device, made.state, runner, sink, blocks=setup.blocks, group=group)


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
