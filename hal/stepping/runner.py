"""What a model is to the engine: something that puts the work of a step on a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from hal_core import PluginError

if TYPE_CHECKING:
    from hal_core import BoundDevice, Group, Request, SlotState, Step, Stream, Ticket
    from hal_core.handover import BlockCache

    from .planned import PlannedStep


class RunnerFailed(PluginError):
    """A runner raised, and the device does not go on either: no request can be served any more."""

    exit_status = 1
    """Of a command that ends with it."""


Columns = Mapping[str, np.ndarray[Any, Any]]
"""Fields of the state by name, each ``[slots, width]``."""


@dataclass(frozen=True, slots=True)
class RunnerSetup:
    """What a runner is made with.

    - ``device``, ``state``: where it reads and writes; the state's memory stays where it is, so that a graph which was
      captured over it can be replayed. Its requests' tokens, lengths and block tables are fields of it.
    - ``blocks``: KV blocks of ``state.sizes.block_size`` tokens that it has to make room for.
    - ``model``: the checkpoint's directory; ``place``: what ``--model-place`` says; ``vocab_size``: token ids go from 0
      to this number less one.
    - ``group``: the tensor-parallel group that it is in.
    - ``dtype``: the type to compute in, as ``--dtype`` says: "auto" (the checkpoint's, where it can) or "float32".
    """

    device: BoundDevice
    state: SlotState
    blocks: int
    model: Path
    place: str
    vocab_size: int
    group: Group
    dtype: str = "auto"


class Runner(Protocol):
    """Runs the steps of one state. One thread calls it.

    ``launch`` puts the step's work on the stream: it reads ``step_input`` fields and token rows, feeds what each slot
    has to feed, and writes, of a plain step, ``sampled_token_ids``, of one that verifies drafts, ``accept_tokens`` and
    ``accept_num``. Everything else of the state changes by the hooks and ``update_inputs``, which come after it.
    """

    @property
    def vocab_size(self) -> int:
        """Token ids go from 0 to this number less one."""

    @property
    def needs_host(self) -> str:
        """Why its steps cannot be launched before the tokens of the step before are known on the host; "": they can.

        A runner that needs nothing of the host never waits in ``launch`` or ``propose``.
        """

    def check(self, request: Request) -> None:
        """Raise :class:`hal_core.errors.InvalidValue` for a request that it cannot run, naming what. Any thread."""

    def launch(self, state: SlotState, step: PlannedStep, stream: Stream) -> Step:
        """Put the step on ``stream``.

        Slots of it that have stopped, or have nothing to feed, do not run; others are not named. All ranks of a group
        make the same calls. Where this raises, the requests of the step end with that error and the others go on, if
        the device does: nothing else of the runner is called for that step.

        :return: the step as it runs: ``step.step``, or one with what this runner knows besides: ``errors``, or
            ``late_errors``, of slots whose ``stop_flags`` its work sets.
        """

    def propose(self, state: SlotState, step: Step, stream: Stream) -> None:
        """After ``update_inputs``, of a state with room for drafts: hand it those of its next step, or none.

        Where this raises, the requests of the step that have not ended in it end with that error.
        By ``BoundDevice.set_drafts``, or by work on ``stream`` that writes ``draft_num``, ``draft_tokens`` and
        ``seq_lens_this_time`` as that would: for slots that go on decoding, inside the blocks that they hold.
        """


@runtime_checkable
class DraftsOnDevice(Protocol):
    """A runner that drafts for itself, by work on the device (``--drafts``): ``propose`` does it."""

    drafts_on_device: bool
    """True. On several ranks all draft the same: from fields that are equal on all of them, as ``token_ids``."""


@runtime_checkable
class KeepsBlocks(Protocol):
    """A runner whose requests may move to another worker with their blocks (``--split``)."""

    cache: BlockCache
    """Keys and values, or what stands for them, by block; ``facts`` tells what their bytes are. What is read is as the
    steps leave it that were launched before."""


class HostRunner(ABC):
    """What a runner that needs the host may be told besides: derive from it."""

    @abstractmethod
    def agreed(self, step: Step, ticket: Ticket, stream: Stream) -> None:
        """After ``broadcast_tokens``, before ``update_inputs``; ``ticket`` is the broadcast's."""

    @abstractmethod
    def took(self, step: PlannedStep, outputs: Columns, ended: Sequence[int]) -> None:
        """The output of a step was taken: ``outputs`` are the output fields as of it, ``ended`` the slots whose
        requests ended with it."""
