"""The message layouts of FastDeploy's own readers, byte for byte (``docs/output.md`` has the table).

Six legacy operations write four structures: the first token of a prefill node travels in the structure of the
speculative messages, its drafts behind it. Everything is int32 or float32 in the machine's byte order. An entry is
found by its batch id, so requests have no names here. What a message does not use is zero: each is made anew.

What the layouts cannot say is refused, never cut: more rows, tokens or columns than fit, a token that is no int32, and
drafts where there is no place for them. A request that ended with an error is told as -3, FastDeploy's "recovery stop":
the only word that ends a request without a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hal_core import InvalidValue, OutputRecord, SlotStatus

Ints = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]

COLUMNS = 21  #: K + 1: the sampled token and 20 alternatives, the most that fit
MOST_TOKENS = 6  #: tokens of one slot in a speculative message
PREEMPTED, RECOVERY_STOP, NO_TOKEN = -9, -3, -1
TARGET = 3  #: message flag: tokens of the target model
_ALTERNATIVES = MOST_TOKENS * COLUMNS

#: What stands for a status without tokens: where a token would be, and where a count would be. An abort is told as a
#: preemption is: the engine knows which of the two it asked for, and waits for this word in either case.
_AS_TOKEN = np.array([NO_TOKEN, 0, PREEMPTED, PREEMPTED, RECOVERY_STOP, RECOVERY_STOP], np.int32)
_AS_COUNT = np.array([0, 0, PREEMPTED, PREEMPTED, RECOVERY_STOP, RECOVERY_STOP], np.int32)


@dataclass(frozen=True, slots=True)
class Variant:
    """How the structures are filled where versions differ.

    - ``message_id``: word 0; negative once nothing goes on (the stop sign).
    - ``packed``: a word of the top-k layouts holds the number of columns too, as FastDeploy's readers expect since its
      release 2.6; and rows of ``topk`` have that many columns instead of 21.
    - ``slots``: rows of ``speculative-topk``: 512, or 256 as one device's readers expect.
    """

    message_id: int = 1
    packed: bool = True
    slots: int = 512


@dataclass(frozen=True, slots=True)
class Layout:
    """One structure: its rows, its bytes, the folder whose inode makes the queue's key, and how it is filled."""

    name: str
    slots: int
    nbytes: int
    folder: str
    fill: Callable[[np.ndarray[Any, np.dtype[np.uint8]], _Part, Variant], None]
    speculative: bool
    options: frozenset[str] = frozenset()  #: what a url may say of this layout, besides what it says of every queue


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of a record that go into one message; no two of them have the same batch id."""

    record: OutputRecord
    rows: Ints  #: indices of the record's rows
    at: Ints  #: batch id of each row
    batch_size: int
    word: int  #: word 0

    def deliveries(self) -> list[tuple[str, int, int]]:
        """What the message tells, for errors."""
        chosen = set(self.rows.tolist())
        told = (self.record.status != SlotStatus.NONE) | (self.record.finish != 0)
        record = self.record
        return [
            (record.request_ids[row], int(record.positions[row]), int(record.counts[row]))
            for row in told.nonzero()[0].tolist()
            if row in chosen
        ]


@dataclass(frozen=True, slots=True)
class Message:
    """The bytes of one message, and what they deliver: ``(request_id, first_position, count)``."""

    data: bytes
    deliveries: Callable[[], list[tuple[str, int, int]]]


def layout_named(name: str, slots: int | None = None) -> Layout:
    """The layout of that name. ``slots``: 512 or 256, of ``speculative-topk`` alone. Raises InvalidValue."""
    if name not in _LAYOUTS:
        raise InvalidValue(f"no layout {name!r}", cure=f"there are {', '.join(_LAYOUTS)}", argument="url")
    layout = _LAYOUTS[name]
    if slots in (None, layout.slots):
        return layout
    if name != "speculative-topk" or slots != 256:
        raise InvalidValue(f"layout {name} has {layout.slots} slots", cure="leave slots out", argument="url")
    return replace(layout, slots=256, nbytes=_speculative_topk_bytes(256))


def messages(
    record: OutputRecord,
    batch_ids: Sequence[int],
    batch_size: int,
    layout: Layout,
    variant: Variant,
    goes_on: bool | None = None,
) -> Iterator[Message]:
    """Give the messages that tell the record: one, or more where a slot tells of several requests.

    ``batch_ids`` are those of the record's rows, ascending. ``goes_on``: the sign of the first word,
    by default whether a row goes on. Raises InvalidValue for what the layout cannot say, before
    the first message.
    """
    at = np.asarray(batch_ids, np.int64)
    _check(record, at, batch_size, layout)
    if not len(at):
        return
    turn = np.arange(len(at)) - np.searchsorted(at, at, "left")
    if goes_on is None:
        goes_on = bool(((record.status <= SlotStatus.TOKEN) & (record.finish == 0)).any())
    for number in range(int(turn.max()) + 1):
        rows = np.flatnonzero(turn == number)
        last = number == turn.max()
        word = variant.message_id if goes_on or not last else -variant.message_id
        part = _Part(record, rows, at[rows], batch_size, word)
        data = np.zeros(layout.nbytes, np.uint8)
        layout.fill(data, part, variant)
        yield Message(data.tobytes(), part.deliveries)


def _check(record: OutputRecord, at: Ints, batch_size: int, layout: Layout) -> None:
    problems = []
    if len(at) != len(record) or (len(at) and (at.min() < 0 or at.max() >= batch_size or (np.diff(at) < 0).any())):
        problems.append(f"batch ids {at.tolist()[:8]} of {len(record)} rows in a batch of {batch_size}")
    if batch_size > layout.slots:
        problems.append(f"a batch of {batch_size}, at most {layout.slots} fit")
    drafts = np.zeros(0, np.int64) if record.drafts is None else record.drafts
    for values, what in ((record.tokens, "token"), (drafts, "draft")):
        if len(values) and (values.min() < 0 or values.max() >= 1 << 31):
            problems.append(f"a {what} is no int32 of at least 0")
    alternatives = np.zeros(0, np.int64) if record.logprob_token_ids is None else record.logprob_token_ids
    if alternatives.size and (alternatives.min() < NO_TOKEN or alternatives.max() >= 1 << 31):
        problems.append("an alternative is no int32 of at least -1")
    counts = record.counts + (0 if record.draft_counts is None else record.draft_counts)
    most = MOST_TOKENS if layout.speculative else 1
    for row in np.flatnonzero(counts > most).tolist()[:4]:
        problems.append(f"{record.request_ids[row]}: {int(counts[row])} tokens and drafts, at most {most} fit")
    if record.draft_counts is not None and (record.draft_counts > np.where(record.first_token, counts, 0)).any():
        problems.append("drafts without a first token have no place")
    if record.logprobs is not None and record.logprobs.shape[1] > COLUMNS:
        problems.append(f"{record.logprobs.shape[1]} columns of log-probabilities, at most {COLUMNS} fit")
    if record.logprobs is not None and not layout.name.endswith("topk"):
        problems.append("log-probabilities have no place; use a layout with topk")
    if problems:
        raise InvalidValue(
            f"step {record.step} does not fit layout {layout.name}: {'; '.join(problems)}",
            cure="choose another layout, or a transport with frames (zmq)",
            hook="save_output",
            argument="record",
        )


# What each row says --------------------------------------------------------------------------------------------------


def _told(part: _Part) -> tuple[Ints, Ints, Ints]:
    """Of each token in the part: its batch id, its place within the row, and its index among the record's tokens."""
    counts = part.record.counts
    starts = (np.cumsum(counts, dtype=np.int64) - counts)[part.rows]
    return _spread(part.at, counts[part.rows], starts)


def _spread(at: Ints, counts: Ints, starts: Ints) -> tuple[Ints, Ints, Ints]:
    total = int(counts.sum(dtype=np.int64))
    within = np.arange(total) - np.repeat(np.cumsum(counts, dtype=np.int64) - counts, counts)
    return np.repeat(at, counts), within, np.repeat(starts, counts) + within


def _drafts(part: _Part) -> tuple[Ints, Ints, Ints]:
    """As :func:`_told`, of the drafts; they come behind the row's tokens."""
    record = part.record
    if record.draft_counts is None or record.drafts is None or not len(record.drafts):
        nothing = np.zeros(0, np.int64)
        return nothing, nothing, nothing
    counts = record.draft_counts
    starts = (np.cumsum(counts, dtype=np.int64) - counts)[part.rows]
    at, within, index = _spread(part.at, counts[part.rows], starts)
    return at, within + np.repeat(record.counts[part.rows], counts[part.rows]), index


def _counts(part: _Part) -> Ints:
    """What stands where a row's count is: tokens and drafts told, or the word for its status."""
    record = part.record
    counts = record.counts if record.draft_counts is None else record.counts + record.draft_counts
    chosen: Ints = np.where(record.status == SlotStatus.TOKEN, counts, _AS_COUNT[record.status])[part.rows]
    return chosen


def _alternatives(part: _Part, index: Ints) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], Ints]:
    """Token ids and scores ``[tokens, 21]``, and ranks, of some tokens; unused columns are -1 and 0."""
    record = part.record
    ids = np.full((len(index), COLUMNS), NO_TOKEN, np.int32)
    scores = np.zeros((len(index), COLUMNS), np.float32)
    ids[:, 0] = record.tokens[index]
    ranks: Ints = np.zeros(len(index), np.int32) if record.ranks is None else record.ranks[index]
    if record.logprobs is not None and record.logprob_token_ids is not None:
        width = record.logprobs.shape[1]
        chosen = record.logprob_token_ids[index]
        scores[:, :width] = np.where(chosen == NO_TOKEN, np.float32(0), record.logprobs[index])
        ids[:, :width] = chosen
    return ids, scores, ranks


# The structures ------------------------------------------------------------------------------------------------------


def _fill_plain(data: np.ndarray[Any, np.dtype[np.uint8]], part: _Part, variant: Variant) -> None:
    """``int mtext[512 + 2]``: stop sign, batch size, a token a slot."""
    words = data.view(np.int32)
    words[:2] = part.word, part.batch_size
    words[2 : 2 + part.batch_size] = NO_TOKEN
    words[2 + part.at] = _AS_TOKEN[part.record.status[part.rows]]
    at, _, index = _told(part)
    words[2 + at] = part.record.tokens[index]


def _fill_topk(data: np.ndarray[Any, np.dtype[np.uint8]], part: _Part, variant: Variant) -> None:
    """``int mtext[512 * 21 + 2]; float mtext_f[512 * 21]; int mtext_ranks[512]``; rows lie close when packed."""
    cells = 512 * COLUMNS
    columns = _columns(part.record) if variant.packed else COLUMNS
    words = data[: 4 * (2 + cells)].view(np.int32)
    scores = data[4 * (2 + cells) :].view(np.float32)[: 512 * columns].reshape(512, columns)
    ranks = data[4 * (2 + 2 * cells) :].view(np.int32)
    words[:2] = part.word, part.batch_size | (columns << 16 if variant.packed else 0)
    tokens = words[2 : 2 + 512 * columns].reshape(512, columns)
    tokens[: part.batch_size] = NO_TOKEN
    tokens[part.at] = _AS_TOKEN[part.record.status[part.rows]][:, None]
    at, _, index = _told(part)
    chosen, logprobs, ranks[at] = _alternatives(part, index)
    tokens[at], scores[at] = chosen[:, :columns], logprobs[:, :columns]


def _columns(record: OutputRecord) -> int:
    """How many columns a packed message tells: the sampled token, and its alternatives."""
    return 1 if record.logprobs is None else record.logprobs.shape[1]


def _fill_speculative(data: np.ndarray[Any, np.dtype[np.uint8]], part: _Part, variant: Variant) -> None:
    """``int mtext[256 * 6 + 256 + 2]``: stop sign, batch size, a count a slot, six tokens a slot."""
    words = data.view(np.int32)
    words[:2] = part.word, part.batch_size
    words[2 + part.at] = _counts(part)
    tokens = words[2 + 256 :].reshape(256, MOST_TOKENS)
    at, within, index = _told(part)
    tokens[at, within] = part.record.tokens[index]
    at, within, index = _drafts(part)
    if part.record.drafts is not None:
        tokens[at, within] = part.record.drafts[index]


_SLOT = np.dtype(
    [("tokens", "=i4", (_ALTERNATIVES,)), ("scores", "=f4", (_ALTERNATIVES,)), ("ranks", "=i4", (MOST_TOKENS,))]
)


def _fill_speculative_topk(data: np.ndarray[Any, np.dtype[np.uint8]], part: _Part, variant: Variant) -> None:
    """``int meta[3 + slots]``: stop sign, flag, batch size, a count a slot; then 1,032 bytes a slot, and padding."""
    record, begin = part.record, 4 * (3 + variant.slots)
    words = data[:begin].view(np.int32)
    words[:3] = part.word, TARGET | (_columns(record) << 8 if variant.packed else 0), part.batch_size
    words[3 + part.at] = _counts(part)
    slots = data[begin : begin + variant.slots * _SLOT.itemsize].view(_SLOT)
    tokens = slots["tokens"].reshape(variant.slots, MOST_TOKENS, COLUMNS)
    scores = slots["scores"].reshape(variant.slots, MOST_TOKENS, COLUMNS)
    at, within, index = _told(part)
    tokens[at, within], scores[at, within], slots["ranks"][at, within] = _alternatives(part, index)
    at, within, index = _drafts(part)
    if record.drafts is not None and len(at):  # only token 0 of a first token has log-probabilities
        tokens[at, within] = NO_TOKEN
        tokens[at, within, 0] = record.drafts[index]


def _speculative_topk_bytes(slots: int) -> int:
    """The structure begins with a long, so its size is padded to 8 bytes; the long is not counted."""
    return -(-(4 * (3 + slots) + slots * _SLOT.itemsize) // 8) * 8


_META = frozenset({"meta"})
_LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("plain", 512, 4 * 514, "/dev/shm", _fill_plain, False),
        Layout("topk", 512, 4 * (2 + 2 * 512 * COLUMNS + 512), "/dev/shm", _fill_topk, False, _META),
        Layout("speculative", 256, 4 * (2 + 256 + 256 * MOST_TOKENS), "./", _fill_speculative, True),
        Layout(
            "speculative-topk",
            512,
            _speculative_topk_bytes(512),
            "/dev/shm",
            _fill_speculative_topk,
            True,
            _META | {"slots"},
        ),
    )
}
