"""A task: the change that ``insert_tasks`` makes for one request in one slot."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import msgspec

from ..errors import InvalidValue
from .admission import AdmittedRequest


class TaskKind(IntEnum):
    """The change of a slot.

    - ``PREFILL``: a new (or resumed) request takes the slot; the next step feeds its first ``num_scheduled_tokens``
      tokens.
    - ``PREFILL_CHUNK``: the next ``num_scheduled_tokens`` tokens of the request in the slot (chunked prefill).
    - ``MORE_BLOCKS``: more KV blocks for the request that is decoding in the slot.
    - ``REMOTE_PREFILL``: the decode role of a prefill/decode split: the request continues after its first token. Its
      blocks must hold the keys and values of all its tokens but that one, which the task declares by
      ``num_computed_tokens``.
    - ``PREEMPTED``: the request leaves the slot and will be resumed; reported once by the next output.
    - ``ABORTED``: the request leaves the slot for good; reported once by the next output.
    """

    PREFILL = 1
    PREFILL_CHUNK = 2
    MORE_BLOCKS = 3
    REMOTE_PREFILL = 4
    PREEMPTED = 5
    ABORTED = 6


ENTERS, FEEDS, CONTINUES, LEAVES = 1, 2, 4, 8
"""Traits of a kind. The request enters the slot; the next step feeds tokens of its prompt; it continues after a first
token that came with the task; it leaves the slot. One without ENTERS and LEAVES is for the request in the slot."""
TRAITS: dict[int, int] = {
    TaskKind.PREFILL: ENTERS | FEEDS,
    TaskKind.PREFILL_CHUNK: FEEDS,
    TaskKind.MORE_BLOCKS: 0,
    TaskKind.REMOTE_PREFILL: ENTERS | CONTINUES,
    TaskKind.PREEMPTED: LEAVES,
    TaskKind.ABORTED: LEAVES,
}
"""Checks, plans and booking read a kind's traits, and native code has the same table. PREEMPTED and
ABORTED have equal traits: code that tells them apart reads the kind."""
ENTERING = tuple(kind for kind in TaskKind if TRAITS[kind] & ENTERS)
LEAVING = tuple(kind for kind in TaskKind if TRAITS[kind] & LEAVES)
FEEDING = tuple(kind for kind in TaskKind if TRAITS[kind] & FEEDS)


class Task(msgspec.Struct, frozen=True):
    """One request, one slot. ``msgspec.structs.replace`` makes another of it.

    - ``request``: needed by every kind; for a leaving request, the one that the caller expects in the slot.
    - ``num_computed_tokens``: its tokens whose KV is in the cache before the next step (PREFILL with a cached prefix,
      PREFILL_CHUNK). For a REMOTE_PREFILL that is ``request.total``, by which the caller declares that the blocks are
      present. Without it the REMOTE_PREFILL is refused, as the request would continue from undefined blocks.
    - ``num_scheduled_tokens``: tokens that the next step feeds (PREFILL, PREFILL_CHUNK).
    - ``blocks``: physical KV block ids for the block table, starting at entry ``first_block``.
    - ``first_token``, ``drafts``: sampled by the prefill node (REMOTE_PREFILL); other kinds have none.
    """

    kind: TaskKind
    slot: int
    request: AdmittedRequest
    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0
    blocks: Sequence[int] = ()
    first_block: int = 0
    first_token: int = -1
    drafts: Sequence[int] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.kind, TaskKind):
            raise InvalidValue(f"kind {self.kind!r}", cure="give a TaskKind", argument="kind")
        if not isinstance(self.request, AdmittedRequest):
            raise InvalidValue(f"request {self.request!r}", cure="admit() the request first", argument="request")
