"""What engine and ranks say to each other besides steps: frames of kind ``WORD`` with a tagged MessagePack map each.

rank                                   engine
Hello  (who, which versions) ────────>
       <──────────────────────────────  Setup   (everything that a rank is made of)
Ready  (what must be equal)  ────────>          compares: equal on all, or
       <──────────────────────────────  Go      Verdict, the same on every rank
Up     (groups are open)     ────────>
       <──────────────────────────────  steps (:mod:`hal.distributed.steps`), Beat, in the end Stop
Raised (by a runner)         ────────>          shows it to who wants to see
Failed (why, in which step)  ────────>          decides for all
       <──────────────────────────────  Verdict
Left   (what was not sent)   ────────>

Between ranks of a prefill and a decode worker (:mod:`hal.distributed.split`), by request and attempt:

       <──────────────────────────────  Reserve (to a decode rank: promise these blocks)
Reserved (they are)          ────────>
       <──────────────────────────────  SendTo  (to a prefill rank: send there what you have and will have)
Arrived (all, and checked)   ────────>          inserts with the next step
       <──────────────────────────────  Release (to either: the engine is done with it)
Over   (blocks are nobody's) ────────>          frees them

Between an asyncio engine and its engine process (:mod:`hal.generation`), which is rank 0 of one:

process                                caller
Hello                        ────────>
       <──────────────────────────────  Serve   (everything that the engine is made of)
Up     (it takes requests)   ────────>
       <──────────────────────────────  Submit, Abort, in the end Stop
Ended  (and no record says so) ──────>
Stats  (how busy it is)      ────────>
Down   (lost workers)        ────────>
Failed (why)                 ────────>          ends every stream
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
from hal_core import FrameError, InvalidValue, SamplingParams, SplitRole, StateConfig
from hal_core.frames import FrameHeader, FrameKind, read_body, seal
from hal_core.handover import Description

from .abilities import ALL_TOKENS

PROTOCOL = 4
"""Version of steps and words; engine and ranks must have the same."""

Delivery: TypeAlias = tuple[str, int, int]
"""Request, position and count of tokens that were not sent; -1 where nobody knows."""


class _Word(msgspec.Struct, tag=True, gc=False, omit_defaults=True):
    """A word; its class is its tag."""


class Hello(_Word):
    """A rank is there: its number among ``size``, and ``facts`` that all must hold equal (label to text)."""

    rank: int
    size: int
    facts: dict[str, str]
    protocol: int = PROTOCOL


class Setup(_Word):
    """Everything that the ranks are made of; the same for each.

    ``runner``: what makes the runner of each rank, "" for the Paddle model; ``params``: what it must be able to do;
    ``dtype``: the type that it computes in.
    ``share_devices``: ranks of one host may open one device together.

    ``records``: where the first rank of each group sends its records. ``timeout``: seconds that a collective may last.
    ``reader_key``: of a tcp address, the public key of who reads there. ``sink``: where they send them as well, or "";
    ``sink_key``: of a tcp address, the secret key that both sides have, or "";
    ``number``: of this worker among those that send there, its first group's name as a sender.
    ``role``: what the ranks do of a split; ``host``: where they listen for each other's blocks, "" within one host;
    ``transfer``: what makes their transfer, "" for hal's own.
    """

    model: str
    place: str
    device: str | None
    require: dict[str, str | bool]
    sizes: StateConfig
    blocks: int
    tp: int
    dp: int
    records: str
    timeout: float
    everywhere: bool = False
    dp_sync: bool = False
    check: bool = False
    reader_key: str = ""
    sink: str = ""
    sink_key: str = ""
    speculate: str = "none"
    rejection: bool = False
    share_devices: bool = False
    runner: str = ""
    dtype: str = "auto"
    overlap: str = "auto"
    params: SamplingParams | None = None
    number: int = 0
    role: SplitRole = SplitRole.MIXED
    host: str = ""
    transfer: str = ""


class Ready(_Word):
    """What the rank has found and all must hold equal."""

    rank: int
    facts: dict[str, str]


class Go(_Word):
    """All ranks agree: open the groups."""


class Up(_Word):
    """The rank waits for step 1. ``device``: its name; ``fallbacks`` and ``substituted`` as its capabilities say;
    ``index``: which of those on its host; ``overlap``: whether steps overlap, and ``no_overlap`` why not, or "";
    ``peer``: of a rank with a role, where and what it is to those of the other role; ``vocab_size``: its runner's."""

    rank: int
    device: str
    fallbacks: dict[str, str]
    substituted: str
    index: int = 0
    overlap: bool = False
    no_overlap: str = ""
    peer: Description | None = None
    vocab_size: int = ALL_TOKENS


class Stats(_Word):
    """How busy an engine is: requests in slots and waiting, the part of KV blocks in use (0 to 1); and since it was
    started: preemptions, steps, their processor time and elapsed time in seconds, drafts fed and accepted."""

    running: int
    waiting: int
    cache: float
    preemptions: int
    steps: int
    host_seconds: float
    step_seconds: float
    drafted: int
    accepted: int


class Down(_Word):
    """Which workers of an engine are lost, and how; "" when all run again."""

    what: str


class Beat(_Word):
    """The engine is there."""


class Stop(_Word):
    """Nothing more comes: send what there is, and end."""


class Failed(_Word):
    """A rank cannot go on. ``step``: the one it was in, 0 before the first.

    ``lost``: ranks that it misses; ``vague``: that some is lost, and it cannot say which.
    ``refused``: it is the user's to mend; else it is no fault of the input.
    ``trace``: the traceback of somebody else's exception that led to it, or "".
    """

    rank: int
    what: str
    cure: str = ""
    step: int = 0
    lost: list[int] = []
    vague: bool = False
    refused: bool = False
    trace: str = ""


class Raised(_Word):
    """A runner raised in a step, whose requests end with that; the rank goes on. ``trace``: its traceback."""

    rank: int
    trace: str


class Drafts(_Word):
    """What became of drafts so far on a group's first rank: fed, accepted, turns of a slot that decodes."""

    rank: int
    drafts: tuple[int, int, int]


class Drafted(_Word):
    """How many drafts a step has made for each request, said by a group's first rank before the step's record."""

    rank: int
    counts: dict[str, int]


class Left(_Word):
    """The rank's last word, and what the reader of ``Setup.sink`` has not acknowledged."""

    rank: int
    undelivered: list[Delivery] = []


class Verdict(_Word):
    """How it ends on every rank: refused, or rank ``rank`` was lost in step ``step``; ``again``: and ranks are started
    again."""

    what: str
    cure: str = ""
    rank: int = -1
    step: int = -1
    refused: bool = False
    again: bool = False


class Reserve(_Word):
    """Promise ``blocks`` to the rank that ``source`` describes, for this attempt at the request."""

    request: str
    attempt: int
    blocks: list[int]
    source: Description


class Reserved(_Word):
    """The blocks are promised."""

    rank: int
    request: str
    attempt: int


class SendTo(_Word):
    """Send the request's blocks to ``peer``, those that are computed now and the others as they come, then the seal."""

    request: str
    attempt: int
    peer: Description


class Arrived(_Word):
    """Everything that the seal tells of is in the promised blocks, and was checked."""

    rank: int
    request: str
    attempt: int


class Release(_Word):
    """The engine is done with the attempt: send, take and keep nothing more of it. :class:`Over` is the answer."""

    request: str
    attempt: int


class Over(_Word):
    """Nobody reads or writes the request's blocks on this rank. ``why``: what went wrong, "" for a release."""

    rank: int
    request: str
    attempt: int
    why: str = ""


class Ranks(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How many ranks an engine runs its steps on and what starts them, as the options of ``hal run`` of these names.

    ``split``: how many workers prefill and how many decode, each of ``tp`` ranks; None: all do both.
    """

    tp: int = 1
    dp: int = 1
    split: tuple[int, int] | None = None
    dp_sync: bool = False
    restart: int = 0
    share_devices: bool = False
    launcher: Literal["paddle", "ray"] = "paddle"
    ray_address: str | None = None
    ray_placement: str = "strict-pack"

    def __post_init__(self) -> None:
        for name, least in (("tp", 1), ("dp", 1), ("restart", 0)):
            if getattr(self, name) < least:
                cure = f"give a whole number of at least {least}"
                raise InvalidValue(f"{getattr(self, name)}", cure=cure, argument=name)
        if self.launcher not in ("paddle", "ray"):
            raise InvalidValue(f"{self.launcher!r}", cure="give paddle or ray", argument="launcher")
        if self.split is not None and (self.dp > 1 or min(self.split) < 1):
            cure = "give split the number of workers of each role, at least 1, and leave dp out"
            raise InvalidValue(f"{self.split} with dp = {self.dp}", cure=cure, argument="split")

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return 1 if self.split is None else sum(self.split)


class Serve(_Word):
    """Everything that an engine process is made of (:class:`hal.generation.AsyncEngine`), said to it once.

    ``records``: where it sends its records; ``ranks``: None for one worker in the process itself; ``speculate``: the
    proposer; ``rejection``: how its drafts are accepted. ``sizes`` says how many drafts a step verifies.
    """

    model: str
    place: str
    device: str | None
    require: dict[str, str | bool]
    sizes: StateConfig
    blocks: int
    records: str
    chunk: int
    step_tokens: int | None = None
    runner: str = "auto"
    dtype: str = "auto"
    overlap: str = "auto"
    ranks: Ranks | None = None
    speculate: str = "none"
    rejection: bool = False


class Submit(_Word):
    """A request for the engine process, which checks it. ``prompt``: token ids."""

    request: str
    prompt: list[int]
    params: SamplingParams
    priority: int = 0


class Abort(_Word):
    """End a request of the engine process."""

    request: str


class Ended(_Word):
    """A request ended and no record tells so. ``tokens``: how many it was given, all of which records tell."""

    request: str
    tokens: int
    reason: int
    message: str = ""


SplitWord: TypeAlias = Reserved | Arrived | Over
Word = (Hello | Setup | Ready | Go | Up | Beat | Stop | Failed | Raised | Drafts | Drafted | Left | Verdict) | (
    Reserve | Reserved | SendTo | Arrived | Release | Over | Serve | Submit | Abort | Ended | Stats | Down
)
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Word)


def encode_word(word: Word, *, session: int, sender: int = 0) -> bytes:
    """The word as a frame; ``sender`` is the rank that says it."""
    return seal(FrameKind.WORD, _encoder.encode(word), session=session, sender=sender, sequence=0)


def decode_word(header: FrameHeader, frame: memoryview) -> Word:
    """The word in a frame. Raises :class:`FrameError`, and nothing else, for other bytes."""
    if header.kind != FrameKind.WORD:
        raise FrameError(f"a frame of kind {header.kind} is no word")
    try:
        word: Word = _decoder.decode(read_body(header, frame))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FrameError(f"a word is unreadable: {error}", cure="install one version on all hosts") from error
    return word
