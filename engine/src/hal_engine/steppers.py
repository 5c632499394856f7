"""The stepper of one process: what runs the steps of an engine's setup on an opened device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hal_core import ALONE, Group

from hal_engine.stepping import RunnerSetup, Stepper, check_drafts, make_runner

if TYPE_CHECKING:
    from hal_core import BoundDevice, Sink

    from hal_engine.options import EngineSetup


def open_runner(
    name: str, setup: EngineSetup, device: BoundDevice, sink: Sink, *, place: str, group: Group = ALONE
) -> Stepper:
    """Return the stepper of the runner of that name, with a state of its own.

    ``place``: Paddle's place of this process. Raises as the runner's maker does, and :class:`InvalidValue` if it makes
    no drafts where drafts are asked of it.
    """
    state = device.state(setup.sizes)
    vocab = setup.sizes.vocab_size or 1
    made = RunnerSetup(device, state, setup.blocks, Path(setup.model), place, vocab, group, setup.dtype)
    runner = make_runner(name, made)
    check_drafts(name, runner, setup.sizes.max_draft_tokens)
    return Stepper(device, state, runner, sink, blocks=setup.blocks, group=group)
