"""The worker: a loaded model between the four hooks. Only the state changes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from hal_core import ALONE, Group
from hal_engine.stepping import Stepper

from .drafting import companions_of
from .runner import ModelRunner

if TYPE_CHECKING:
    from hal_core import BoundDevice, Sink, StateConfig
    from hal_engine.proposers import Proposer

    from .model import Model


class Worker(Stepper):
    """One rank that runs a model that its caller has loaded: the stepper of its own state, with a
    :class:`ModelRunner`.

    - ``sizes``, ``blocks``: of the state, whose vocabulary is the model's, and of the paged cache.
    - ``sink``: receives each step's record. The caller closes it, the device and the ``proposer``.
    - ``proposer`` and all others: as for :class:`ModelRunner`. ``acceptance`` counts accepted and refused drafts.
    """

    runner: ModelRunner
    runner_type: ClassVar[type[ModelRunner]] = ModelRunner

    def __init__(
        self,
        device: BoundDevice,
        model: Model,
        sizes: StateConfig,
        blocks: int,
        sink: Sink,
        *,
        group: Group = ALONE,
        proposer: Proposer | None = None,
        **others: Any,  # noqa: ANN401 (of the runner)
    ) -> None:
        sizes = replace(sizes, vocab_size=model.config.vocab_size)
        state = device.state(sizes, companions=companions_of(proposer))
        runner = self.runner_type(device, state, model, blocks, group=group, proposer=proposer, **others)
        super().__init__(device, state, runner, sink, blocks=blocks, group=group)

    @property
    def model(self) -> Model:
        """Return the model that it runs."""
        return self.runner.model
