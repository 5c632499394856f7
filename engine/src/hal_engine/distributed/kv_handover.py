"""KV transfer on a rank with a role: sends a request's blocks as they are computed, or receives them.

A prefill rank gets a request with its first task and the blocks' destination with :class:`Move`, in any order. A
decode rank promises blocks, and inserts no request whose seal it has not seen (G29). Both report the end of each
attempt to the engine, and never wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hal_core import LEAVING, InvalidValue, OutputRecord, SplitRole, TaskKind, lay_out
from hal_core.handover import (
    Arrived,
    BlockCache,
    Description,
    Handover,
    HandoverEvent,
    HandoverKey,
    KvTransfer,
    PeerLost,
    Rejected,
)

from hal.contract import contract_version
from hal_engine.model.digest import checkpoint_digest
from hal_engine.stepping import KeepsBlocks

from .control_messages import Message, Move, Progress, Release
from .steps import TaskOrder

if TYPE_CHECKING:
    from hal_engine.stepping import Stepper
    from hal_engine.transport.curve import CurveKeys

    from .control_messages import Setup

Covered = Callable[[int], int | None]
"""Return, by slot, how many of its tokens have complete keys and values, a proposer's included; None: those that were
run."""


@dataclass(eq=False)
class _Outgoing:
    """A request whose blocks this rank computes.

    ``computed``: tokens with complete keys and values. ``sent``: blocks that were sent for ``key``. ``ended``: whether
    that end was reported. ``handover``: contents of the seal, known once the prompt has run.
    """

    slot: int
    total: int
    blocks: Sequence[int]
    computed: int = 0
    key: HandoverKey | None = None
    peer: Description | None = None
    sent: int = 0
    sealed: bool = False
    ended: bool = False
    handover: Handover | None = None


class KvHandover:
    """One rank's part in KV transfer. One thread calls it.

    ``send``: sends the engine a message. ``covered``: coverage of a proposer that has a cache of its own.
    """

    def __init__(
        self,
        rank: int,
        transfer: KvTransfer,
        block_size: int,
        send: Callable[[Message], object],
        covered: Covered = lambda _: None,
    ) -> None:
        self.rank, self.transfer, self._size = rank, transfer, block_size
        self._send, self._covered = send, covered
        self._outgoing: dict[str, _Outgoing] = {}
        self._destinations: dict[str, tuple[HandoverKey, Description]] = {}  # of requests that have not entered yet
        self._under_way: deque[list[tuple[str, int]]] = deque()  # for each step: how far each request is after it
        self._promised: set[HandoverKey] = set()
        self._arrived: dict[str, tuple[HandoverKey, Handover]] = {}
        # attempts that still run in the transfer; those that the engine released
        self._leaving: dict[HandoverKey, HandoverKey] = {}
        self.arrived = 0
        """Number of requests whose blocks have all come."""

    @property
    def busy(self) -> bool:
        """Return whether the transfer has work under way and must be called from time to time."""
        sending = any(one.key is not None and not one.ended for one in self._outgoing.values())
        return bool(self._promised or self._leaving or sending)

    # -- messages of the engine --------------------------------------------------------------------------------------

    def on_message(self, message: Move | Release) -> None:
        """Handle a message of the engine."""
        key = HandoverKey(message.request, message.attempt)
        if isinstance(message, Release):
            self._release(key)
        elif message.blocks is not None:
            self._reserve(key, message.blocks, message.peer)
        else:
            self._send_to(key, message.peer)
        self.look()

    def _reserve(self, key: HandoverKey, blocks: Sequence[int], source: Description) -> None:
        try:
            self.transfer.reserve(key, blocks, source)
        except InvalidValue as error:
            self._over(key, str(error))
            return
        self._promised.add(key)
        self._report(key, "reserved")

    def _send_to(self, key: HandoverKey, peer: Description) -> None:
        out = self._outgoing.get(key.request_id)
        if out is None:
            self._destinations[key.request_id] = key, peer
            return
        self._give_up(out)
        out.key, out.peer, out.sent, out.sealed, out.ended = key, peer, 0, False, False
        self._pump(out, opens=True)

    def _release(self, key: HandoverKey) -> None:
        self._destinations.pop(key.request_id, None)
        if (out := self._outgoing.pop(key.request_id, None)) is not None:
            if out.key is not None and not out.ended:
                self._leaving[out.key] = key
                self.transfer.cancel(out.key)
            else:
                self._over(key)
        elif key in self._promised:
            self._leaving[key] = key
            self.transfer.cancel(key)
        elif self._arrived.get(key.request_id, (None,))[0] == key:
            del self._arrived[key.request_id]
            self._over(key)

    # -- steps ----------------------------------------------------------------------------------------------------

    def launch(self, tasks: Sequence[TaskOrder]) -> dict[int, bytes]:
        """Record a step before it is launched. Return, by slot, the proposer's states that came with the requests that
        enter.

        :raises InvalidValue: for a request that is to continue although its blocks have not arrived (G29).
        """
        states: dict[int, bytes] = {}
        fed: list[tuple[str, int]] = []
        for task in tasks:
            if task.kind == TaskKind.REMOTE_PREFILL:
                if state := self._enter(task):
                    states[task.slot] = state
            elif task.kind in LEAVING:
                self._forget(task.name)
            elif task.kind == TaskKind.PREFILL and task.request is not None:
                if task.request.role is SplitRole.PREFILL:
                    total = len(task.request.prompt) + len(task.request.output)
                    self._outgoing[task.name] = out = _Outgoing(task.slot, total, task.blocks)
                    out.key, out.peer = self._destinations.pop(task.name, (None, None))
                    self._pump(out, opens=True)
                    fed.append((task.name, task.num_computed_tokens + task.num_scheduled_tokens))
            elif task.kind == TaskKind.PREFILL_CHUNK and task.name in self._outgoing:
                fed.append((task.name, task.num_computed_tokens + task.num_scheduled_tokens))
        self._under_way.append(fed)
        return states

    def _enter(self, task: TaskOrder) -> bytes:
        _, handover = self._arrived.pop(task.name, (None, None))
        if handover is None or (handover.tokens, handover.first_token) != (task.num_computed_tokens, task.first_token):
            raise InvalidValue(
                f"request {task.name!r} is to continue after {task.num_computed_tokens} tokens and {task.first_token}; "
                f"arrived for it: {handover or 'nothing'}",
                cure="report it: the engine inserts a request when all its blocks have arrived",
                argument="step message",
            )
        return handover.state

    def took(self, record: OutputRecord, states: Mapping[int, bytes]) -> None:
        """Send the blocks that the oldest launched step has computed, once its output is available.

        ``states``: slot to the proposer's state, for requests that ended on this worker with the step.
        """
        for name, computed in self._under_way.popleft():
            if (out := self._outgoing.get(name)) is not None:
                out.computed = max(out.computed, computed)
        if not self._outgoing:
            if self.busy:  # the next steps may be complete already, and no other call would notice
                self.look()
            return
        for row in record.rows():
            out = self._outgoing.get(row.request_id)
            if out is None or out.handover is not None:
                continue
            if row.finish:
                self._forget(row.request_id)
            elif len(row.tokens):
                drafts = () if row.drafts is None else tuple(row.drafts.tolist())
                blocks = -(-out.total // self._size)
                state = states.get(out.slot, b"")
                out.handover = Handover(blocks, out.total, int(row.tokens[0]), drafts, state)
        for out in self._outgoing.values():
            self._pump(out)
        self.look()

    # -- the transfer ---------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Let the transfer progress, and report finished attempts to the engine."""
        for event in self.transfer.receive():
            keys = event.keys if isinstance(event, PeerLost) else (event.key,)
            for key in keys:
                self._ended(key, event)

    def _ended(self, key: HandoverKey, event: HandoverEvent) -> None:
        promised = key in self._promised
        self._promised.discard(key)
        out = self._outgoing.get(key.request_id)
        if out is not None and out.key == key:
            out.ended = True
        if key in self._leaving:
            self._over(self._leaving.pop(key))
        elif isinstance(event, Arrived):
            if promised:
                self.arrived += 1
                self._arrived[key.request_id] = key, event.handover
                self._report(key, "arrived")
        elif promised or (out is not None and out.key == key):
            self._over(key, _why(event))

    def _pump(self, out: _Outgoing, *, opens: bool = False) -> None:
        """Send blocks that are computed and unsent, and the seal after the last one."""
        if out.key is None or out.peer is None or out.ended or out.sealed:
            return
        if out.handover is not None:
            upto = out.handover.blocks
        else:
            covered = self._covered(out.slot)
            upto = (out.computed if covered is None else min(out.computed, covered)) // self._size
        try:
            if upto > out.sent or opens:
                self.transfer.send(out.key, out.peer, out.sent, out.blocks[out.sent : upto])
                out.sent = max(upto, out.sent)
            if out.handover is not None:
                self.transfer.seal(out.key, out.peer, out.handover)
                out.sealed = True
        except InvalidValue as error:
            out.ended = True
            self.transfer.cancel(out.key)
            self._over(out.key, str(error))

    def _give_up(self, out: _Outgoing) -> None:
        if out.key is not None and not out.ended:
            out.ended = True
            self.transfer.cancel(out.key)

    def _forget(self, name: str) -> None:
        if (out := self._outgoing.pop(name, None)) is not None:
            self._give_up(out)

    def _over(self, key: HandoverKey, why: str = "") -> None:
        self._report(key, "over", why)

    def _report(self, key: HandoverKey, state: Literal["reserved", "arrived", "over"], why: str = "") -> None:
        self._send(Progress(self.rank, key.request_id, key.attempt, state, why))

    def close(self) -> None:
        """Close the transfer."""
        self.transfer.close()


def _why(event: HandoverEvent) -> str:
    if isinstance(event, Rejected):
        return event.why
    return f"the peer at {event.url} is lost" if isinstance(event, PeerLost) else "it was cancelled by the peer"


class _Named:
    """A runner's blocks, with the facts about them that hal keeps."""

    def __init__(self, inner: BlockCache, facts: Mapping[str, str]) -> None:
        self._inner, self._facts = inner, facts
        self.blocks, self.block_bytes = inner.blocks, inner.block_bytes
        self.read, self.write = inner.read, inner.write

    def facts(self) -> Mapping[str, str]:
        """Return the runner's facts and hal's."""
        return {**self._inner.facts(), **self._facts}


def _blocks_of(setup: Setup, stepper: Stepper) -> BlockCache:
    """Return the description of the blocks of a rank's runner."""
    runner, group = stepper.runner, stepper.group
    if not isinstance(runner, KeepsBlocks):
        raise InvalidValue(
            f"{setup.named_runner} does not describe its keys and values, so no request can move",
            cure="leave --split out, or give the runner a cache (hal_engine.stepping.KeepsBlocks)",
            argument="--runner",
        )
    facts = {
        "contract": contract_version(),
        "checkpoint": checkpoint_digest(Path(setup.model)),
        "slot table": lay_out(setup.sizes).digest.hex(),
        "tp shard": f"{group.ranks.index(group.rank)}/{group.size}",
    }
    return _Named(runner.cache, facts)


def open_kv_handover(
    setup: Setup,
    rank: int,
    stepper: Stepper,
    send: Callable[[Message], object],
    keys: CurveKeys | None = None,
) -> KvHandover:
    """Return KV transfer for a rank whose worker exists. Its transfer listens, on several hosts with ``keys``. Raises
    :class:`InvalidValue` if it cannot."""
    from hal_engine.handover import TransferSetup, make_transfer

    cache = _blocks_of(setup, stepper)
    covered = getattr(stepper.runner, "covered", lambda _: None)
    made = TransferSetup(stepper.device, cache, setup.host, keys if setup.host else None, rank)
    transfer = make_transfer(setup.transfer or "", made)
    return KvHandover(rank, transfer, setup.sizes.block_size, send, covered)
