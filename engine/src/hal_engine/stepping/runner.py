"""Interface between engine and model: a runner puts the work of a step on a stream."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from hal_core import ALONE, Group, InvalidValue, PluginError, SamplingParams

from hal_engine.proposers import NONE

if TYPE_CHECKING:
    from hal_core import BoundDevice, Request, SlotState, StateConfig, Step, Stream, Ticket
    from hal_core.handover import BlockCache

    from .step_plan import PlannedStep


class RunnerFailed(PluginError):
    """A runner raised: in ``check``, or elsewhere and the device is broken too, so that no request can be served."""

    exit_status = 1
    """Exit status of a command that ends with it."""


_LIBRARIES = {"hal_core", "hal_engine", "site-packages", "dist-packages", Path(traceback.__file__).parent.name}
"""Folders of hal, of installed packages and of Python's own modules."""


def raised_at(error: BaseException) -> str:
    """Return "FILE:LINE" of the innermost call outside hal and installed libraries, else of the innermost one."""
    calls = [(Path(frame.f_code.co_filename), line) for frame, line in traceback.walk_tb(error.__traceback__)]
    file, line = ([one for one in calls if not _LIBRARIES.intersection(one[0].parts)] or calls)[-1]
    return f"{file.name}:{line}"


def sendable(text: str) -> str:
    """Return a text in one line, with those characters escaped that no message and no record can carry."""
    return " ".join(text.encode("utf-8", "backslashreplace").decode().split())


Columns = Mapping[str, np.ndarray[Any, Any]]
"""Fields of the state by name, each ``[slots, width]``."""


@dataclass(eq=False)
class RunnerSetup:
    """Arguments of a runner's maker.

    - ``device``, ``sizes``: where it reads and writes, and the sizes of its ``state``.
    - ``blocks``: number of KV blocks of ``sizes.block_size`` tokens that it must provide.
    - ``model``: the checkpoint's directory; ``place``: the value of ``--model-place`` for this rank.
    - ``group``: its tensor-parallel group; ``groups``: those of all ranks of the job, () for a process alone;
      ``timeout``: of its collectives, in seconds, None for the usual one.
    - ``dtype``: type of computation, as ``--dtype`` gives it: "auto" (the checkpoint's, if possible) or "float32".
    - ``everywhere``: whether each rank of the group samples for itself (``--sampling every-rank``).
    - ``speculate``, ``rejection``: the proposer that drafts on the host, or "none"; whether its drafts are accepted by
      rejection. ``on_drafts``: to be called with the number of such drafts of each request, by its name, before the
      step's record is made.
    - ``status``, ``importing``: callbacks of the process. The first is given a line about each part that takes long;
      the second encloses a framework's import.
    """

    device: BoundDevice
    sizes: StateConfig
    blocks: int
    model: Path
    place: str = ""
    group: Group = ALONE
    dtype: str = "auto"
    groups: Sequence[Sequence[int]] = ()
    timeout: float | None = None
    everywhere: bool = False
    speculate: str = NONE
    rejection: bool = False
    on_drafts: Callable[[Mapping[str, int]], object] = lambda counts: None
    status: Callable[[str], object] = lambda text: None
    importing: Callable[[], AbstractContextManager[object]] = nullcontext
    _state: SlotState | None = field(default=None, init=False)

    @property
    def vocab_size(self) -> int:
        """Token ids go from 0 to this number less one."""
        return self.sizes.vocab_size or 1

    @property
    def state(self) -> SlotState:
        """The state, opened when it is first needed.

        Its memory keeps its address, so that a graph captured over it can be replayed. Its requests' tokens, lengths
        and block tables are fields of it.
        """
        return self.open_state() if self._state is None else self._state

    def open_state(self, *companions: str) -> SlotState:
        """Open the state, with companions of these names beside it. Only once, before ``state`` is read."""
        assert self._state is None
        self._state = self.device.state(self.sizes, companions=companions)
        return self._state


class Runner(Protocol):
    """Runs the steps of one state. One thread calls it.

    A runner may have more:

    - ``close()``: called once, at the end.
    - ``chunk``: most prompt tokens of a step, unless the user gives a number, if its steps pay for more of them than
      :data:`hal_engine.engine.DEFAULT_CHUNK`, or for fewer.
    - ``drafts_on_device``: True if it drafts for itself, by work on the device (``--drafts``), in ``propose``. On
      several ranks all draft the same: from fields that are equal on all of them, as ``token_ids``.
    - ``cache``: see :class:`KeepsBlocks`.
    - ``note``: more about its computations, for ``-v``.

    ``launch`` puts the step's work on the stream. The work reads ``step_input`` fields and token rows, and feeds each
    slot's tokens. It writes ``sampled_token_ids`` in a plain step, and ``accept_tokens`` and ``accept_num`` in one that
    verifies drafts. All other fields of the state are changed by the hooks and ``update_inputs``, which follow.
    """

    @property
    def supports(self) -> Collection[str]:
        """Names of :class:`hal_core.SamplingParams`' fields; a request that gives any other field another value than
        its default is refused (:class:`Supported`). ``max_tokens`` is every runner's."""

    @property
    def vocab_size(self) -> int:
        """Token ids go from 0 to this number less one."""

    @property
    def needs_host(self) -> str:
        """Why its steps cannot be launched before the host knows the previous step's tokens; "" if they can.

        A runner with "" never waits in ``launch`` or ``propose``.
        """

    def check(self, request: Request) -> None:
        """Raise :class:`hal_core.errors.InvalidValue`, naming the parameter, for a request that it cannot run, though
        it supports its parameters. Any other error ends that request as a fault of the runner. Any thread."""

    def launch(self, state: SlotState, step: PlannedStep, stream: Stream) -> Step:
        """Put the step on ``stream``.

        Slots of it that have stopped, or have no token to feed, do not run; slots outside it are not read. All ranks of
        a group make the same calls. If it raises, the step's requests end with that error and all other requests
        continue, if the device does; of its methods only :meth:`HostRunner.took` is called for that step. On a rank of
        a group this holds if all ranks raise errors of one class after the same collectives; a collective that fails
        raises :class:`hal_core.errors.GroupLost`.

        :return: the step as it runs: ``step.step``, or one with the errors that this runner adds: ``errors``, or
            ``late_errors``, of slots whose ``stop_flags`` its work sets.
        """

    def propose(self, state: SlotState, step: Step, stream: Stream) -> None:
        """After ``update_inputs``, on a state with room for drafts: write the drafts of its next step, or none.

        If it raises, the requests of the step that have not ended in it end with that error. It uses
        ``BoundDevice.set_drafts``, or work on ``stream`` that writes ``draft_num``, ``draft_tokens`` and
        ``seq_lens_this_time`` in the same way: for slots that continue to decode, inside the blocks that they hold.
        """


_PLAIN = SamplingParams()


class Supported:
    """Refuses requests with parameters that a runner does not list in ``supports``."""

    def __init__(self, runner: str, supports: Collection[str]) -> None:
        known = {*supports, "max_tokens"}
        self._runner = runner
        self._not = tuple(one for one in SamplingParams.__slots__ if one not in known)

    def check(self, params: SamplingParams) -> None:
        """Raise :class:`hal_core.InvalidValue` for the first parameter that is none of the runner's."""
        for name in self._not:
            given, plain = getattr(params, name), getattr(_PLAIN, name)
            if given != plain:
                what = f"{given!r} is not supported by {self._runner}"
                raise InvalidValue(what, cure=f"give {plain}", argument=name)


@runtime_checkable
class KeepsBlocks(Protocol):
    """A runner whose requests may move to another worker with their blocks (``--split``)."""

    cache: BlockCache
    """Keys and values, or their equivalent, by block; ``facts`` describes the bytes. A read sees the results of the
    steps that were launched before it."""


class HostRunner(ABC):
    """Base class for a runner that needs more information on the host."""

    @abstractmethod
    def agreed(self, step: Step, ticket: Ticket, stream: Stream) -> None:
        """Called after ``broadcast_tokens``, before ``update_inputs``; ``ticket`` is the broadcast's."""

    @abstractmethod
    def took(self, step: PlannedStep, outputs: Columns, ended: Sequence[int]) -> None:
        """Called when a step's output was taken, also if ``launch`` raised. ``outputs`` are its output fields,
        ``ended`` the slots whose requests ended with it."""
