"""The text of each request as its records come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

import msgspec
from hal_core import FinishReason, HalError, InvalidValue, OutputRecord, OutputRow

from hal_engine.model.streaming import AnswerText


class Part(msgspec.Struct, frozen=True, gc=False):
    """New output of a request: ``text`` that is final, and the tokens, some of which may give text later.

    - ``finish_reason``: of the last part, why the request ended; of the others None.
    - ``by_text``: whether a stop text ended the request; ``text`` of the last part then ends with it, whole.
    - ``logprobs``: if the request asked for them, of each token: first itself, then the best tokens in descending
      order, each an id and its natural log-probability; ``ranks``: the token's place among all tokens, from 1 on.
    - ``message``: why the request was aborted, or "".
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    by_text: bool = False
    logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    ranks: tuple[int, ...] = ()
    message: str = ""


def joined(parts: Sequence[Part]) -> Part:
    """Return parts that follow each other as one."""
    if len(parts) == 1:
        return parts[0]
    last = parts[-1]
    return Part(
        "".join([part.text for part in parts]),
        tuple([token for part in parts for token in part.token_ids]),
        last.finish_reason,
        last.by_text,
        tuple([pairs for part in parts for pairs in part.logprobs]),
        tuple([rank for part in parts for rank in part.ranks]),
        last.message,
    )


def append(parts: list[Part], part: Part) -> None:
    """Add a part to those that wait to be joined. They are joined as they grow, so that few are kept of a long answer,
    and no token is copied often."""
    parts.append(part)
    while len(parts) > 1 and len(parts[-2].token_ids) <= len(parts[-1].token_ids):
        parts[-2:] = [joined(parts[-2:])]


class Stream:
    """One request. ``put`` gets each part, or the error that ends it; the last part, or an error, is the end.
    ``at_end``: there is one part, unless stop texts are looked for."""

    __slots__ = ("_answer", "_end", "_has_stops", "_logprobs", "_put", "_ranks", "at_end", "count", "ended", "tokens")

    def __init__(self, answer: AnswerText, put: Callable[[Part | HalError], object], *, at_end: bool = False) -> None:
        self._answer, self._put, self._has_stops = answer, put, answer.has_stops
        self.at_end = at_end and not answer.has_stops
        self.tokens: list[int] = []  #: that have come, and no part has; their log-probabilities and ranks:
        self._logprobs: list[tuple[tuple[int, float], ...]] = []
        self._ranks: list[int] = []
        self.count = 0  #: of all tokens that have come
        self._end: tuple[int, FinishReason, str] | None = None  # once so many have come
        self.ended = False

    def take_logprobs(self, row: OutputRow) -> None:
        """Take the log-probabilities of a step's tokens."""
        if row.logprobs is not None and row.logprob_token_ids is not None:
            pairs = zip(row.logprob_token_ids.tolist(), row.logprobs.tolist(), strict=True)
            self._logprobs += [
                tuple((token, value) for token, value in zip(*one, strict=True) if token >= 0) for one in pairs
            ]
            self._ranks += row.ranks.tolist() if row.ranks is not None else ()

    def end(self, tokens: int, reason: FinishReason, message: str = "") -> None:
        """End the request with the part that has its last token, of ``tokens`` in all."""
        self._end = tokens, reason, message

    @property
    def is_due(self) -> bool:
        """Whether an end has come, and all tokens before it."""
        return self._end is not None and self.count >= self._end[0]

    def give(self) -> bool:
        """Give what has come as one part; return whether a stop text ended the request, which is to be aborted then."""
        tokens, self.tokens = self.tokens, []
        if self._end is None and not (self._has_stops or self._logprobs):  # the usual case
            if tokens:
                self._put(Part(self._answer.add(tokens), tuple(tokens)))
            return False
        text, stop, reason, message = "", None, None, ""
        if self._has_stops:
            stop = next((count for count, token in enumerate(tokens, 1) if self._answer.push(token)), None)
        else:
            text = self._answer.add(tokens)
        if stop is not None:
            tokens, reason = tokens[:stop], FinishReason.STOP
        elif self._end is not None and self.count >= self._end[0]:
            _, reason, message = self._end
        if reason is not None:
            self._answer.finish()
        known, ranks = tuple(self._logprobs[:stop]), tuple(self._ranks[:stop])
        self._logprobs, self._ranks = [], []
        text += self._answer.take()
        if reason is FinishReason.ERROR:
            if text or tokens:  # also what was held back for a stop text
                self._put(Part(text, tuple(tokens), None, False, known, ranks))
            self.fail(HalError(message))
        elif text or tokens or reason is not None:
            self.ended = reason is not None
            self._put(Part(text, tuple(tokens), reason, stop is not None, known, ranks, message))
        return stop is not None

    def fail(self, error: HalError) -> None:
        """End with an error."""
        self.ended = True
        self._put(error)


class Streams:
    """The streams that have not ended, by the names of their requests.

    ``stopped``: names of requests that a stop text has ended, which the engine must abort.
    """

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}
        self.stopped: deque[str] = deque()
        self._edges, self._fresh = (
            dict[str, Stream](),
            dict[str, Stream](),
        )  # not given: of requests that begin or end, and of running ones
        self._names: tuple[str, ...] = ()  # of the last record: one object while the batch does not change
        self._rows: list[Stream | None] = []  # theirs

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, name: str, stream: Stream) -> None:
        """A request begins."""
        self._streams[name], self._names = stream, ()

    def drop(self, name: str) -> bool:
        """Forget a request, of which nothing more is given; return whether it had not ended."""
        if (stream := self._streams.pop(name, None)) is not None:
            stream.ended, self._names = True, ()
        return stream is not None

    def take(self, *records: OutputRecord) -> None:
        """Take the records of steps, in order, and give; of each request all that they have is one part."""
        self.collect(*records)
        self.give()

    def give(self) -> None:
        """Give all parts."""
        self.give_edges()
        self.give_some(len(self._fresh))

    def give_some(self, most: int) -> bool:
        """Give the parts of at most so many requests, the earliest first; return whether more are left."""
        self._give_some(self._fresh, most)
        return bool(self._fresh)

    def give_edges(self) -> None:
        """Give the parts of requests that begin or end. Their clients wait: for a head, or to send the next request."""
        self._give_some(self._edges, len(self._edges))

    def _give_some(self, streams: dict[str, Stream], most: int) -> None:
        for name in list(islice(streams, most)):
            stream = streams.pop(name)
            if (stream.is_due or not stream.at_end) and not stream.ended:  # by what another one's part has caused
                self._give(name, stream)

    def collect(self, *records: OutputRecord) -> None:
        """Take the records of steps, in order."""
        for record in records:
            self._collect(record)

    def _collect(self, record: OutputRecord) -> None:
        if record.request_ids is not self._names:
            self._names, self._rows = record.request_ids, [self._streams.get(name) for name in record.request_ids]
        tokens, begin = record.tokens.tolist(), 0
        columns = record.positions.tolist(), record.counts.tolist(), record.finish.tolist()
        for row, (name, stream, position, count, finish) in enumerate(
            zip(self._names, self._rows, *columns, strict=True)
        ):
            if stream is not None and not stream.ended:
                if count:
                    if position != stream.count:
                        what = f"{name}: tokens from {position} on came after {stream.count}"
                        raise HalError(what, cure="report it: the output path has lost or repeated tokens")
                    stream.count = position + count
                    stream.tokens += tokens[begin : begin + count]
                if finish:
                    stream.end(0, FinishReason(finish), record.messages.get(row, ""))
                (self._edges if finish or (count and not position) else self._fresh)[name] = stream
            begin += count
        if record.logprobs is not None:
            for stream, found in zip(self._rows, record.rows(), strict=True):
                if stream is not None and not stream.ended:
                    stream.take_logprobs(found)

    def end(self, name: str, tokens: int, reason: FinishReason, message: str = "", *, refused: bool = False) -> None:
        """End a request whose end is in no record, once records have brought ``tokens`` tokens of it. ``refused``: it
        could not begin, and the caller is to change it (:class:`InvalidValue`)."""
        if refused:
            self.fail(InvalidValue(message), name)
        elif (stream := self._streams.get(name)) is not None:
            stream.end(tokens, reason, message)
            if stream.is_due:
                self._give(name, stream)

    def _give(self, name: str, stream: Stream) -> None:
        if stream.give():
            self.stopped.append(name)
        if stream.ended and self._streams.pop(name, None) is not None:
            self._names = ()

    def fail(self, error: HalError, *names: str) -> list[str]:
        """End these streams, or all, with an error; return the names of those that had not ended."""
        ended = []
        for name in names or tuple(self._streams):
            if (stream := self._streams.pop(name, None)) is not None:  # else another one's error has ended it
                ended.append(name)
                stream.fail(error)
        self._names = ()
        return ended
