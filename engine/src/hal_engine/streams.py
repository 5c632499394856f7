"""The text of each request as its records come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from hal_core import FinishReason, HalError, InvalidValue, OutputRecord, OutputRow, SlotStatus

from hal_engine.model.streaming import AnswerText


@dataclass(frozen=True, slots=True)
class Part:
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


class Stream:
    """One request. ``put`` gets each part, or the error that ends it; the last part, or an error, is the end."""

    def __init__(self, answer: AnswerText, put: Callable[[Part | HalError], object]) -> None:
        self._answer, self._put = answer, put
        self._tokens: list[int] = []
        self._logprobs: list[tuple[tuple[int, float], ...]] = []
        self._ranks: list[int] = []
        self._given = 0  # tokens that parts have
        self._pending: tuple[int, FinishReason, str] | None = None  # an end whose last tokens have not come
        self.ended = False

    def take(self, row: OutputRow) -> bool:
        """Take a record's row; return whether a stop text ended the request, which is to be aborted then."""
        if row.status is SlotStatus.TOKEN:
            if row.position != len(self._tokens):
                what = f"{row.request_id}: tokens from {row.position} on came after {len(self._tokens)}"
                raise HalError(what, cure="report it: the output path has lost or repeated tokens")
            if row.logprobs is not None and row.logprob_token_ids is not None:
                pairs = zip(row.logprob_token_ids.tolist(), row.logprobs.tolist(), strict=True)
                self._logprobs += [
                    tuple((token, value) for token, value in zip(*one, strict=True) if token >= 0) for one in pairs
                ]
                self._ranks += row.ranks.tolist() if row.ranks is not None else ()
            for token in row.tokens.tolist():
                self._tokens.append(token)
                if self._answer.push(token):
                    self._finish(FinishReason.STOP, by_text=True)
                    return True
        if row.finish is not FinishReason.NONE:
            self._finish(row.finish, row.message)
        elif self._pending is not None:
            self.end(*self._pending)
        elif len(self._tokens) > self._given:
            self._give()
        return False

    def end(self, tokens: int, reason: FinishReason, message: str = "") -> None:
        """End a request whose end is in no record, once records have brought ``tokens`` tokens of it."""
        if len(self._tokens) < tokens:
            self._pending = tokens, reason, message
        elif not self.ended:
            self._finish(reason, message)

    def fail(self, error: HalError) -> None:
        """End with an error."""
        self.ended = True
        self._put(error)

    def _finish(self, reason: FinishReason, message: str = "", *, by_text: bool = False) -> None:
        if reason is FinishReason.ERROR:
            self._answer.finish()
            self._give()  # the text that was held back for a stop text
            self.fail(InvalidValue(message) if not self._tokens else HalError(message))
            return
        self.ended = True
        self._answer.finish()
        self._give(reason, by_text=by_text, message=message)

    def _give(self, reason: FinishReason | None = None, *, by_text: bool = False, message: str = "") -> None:
        new = slice(self._given, len(self._tokens))
        known, ranks = tuple(self._logprobs[new]), tuple(self._ranks[new])
        tokens, self._given = tuple(self._tokens[new]), len(self._tokens)
        part = Part(self._answer.take(), tokens, reason, by_text, known, ranks, message)
        if part.text or tokens or reason is not None:
            self._put(part)


class Streams:
    """The streams that have not ended, by the names of their requests.

    ``stopped``: names of requests that a stop text has ended, which the engine must abort.
    """

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}
        self.stopped: deque[str] = deque()

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, name: str, stream: Stream) -> None:
        """A request begins."""
        self._streams[name] = stream

    def drop(self, name: str) -> bool:
        """Forget a request; return whether it had not ended."""
        return self._streams.pop(name, None) is not None

    def take(self, record: OutputRecord) -> None:
        """Take a step's record."""
        for row in record.rows():
            if (stream := self._streams.get(row.request_id)) is not None:
                if stream.take(row):
                    self.stopped.append(row.request_id)
                if stream.ended:
                    del self._streams[row.request_id]

    def end(self, name: str, tokens: int, reason: FinishReason, message: str = "") -> None:
        """See :meth:`Stream.end`."""
        if (stream := self._streams.get(name)) is not None:
            stream.end(tokens, reason, message)
            if stream.ended:
                del self._streams[name]

    def fail(self, error: HalError) -> list[str]:
        """End all with an error; return their names."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)
        return list(streams)
