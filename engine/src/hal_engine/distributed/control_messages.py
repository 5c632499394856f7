"""Control messages between engine and ranks: a tagged MessagePack map each.

    rank                                   engine
    Hello  (rank and versions)   ────────>          compares: equal on all, or Stop, the same on every rank
           <──────────────────────────────  Setup   (all settings of a rank)
    Hello  (values of these)     ────────>          compares
           <──────────────────────────────  Agreed
    Up     (groups are open)     ────────>
           <──────────────────────────────  steps (:mod:`hal_engine.distributed.steps`), in the end Stop
    records of steps             ────────>          (the first rank of each group)
    Counts (drafts and seconds)  ────────>          (the same)
    Raised (by a runner)         ────────>          compares the ranks of the group; shows it with -v
           <──────────────────────────────  Agreed  (all raised: the step's requests end; or not)
    Failed (why, in which step)  ────────>          decides for all
           <──────────────────────────────  Stop    (why)
    Left   (unsent tokens)       ────────>

Between ranks of a prefill and a decode worker (:mod:`hal_engine.distributed.split`), by request and attempt:

           <──────────────────────────────  Move    (to a decode rank: promise these blocks)
    Progress (reserved)          ────────>
           <──────────────────────────────  Move    (to a prefill rank: send present and later blocks there)
    Progress (arrived, checked)  ────────>          inserts with the next step
           <──────────────────────────────  Release (to either: the attempt is over)
    Progress (over)              ────────>          frees the blocks

Between an asyncio engine and its engine process (:mod:`hal_engine.generation`), which is rank 0 of one:

    process                                caller
    Hello                        ────────>
           <──────────────────────────────  Setup   (all settings of the engine)
    Up     (it takes requests)   ────────>
           <──────────────────────────────  Submit, Abort, in the end Stop
    records of steps             ────────>
    Ended  (without a record)    ────────>
    Stats  (load and counters)   ────────>
    Failed (why)                 ────────>          ends every stream
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
from hal_core import FrameError, SamplingParams, SplitRole
from hal_core.handover import Description

from hal_engine.options import EngineSetup
from hal_engine.transport.channel import Buffer

from .rank_info import ALL_TOKENS

PROTOCOL = 7
"""Protocol version of steps and control messages; engine and ranks must have the same."""

Delivery: TypeAlias = tuple[str, int, int]
"""Request, position and count of tokens that were not sent; -1 if unknown."""


class _Message(msgspec.Struct, tag=True, gc=False, omit_defaults=True):
    """A control message; its class is its tag."""


class Hello(_Message):
    """A rank's number among ``size``, and ``facts`` that must be equal on all ranks (label to text): the versions when
    it has connected, and what follows from the settings when it has them."""

    rank: int
    size: int
    facts: dict[str, str]
    protocol: int = PROTOCOL


class Setup(EngineSetup, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """All settings of the ranks, the same for each, or of an engine process.

    ``timeout``: most seconds of a collective. ``number``: number of this worker among the senders; the first group's
    sender name. ``role``: the ranks' role in a split. ``host``: where they listen for blocks, "" within one host.
    """

    timeout: float
    number: int = 0
    role: SplitRole = SplitRole.MIXED
    host: str = ""


class Up(_Message):
    """The rank waits for step 1. ``device``: its name. ``fallbacks``, ``substituted``: from its capabilities.
    ``index``: its number on the host. ``overlap``: whether steps overlap; ``no_overlap``: why not, or "". ``peer``:
    address and description for the ranks of the other role. ``vocab_size``, ``chunk``, ``supports``: its runner's."""

    rank: int
    device: str
    fallbacks: dict[str, str]
    substituted: str
    index: int = 0
    overlap: bool = False
    no_overlap: str = ""
    peer: Description | None = None
    vocab_size: int = ALL_TOKENS
    chunk: int | None = None
    supports: tuple[str, ...] = SamplingParams.__slots__


class Stats(_Message):
    """Load of an engine: requests in slots and waiting, and the part of KV blocks in use (0 to 1). Since its start:
    preemptions, steps, their processor time and elapsed time in seconds, drafts fed and accepted, the device's time in
    seconds, or None if it is not measured, and the processor time of the first ranks, or None without ranks. ``down``:
    lost workers, with the reasons; "" while all run."""

    running: int
    waiting: int
    cache: float
    preemptions: int
    steps: int
    host_seconds: float
    step_seconds: float
    drafted: int
    accepted: int
    device_seconds: float | None = None
    rank_seconds: float | None = None
    down: str = ""


class Stop(_Message):
    """The last message of the engine, the same for every rank. Without ``what``: send remaining output, and end. With
    it the start was refused, or rank ``rank`` was lost in step ``step``. ``again``: ranks are restarted."""

    what: str = ""
    cure: str = ""
    rank: int = -1
    step: int = -1
    refused: bool = False
    again: bool = False


class Failed(_Message):
    """A rank cannot continue. ``step``: its current step, 0 before the first.

    ``lost``: ranks that it misses. ``vague``: some rank is lost, and it is unknown which. ``refused``: an error of the
    user's; else a failure. ``trace``: traceback of the plugin's or runner's exception, or "".
    """

    rank: int
    what: str
    cure: str = ""
    step: int = 0
    lost: list[int] = []
    vague: bool = False
    refused: bool = False
    trace: str = ""


class Raised(_Message):
    """A runner raised in a step, and its work on the device is done. ``method``: the runner's; ``kind``: class of the
    exception; ``trace``: its traceback. :class:`Agreed` is the answer."""

    rank: int
    step: int
    method: str
    kind: str
    trace: str


class Agreed(_Message):
    """Whether the ranks agree. In step 0: on their settings, so that they open the groups. Else whether all ranks of
    the group raised in this step, in one method and with one class of exception. If so, the step's requests end and the
    ranks continue; else the ranks that raised end."""

    step: int = 0
    alike: bool = True


class Counts(_Message):
    """What a group's first rank has counted; what is left out has not changed.

    ``drafts``: fed, accepted, turns of slots that decode. ``drafted``: drafts of each request in a step, sent before
    the step's record. Seconds so far: ``host``, processor time of its thread since its first step; ``device``, the
    device's time in steps, or None if it is not measured.
    """

    rank: int
    drafts: tuple[int, int, int] | None = None
    drafted: dict[str, int] = {}
    host: float | None = None
    device: float | None = None


class Left(_Message):
    """The rank's last message: tokens that the reader of ``Setup.sink`` has not acknowledged."""

    rank: int
    undelivered: list[Delivery] = []


class Move(_Message):
    """A request's blocks are to move, in this attempt. To a decode rank: promise ``blocks`` to the rank that ``peer``
    describes. To a prefill rank, without ``blocks``: send them to ``peer``, as they are computed, and then the seal."""

    request: str
    attempt: int
    peer: Description
    blocks: list[int] | None = None


class Release(_Message):
    """The attempt is over for the engine: stop sending, receiving and keeping its blocks. ``Progress`` "over" is the
    answer."""

    request: str
    attempt: int


class Progress(_Message):
    """An attempt at one rank. ``state``: "reserved": its blocks are promised; "arrived": all blocks that the seal names
    have come and were checked; "over": they are neither read nor written any more. ``why``: the failure, "" for a
    release."""

    rank: int
    request: str
    attempt: int
    state: Literal["reserved", "arrived", "over"]
    why: str = ""


class Submit(_Message):
    """A request for the engine process, which checks it. ``prompt``: token ids, int32, little-endian."""

    request: str
    prompt: bytes
    params: SamplingParams
    priority: int = 0


class Abort(_Message):
    """End a request of the engine process."""

    request: str


class Ended(_Message):
    """A request ended without a record of its end. ``tokens``: how many tokens its records hold. ``refused``: it could
    not begin, by its own fields."""

    request: str
    tokens: int
    reason: int
    message: str = ""
    refused: bool = False


Message: TypeAlias = (
    Hello
    | Setup
    | Up
    | Stats
    | Stop
    | Failed
    | Raised
    | Agreed
    | Counts
    | Left
    | Move
    | Release
    | Progress
    | Submit
    | Abort
    | Ended
)
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Message)


def encode_message(message: Message) -> bytes:
    """Return the message as bytes."""
    return _encoder.encode(message)


def decode_message(data: Buffer) -> Message:
    """Return the message. Raises only :class:`FrameError` for invalid bytes."""
    try:
        message: Message = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FrameError(f"a message is unreadable: {error}", cure="install one version on all hosts") from error
    return message
