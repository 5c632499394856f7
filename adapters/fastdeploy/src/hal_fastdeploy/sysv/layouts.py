"""The message layouts of FastDeploy's own readers, byte for byte (``docs/output.md`` has the table).

Six legacy operations write four structures: the first token of a prefill node travels in the structure of the
speculative messages, followed by its drafts. Everything is int32 or float32 in the machine's byte order. An entry is
found by its batch id, so requests have no names here. Unused bytes are zero.

A record that does not fit its layout is refused, never cut: more rows, tokens or columns than fit, a token that is no
int32, and drafts without a place. A request that ended with an error is written as -3, FastDeploy's "recovery stop",
the only word that ends a request without a token. Log-probabilities of drafts are a second message, with flag 4.
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
TARGET, DRAFT = 3, 4  #: message flags: tokens of the target model, and of the draft model
_ALTERNATIVES = MOST_TOKENS * COLUMNS

#: The word for a status without tokens: in place of a token, and in place of a count. An abort has the word of a
#: preemption: the engine has requested one of the two, and waits for this word in both cases.
_AS_TOKEN = np.array([NO_TOKEN, 0, PREEMPTED, PREEMPTED, RECOVERY_STOP, RECOVERY_STOP], np.int32)
_AS_COUNT = np.array([0, 0, PREEMPTED, PREEMPTED, RECOVERY_STOP, RECOVERY_STOP], np.int32)


@dataclass(frozen=True, slots=True)
class Variant:
    """The contents of the structures that differ between versions.

    - ``message_id``: word 0; negative if no request continues (the stop sign).
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
    options: frozenset[str] = frozenset()  #: options of a url for this layout, besides those of every queue


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of a record that go into one message; no two of them have the same batch id."""

    record: OutputRecord
    rows: Ints  #: indices of the record's rows
    at: Ints  #: batch id of each row
    batch_size: int
    word: int  #: word 0
    flag: int = TARGET

    def deliveries(self) -> list[tuple[str, int, int]]:
        """Return ``(request_id, first_position, count)`` of each event in the message, for errors."""
        if self.flag == DRAFT:
            return []  # the requests' own events are in the target's message
        record, rows = self.record, self.rows[_events(self.record)[self.rows]]
        return [(record.request_ids[row], int(record.positions[row]), int(record.counts[row])) for row in rows.tolist()]


@dataclass(frozen=True, slots=True)
class Message:
    """The bytes of one message, and its events: ``(request_id, first_position, count)``."""

    data: bytes
    deliveries: Callable[[], list[tuple[str, int, int]]]


def layout_named(name: str, slots: int | None = None) -> Layout:
    """Return the layout of that name. ``slots``: 512 or 256, of ``speculative-topk`` alone. Raises InvalidValue."""
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
    """Yield the messages for the record: one, or more if a slot has rows of several requests.

    ``batch_ids`` are those of the record's rows, ascending. ``goes_on``: the sign of the first word, by default whether
    a request continues. If the record has log-probabilities of drafts, a last message has them; if no row has an event,
    it is the only one. Raises InvalidValue for a record that does not fit, before the first message.
    """
    at = np.asarray(batch_ids, np.int64)
    _check(record, at, batch_size, layout)
    if not len(at):
        return
    turn = np.arange(len(at)) - np.searchsorted(at, at, "left")
    if goes_on is None:
        goes_on = bool(((record.status <= SlotStatus.TOKEN) & (record.finish == 0)).any())
    of_drafts = record.draft_logprobs is not None
    parts: list[tuple[Ints, int]] = []
    if _events(record).any() or not of_drafts:
        parts += [(np.flatnonzero(turn == number), TARGET) for number in range(int(turn.max()) + 1)]
    if of_drafts:
        parts += [(np.flatnonzero(np.append(at[1:] != at[:-1], True)), DRAFT)]  # the last row of each batch id
    for number, (rows, flag) in enumerate(parts):
        last = number == len(parts) - 1
        word = variant.message_id if goes_on or not last else -variant.message_id
        part = _Part(record, rows, at[rows], batch_size, word, flag)
        data = np.zeros(layout.nbytes, np.uint8)
        layout.fill(data, part, variant)
        yield Message(data.tobytes(), part.deliveries)


def _events(record: OutputRecord) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return for each row whether it reports tokens or an end."""
    found: np.ndarray[Any, np.dtype[np.bool_]] = (record.status != SlotStatus.NONE) | (record.finish != 0)
    return found


def _check(record: OutputRecord, at: Ints, batch_size: int, layout: Layout) -> None:
    problems = []
    if len(at) != len(record) or (len(at) and (at.min() < 0 or at.max() >= batch_size or (np.diff(at) < 0).any())):
        problems.append(f"batch ids {at.tolist()[:8]} of {len(record)} rows in a batch of {batch_size}")
    if batch_size > layout.slots:
        problems.append(f"a batch of {batch_size}, at most {layout.slots} fit")
    lowest = -(1 << 31) if layout.speculative else 0  # there the count has the marks, and FastDeploy's -1 is passed on
    alternatives = [
        (ids, "an alternative", NO_TOKEN) for ids in (record.logprob_token_ids, record.draft_logprob_token_ids)
    ]
    for ids, what, least in ((record.tokens, "a token", lowest), (record.drafts, "a draft", lowest), *alternatives):
        if ids is not None and ids.size and (ids.min() < least or ids.max() >= 1 << 31):
            problems.append(f"{what} is no int32 of at least {least}")
    counts = record.counts + _behind(record)
    most = MOST_TOKENS if layout.speculative else 1
    for row in np.flatnonzero(counts > most).tolist()[:4]:
        problems.append(f"{record.request_ids[row]}: {int(counts[row])} tokens and drafts, at most {most} fit")
    if record.draft_counts is not None and record.draft_logprobs is None:
        if (record.draft_counts > _behind(record)).any():
            problems.append("drafts without a first token have no place")
    elif record.draft_counts is not None:
        for row in np.flatnonzero(record.draft_counts > MOST_TOKENS).tolist()[:4]:
            problems.append(f"{record.request_ids[row]}: {record.draft_counts[row]} drafts, at most {MOST_TOKENS} fit")
        if layout.name != "speculative-topk":
            problems.append("log-probabilities of drafts have no place; use speculative-topk")
    for logprobs in (record.logprobs, record.draft_logprobs):
        if logprobs is not None and logprobs.shape[1] > COLUMNS:
            problems.append(f"{logprobs.shape[1]} columns of log-probabilities, at most {COLUMNS} fit")
    if record.logprobs is not None and not layout.name.endswith("topk"):
        problems.append("log-probabilities have no place; use a layout with topk")
    if problems:
        raise InvalidValue(
            f"step {record.step} does not fit layout {layout.name}: {'; '.join(problems)}",
            cure="choose another layout, or a transport with frames (ipc, tcp)",
            hook="save_output",
            argument="record",
        )


# Rows of a part ------------------------------------------------------------------------------------------------------


def _behind(record: OutputRecord) -> Ints:
    """Return for each row how many drafts follow its tokens: only a first token has drafts there."""
    if record.draft_counts is None:
        return np.zeros(len(record), np.int64)
    found: Ints = np.where(record.first_token, record.draft_counts, 0)
    return found


def _tokens(part: _Part) -> tuple[Ints, Ints, Ints]:
    """Return for each token of the part its batch id, its place within the row, and its index in the record."""
    return _spread(part, part.record.counts, part.record.counts)


def _spread(part: _Part, held: Ints, chosen: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the same for the first ``chosen`` of the things that each row of the record holds."""
    counts, starts = chosen[part.rows], (np.cumsum(held, dtype=np.int64) - held)[part.rows]
    within = np.arange(counts.sum(dtype=np.int64)) - np.repeat(np.cumsum(counts, dtype=np.int64) - counts, counts)
    return np.repeat(part.at, counts), within, np.repeat(starts, counts) + within


def _drafts(part: _Part, chosen: Ints, begins: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the same for the first ``chosen`` drafts of each row, whose places begin at ``begins``."""
    held = chosen if part.record.draft_counts is None else part.record.draft_counts
    at, within, index = _spread(part, held, chosen)
    return at, within + np.repeat(begins[part.rows], chosen[part.rows]), index


def _counts(part: _Part) -> Ints:
    """Return each row's count: its tokens and drafts, or the word for its status."""
    record = part.record
    counts = record.counts + _behind(record)
    chosen: Ints = np.where(record.status == SlotStatus.TOKEN, counts, _AS_COUNT[record.status])[part.rows]
    return chosen


_Table = tuple[Ints, np.ndarray[Any, Any] | None, np.ndarray[Any, Any] | None, Ints | None]


def _of_tokens(record: OutputRecord) -> _Table:
    return record.tokens, record.logprob_token_ids, record.logprobs, record.ranks


def _alternatives(table: _Table, index: Ints) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], Ints]:
    """Return token ids and scores ``[tokens, 21]``, and ranks, of some tokens; unused columns are -1 and 0."""
    tokens, given_ids, logprobs, given_ranks = table
    ids = np.full((len(index), COLUMNS), NO_TOKEN, np.int32)
    scores = np.zeros((len(index), COLUMNS), np.float32)
    ids[:, 0] = tokens[index]
    ranks: Ints = np.zeros(len(index), np.int32) if given_ranks is None else given_ranks[index]
    if logprobs is not None and given_ids is not None:
        width = logprobs.shape[1]
        chosen = given_ids[index]
        scores[:, :width] = np.where(chosen == NO_TOKEN, np.float32(0), logprobs[index])
        ids[:, :width] = chosen
    return ids, scores, ranks


# The structures ------------------------------------------------------------------------------------------------------


def _fill_plain(data: np.ndarray[Any, np.dtype[np.uint8]], part: _Part, variant: Variant) -> None:
    """``int mtext[512 + 2]``: stop sign, batch size, a token a slot."""
    words = data.view(np.int32)
    words[:2] = part.word, part.batch_size
    words[2 : 2 + part.batch_size] = NO_TOKEN
    words[2 + part.at] = _AS_TOKEN[part.record.status[part.rows]]
    at, _, index = _tokens(part)
    words[2 + at] = part.record.tokens[index]


def _fill_topk(data: np.ndarray[Any, np.dtype[np.uint8]], part: _Part, variant: Variant) -> None:
    """``int mtext[512 * 21 + 2]; float mtext_f[512 * 21]; int mtext_ranks[512]``; rows lie close when packed."""
    cells = 512 * COLUMNS
    columns = _columns(part.record.logprobs) if variant.packed else COLUMNS
    words = data[: 4 * (2 + cells)].view(np.int32)
    scores = data[4 * (2 + cells) :].view(np.float32)[: 512 * columns].reshape(512, columns)
    ranks = data[4 * (2 + 2 * cells) :].view(np.int32)
    words[:2] = part.word, part.batch_size | (columns << 16 if variant.packed else 0)
    tokens = words[2 : 2 + 512 * columns].reshape(512, columns)
    tokens[: part.batch_size] = NO_TOKEN
    tokens[part.at] = _AS_TOKEN[part.record.status[part.rows]][:, None]
    at, _, index = _tokens(part)
    chosen, logprobs, ranks[at] = _alternatives(_of_tokens(part.record), index)
    tokens[at], scores[at] = chosen[:, :columns], logprobs[:, :columns]


def _columns(logprobs: np.ndarray[Any, Any] | None) -> int:
    """Return the number of columns that a packed message gives: the sampled token, and its alternatives."""
    return 1 if logprobs is None else logprobs.shape[1]


def _fill_speculative(data: np.ndarray[Any, np.dtype[np.uint8]], part: _Part, variant: Variant) -> None:
    """``int mtext[256 * 6 + 256 + 2]``: stop sign, batch size, a count a slot, six tokens a slot."""
    words = data.view(np.int32)
    words[:2] = part.word, part.batch_size
    words[2 + part.at] = _counts(part)
    tokens = words[2 + 256 :].reshape(256, MOST_TOKENS)
    at, within, index = _tokens(part)
    tokens[at, within] = part.record.tokens[index]
    at, within, index = _drafts(part, _behind(part.record), part.record.counts)
    if part.record.drafts is not None:
        tokens[at, within] = part.record.drafts[index]


_SLOT = np.dtype(
    [("tokens", "=i4", (_ALTERNATIVES,)), ("scores", "=f4", (_ALTERNATIVES,)), ("ranks", "=i4", (MOST_TOKENS,))]
)


def _fill_speculative_topk(data: np.ndarray[Any, np.dtype[np.uint8]], part: _Part, variant: Variant) -> None:
    """``int meta[3 + slots]``: stop sign, flag, batch size, a count a slot; then 1,032 bytes a slot, and padding."""
    record, begin = part.record, 4 * (3 + variant.slots)
    words = data[:begin].view(np.int32)
    slots = data[begin : begin + variant.slots * _SLOT.itemsize].view(_SLOT)
    tokens = slots["tokens"].reshape(variant.slots, MOST_TOKENS, COLUMNS)
    scores = slots["scores"].reshape(variant.slots, MOST_TOKENS, COLUMNS)
    if part.flag == DRAFT and record.drafts is not None and record.draft_counts is not None:
        table: _Table = record.drafts, record.draft_logprob_token_ids, record.draft_logprobs, record.draft_ranks
        counts, behind = record.draft_counts[part.rows], None
        at, within, index = _drafts(part, record.draft_counts, np.zeros(len(record), np.int64))
    else:
        table, counts, behind = _of_tokens(record), _counts(part), record.drafts
        at, within, index = _tokens(part)
    tokens[at, within], scores[at, within], slots["ranks"][at, within] = _alternatives(table, index)
    if behind is not None:  # only token 0 of a first token has log-probabilities
        at, within, index = _drafts(part, _behind(record), record.counts)
        tokens[at, within] = NO_TOKEN
        tokens[at, within, 0] = behind[index]
    words[3 + part.at] = counts
    columns = _columns(table[2]) << 8 if variant.packed else 0
    words[:3] = part.word, part.flag | columns, part.batch_size


def _speculative_topk_bytes(slots: int) -> int:
    """The structure begins with a long, so its size is padded to 8 bytes; the long is not counted."""
    return -(-(4 * (3 + slots) + slots * _SLOT.itemsize) // 8) * 8


_META, _SLOTS = frozenset({"meta"}), frozenset({"meta", "slots"})
_LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("plain", 512, 4 * 514, "/dev/shm", _fill_plain, False),
        Layout("topk", 512, 4 * (2 + 2 * 512 * COLUMNS + 512), "/dev/shm", _fill_topk, False, _META),
        Layout("speculative", 256, 4 * (2 + 256 + 256 * MOST_TOKENS), "./", _fill_speculative, True),
        Layout("speculative-topk", 512, _speculative_topk_bytes(512), "/dev/shm", _fill_speculative_topk, True, _SLOTS),
    )
}
