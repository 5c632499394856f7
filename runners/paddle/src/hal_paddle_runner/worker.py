"""The worker: the Paddle model between the four hooks. Only the state changes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from hal_core import ALONE, Group
from hal_engine.stepping import Stepper

from .runner import Model, ModelRunner

if TYPE_CHECKING:
    from hal_core import BoundDevice, Sink, StateConfig
    from hal_engine.proposers import Proposer


class Worker(Stepper):
    """One rank that runs a model: the stepper of its own state, with a :class:`ModelRunner`.

    - ``sizes``, ``blocks``: of the state, whose vocabulary is the model's, and of the paged cache, which the model
      allocates.
    - ``sink``: receives each step's record. The caller closes it, and the device.
    - ``group``: the tensor-parallel group of the worker.
    - ``noise``: mixed into this rank's seeds when every rank of a group samples for itself.
    - ``proposer``: drafts tokens, for ``sizes`` with room for drafts; the caller closes it. On such a state each step
      verifies drafts, even if there are none. ``acceptance`` counts accepted and refused drafts.
    - ``shares_drafts``: a proposer is on the group's first rank, whose drafts all ranks feed; other ranks may have one
      too.
    - ``rejection``: accept drafts by rejection (:mod:`hal_engine.sampling.rejection`), which keeps the distribution of
      tokens and not the draws of plain decoding; else by comparison, which keeps both.
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
        noise: int = 0,
        proposer: Proposer | None = None,
        shares_drafts: bool = False,
        rejection: bool = False,
    ) -> None:
        own = ("proposer",) if proposer is not None and proposer.wants_hidden else ()
        state = device.state(replace(sizes, vocab_size=model.config.vocab_size), beside=own)
        runner = self.runner_type(
            device,
            state,
            model,
            group=group,
            noise=noise,
            proposer=proposer,
            shares_drafts=shares_drafts,
            rejection=rejection,
        )
        super().__init__(device, state, runner, sink, blocks=blocks, group=group)
        model.allocate_cache(blocks, sizes.block_size)

    @property
    def model(self) -> Model:
        """Return the model that it runs."""
        return self.runner.model
