"""What ``hal run`` makes of the records that its reader reads: text as it comes, or one JSON object a request."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any

from hal_core import FinishReason, HalError, OutputRecord, OutputRow, SlotStatus

from .run_device import DeviceFacts
from .run_screen import Screen
from .run_speculation import told_of_answer

if TYPE_CHECKING:
    from hal.engine import Finished
    from hal.model.streaming import AnswerText

    from .run_plan import Plan


@dataclass(slots=True, eq=False)
class Answer:
    """One request's answer as far as it has come."""

    request_id: str
    prompt: str
    answer: AnswerText
    token_ids: list[int] = field(default_factory=list)
    shown: int = 0  # characters of the text on the screen
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    steps: int = 0  # in which its tokens came
    finish: FinishReason = FinishReason.NONE
    message: str = ""

    def add(self, tokens: Sequence[int]) -> bool:
        """Take further tokens; True when a stop text is complete. What comes behind its last token is left out."""
        for token in tokens:
            self.token_ids.append(token)
            if self.answer.push(token):
                return True
        return False

    def end(self, finish: FinishReason, message: str = "") -> None:
        """Nothing more comes."""
        self.answer.finish()
        self.finish, self.message = finish, message

    def as_json(self, device: DeviceFacts, with_logprobs: bool, speculate: Speculation | None) -> str:
        """One line; ASCII alone, so that it is the same in every terminal and locale."""
        answer: dict[str, Any] = {
            "request_id": self.request_id,
            "prompt": self.prompt,
            "text": self.answer.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish.name.lower(),
            "device": device,
        }
        if self.message:
            answer["message"] = self.message
        if speculate is not None:
            name, drafted = speculate
            made = drafted.get(self.request_id, 0)
            answer["speculation"] = told_of_answer(name, made, self.steps, len(self.token_ids))
        if with_logprobs:
            answer["logprobs"] = self.logprobs
        return json.dumps(answer)


Speculation = tuple[str, Mapping[str, int]]
"""The proposer's name, and request id to how many drafts it made."""


class Answers:
    """All answers, in the order of the prompts. ``take`` is called by the reader's thread, ``end`` by the engine's.

    A request whose answer a stop text has ended still runs: its name is put into ``stopped``, for the engine's thread
    to abort it, and what is told of it from then on is passed over.

    ``device`` is what JSON says of the device, None for text. As text, the first answer that is not complete streams,
    and those behind it are held back until their turn; as JSON, each is written when it and all before it are complete.
    After :meth:`break_off` text ends with the answer that streams, however many were to follow.
    ``speculate``: what drafts, set before the first record; None for nothing.
    """

    def __init__(self, plan: Plan, screen: Screen, *, device: DeviceFacts | None, logprobs: bool) -> None:
        pairs = zip(plan.requests, plan.prompts, strict=True)
        self.answers = {r.request_id: Answer(r.request_id, prompt, plan.answer(r)) for r, prompt in pairs}
        self.stopped: deque[str] = deque()
        self.tokens = self.ended = 0
        self.speculate: Speculation | None = None
        self._screen, self._device, self._logprobs = screen, device, logprobs
        self._order = list(self.answers.values())
        self._next = 0  # the first answer that is not complete on the screen
        self._begun = self._broken_off = False
        self._lock = Lock()

    @property
    def failed(self) -> list[Answer]:
        """Answers that ended with an error."""
        return [answer for answer in self._order if answer.finish is FinishReason.ERROR]

    @property
    def incomplete(self) -> list[str]:
        """Names of the requests whose end is not known yet."""
        return [answer.request_id for answer in self._order if answer.finish is FinishReason.NONE]

    @property
    def cut_off(self) -> str:
        """What a signal has cost, in words; "" for nothing, and for JSON, where each object says it."""
        total = len(self._order)
        whole = sum(one.finish not in (FinishReason.NONE, FinishReason.ABORT) for one in self._order[: self._next])
        if not self._broken_off or whole == total:
            return ""
        return f"interrupted: {total - whole} of {total} prompt{'s' * (total > 1)} not answered to the end"

    def break_off(self) -> None:
        """Show no further answer as text: a signal has come."""
        with self._lock:
            self._broken_off = self._device is None

    def take(self, record: OutputRecord) -> None:
        """Take over a step's record and show what is new."""
        with self._lock:
            for row in record.rows():
                self._take_row(row)
            self._show()

    def end(self, finished: Finished) -> None:
        """Take over an end that no record tells."""
        with self._lock:
            answer = self.answers[finished.request_id]
            if answer.finish is not FinishReason.NONE:  # by a stop text
                return
            self._add(answer, finished.token_ids[len(answer.token_ids) :])
            self._end(answer, finished.reason, finished.message)
            self._show()

    def show_rest(self) -> None:
        """Show the complete answers that are held back behind one that will never be complete."""
        with self._lock:
            if self._broken_off:
                return
            if self._begun:  # as text, the incomplete one stands on the screen as far as it has come
                self._screen.write("\n")
            for answer in self._order[self._next :]:
                if answer.finish is not FinishReason.NONE:
                    self._begun = False
                    self._show_one(answer, complete=True)

    def _take_row(self, row: OutputRow) -> None:
        answer = self.answers[row.request_id]
        if answer.finish is not FinishReason.NONE:  # by a stop text, or told by ``end`` already, tokens included
            return
        if row.status is SlotStatus.TOKEN:
            if row.position != len(answer.token_ids):
                raise HalError(
                    f"{row.request_id}: tokens from {row.position} on came after {len(answer.token_ids)}",
                    cure="report it: the output path has lost or repeated tokens",
                )
            answer.steps += 1
            self._add(answer, row.tokens.tolist())
            if self._logprobs:
                answer.logprobs += _logprobs(row)[: len(answer.token_ids) - row.position]
        if row.finish is not FinishReason.NONE:
            self._end(answer, row.finish, row.message)

    def _add(self, answer: Answer, tokens: Sequence[int]) -> None:
        before = len(answer.token_ids)
        stopped = answer.add(tokens)
        self.tokens += len(answer.token_ids) - before
        if stopped:
            self.stopped.append(answer.request_id)
            self._end(answer, FinishReason.STOP)

    def _end(self, answer: Answer, finish: FinishReason, message: str = "") -> None:
        if answer.finish is FinishReason.NONE:  # a stop text has ended it before its record does
            answer.end(finish, message)
            self.ended += 1

    def _show(self) -> None:
        while self._next < len(self._order):
            if self._broken_off and not self._begun:
                return
            answer = self._order[self._next]
            complete = answer.finish is not FinishReason.NONE
            self._show_one(answer, complete)
            if not complete:
                break
            self._next, self._begun = self._next + 1, False
        total = len(self._order)
        self._screen.progress(f"{self.tokens} tokens, {self.ended} of {total} prompt{'s' * (total > 1)} done")

    def _show_one(self, answer: Answer, complete: bool) -> None:
        if self._device is None:
            self._show_text(answer, complete)
        elif complete:
            self._screen.write(answer.as_json(self._device, self._logprobs, self.speculate) + "\n")

    def _show_text(self, answer: Answer, complete: bool) -> None:
        if not self._begun:
            self._begun = True
            if len(self._order) > 1:
                self._screen.write(f"{chr(10) * (answer is not self._order[0])}--- {answer.request_id} ---\n")
            self._screen.write(answer.prompt)
        settled = answer.answer.settled
        self._screen.write(answer.answer.text[answer.shown : settled])
        answer.shown = settled
        if complete:
            self._screen.write("\n")
            if answer.finish in (FinishReason.ERROR, FinishReason.ABORT) and not self._broken_off:
                self._screen.note(answer.message or f"request {answer.request_id!r}: aborted")


def _logprobs(row: OutputRow) -> list[dict[str, Any]]:
    """One entry a token: its log-probability (nats) and rank, and the best alternatives."""
    assert row.logprobs is not None
    assert row.logprob_token_ids is not None
    assert row.ranks is not None
    entries = []
    for ids, values, rank in zip(
        row.logprob_token_ids.tolist(), row.logprobs.tolist(), row.ranks.tolist(), strict=True
    ):
        pairs = [
            {"token_id": token, "logprob": value if math.isfinite(value) else None}
            for token, value in zip(ids, values, strict=True)
            if token >= 0
        ]
        entries.append({**pairs[0], "rank": rank, "top": pairs[1:]})
    return entries
