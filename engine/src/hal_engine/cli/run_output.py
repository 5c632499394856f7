"""Output of ``hal run``: answers as text or JSON, the thread that shows them, and the closing line."""

from __future__ import annotations

import json
import math
import queue
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any

from hal_core import FinishReason, HalError, OutputRecord

from hal.cli import signals
from hal.cli.console import columns_of, say
from hal_engine.stepping import DEFAULT
from hal_engine.streams import Part, Stream, Streams
from hal_engine.timeouts import TIMEOUTS

from .screen import Screen

if TYPE_CHECKING:
    from hal_core import BoundDevice

    from hal_engine.distributed.rank_info import RankInfo
    from hal_engine.engine import Engine, Finished
    from hal_engine.stepping import Acceptance

    from .live import LivePanel
    from .run_options import Output
    from .run_plan import Plan

_BAR, _LEAST_BAR = 30, 6
"""Most columns of the progress bar, and the least with which it is shown."""


DeviceFacts = dict[str, Any]
"""Facts of a device: ``name``, ``substituted`` ("" without a stand-in), and ``fallbacks``, a reason for each hook."""


def facts_of(device: BoundDevice | RankInfo) -> DeviceFacts:
    """Return the device facts for each JSON object."""
    able = device.capabilities
    return {"name": device.name, "substituted": able.substituted, "fallbacks": dict(able.fallbacks)}


def reasons(device: BoundDevice | RankInfo, *, no_overlap: str = "", why_default: str = "") -> list[str]:
    """Return what falls back, and why: hooks, overlapping steps, the runner of ``auto``."""
    by_reason: dict[str, list[str]] = {}
    for hook, reason in device.capabilities.fallbacks.items():
        by_reason.setdefault(" ".join(reason.split()), []).append(hook)
    lines = [f"{' and '.join(hooks)} fall{'s' * (len(hooks) == 1)} back: {why}" for why, hooks in by_reason.items()]
    lines += [f"steps do not overlap: {no_overlap}"] if no_overlap else []
    return lines + ([f"runner {DEFAULT}, as {why_default}"] if why_default else [])


@dataclass(slots=True, eq=False)
class Answer:
    """One request's answer so far."""

    request_id: str
    prompt: str
    text: list[str] = field(default_factory=list)
    shown: int = 0  # parts of the text that are on the screen
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] | None = None  # None: not requested
    steps: int = 0  # in which its tokens came
    finish: FinishReason = FinishReason.NONE
    message: str = ""

    def add(self, part: Part | HalError) -> None:
        """Add what a step brought."""
        if isinstance(part, HalError):
            self.finish, self.message = FinishReason.ERROR, part.what
            return
        self.text.append(part.text)
        self.token_ids += part.token_ids
        self.steps += bool(part.token_ids)
        if self.logprobs is not None:
            self.logprobs += map(_logprob, part.logprobs, part.ranks)
        self.finish, self.message = part.finish_reason or FinishReason.NONE, part.message

    def take(self) -> str:
        """Return the text that was not taken yet."""
        new, self.shown = "".join(self.text[self.shown :]), len(self.text)
        return new

    def as_json(self, device: DeviceFacts, drafts: Drafts | None) -> str:
        """Return one line of JSON in ASCII, so that it is the same in every terminal and locale."""
        answer: dict[str, Any] = {
            "request_id": self.request_id,
            "prompt": self.prompt,
            "text": "".join(self.text),
            "token_ids": self.token_ids,
            "finish_reason": self.finish.name.lower(),
            "device": device,
        }
        if self.message:
            answer["message"] = self.message
        if drafts is not None:
            name, drafted = drafts
            made = None if drafted is None else drafted.get(self.request_id, 0)
            answer["speculation"] = speculation_of(name, made, self.steps, len(self.token_ids))
        if self.logprobs is not None:
            answer["logprobs"] = self.logprobs
        return json.dumps(answer)


Drafts = tuple[str, Mapping[str, int] | None]
"""Name of the drafter, and drafts by request id; None for a runner, whose drafts stay on the device."""


class Answers:
    """All answers, in the order of the prompts. One thread calls ``take`` and ``end``.

    A request whose answer ended with a stop text still runs. Its name is added to ``stopped``, so that the engine's
    thread aborts it, and its later records are ignored.

    ``device``: device facts for JSON, None for text. As text, the first incomplete answer streams, and later ones wait
    for their turn. As JSON, each answer is written when it and all before it are complete. After :meth:`break_off`,
    text ends with the answer that streams. ``drafts``: the drafter, set before the first record; None without one;
    ``panel``: of ``--live``, likewise.
    """

    def __init__(self, plan: Plan, screen: Screen, *, device: DeviceFacts | None) -> None:
        self._streams, self._order = Streams(), list[Answer]()
        for request, prompt in zip(plan.requests, plan.prompts, strict=True):
            answer = Answer(request.request_id, prompt, logprobs=None if request.params.logprobs is None else [])
            self._order.append(answer)
            self._streams.add(request.request_id, Stream(plan.answer(request), partial(self._add, answer)))
        self.stopped = self._streams.stopped
        self.tokens = self.ended = 0
        self.drafts: Drafts | None = None
        self.panel: LivePanel | None = None
        self._screen, self._device = screen, device
        self._next = 0  # the first answer that is not complete on the screen
        self._begun = self._broken_off = False
        self._lock = Lock()

    @property
    def failed(self) -> list[Answer]:
        """Answers that ended with an error."""
        return [answer for answer in self._order if answer.finish is FinishReason.ERROR]

    @property
    def incomplete(self) -> list[str]:
        """Names of the requests that have not ended."""
        return [answer.request_id for answer in self._order if answer.finish is FinishReason.NONE]

    @property
    def cut_off(self) -> str:
        """Return which answers a signal cut short; "" for none, and for JSON, where each object has its end."""
        total = len(self._order)
        complete = sum(one.finish not in (FinishReason.NONE, FinishReason.ABORT) for one in self._order[: self._next])
        if not self._broken_off or complete == total:
            return ""
        return f"interrupted: {total - complete} of {total} prompt{'s' * (total > 1)} not answered to the end"

    def break_off(self) -> None:
        """Stop showing further answers as text, after a signal."""
        with self._lock:
            self._broken_off = self._device is None

    def take(self, record: OutputRecord) -> None:
        """Add a step's record and show the new text."""
        with self._lock:
            self._streams.take(record)
            self._show()

    def end(self, finished: Finished) -> None:
        """End a request whose end is in no record, once its tokens have come."""
        with self._lock:
            self._streams.end(finished.request_id, len(finished.token_ids), finished.reason, finished.message)
            self._show()

    def show_rest(self) -> None:
        """Show the complete answers that wait behind an incomplete one."""
        with self._lock:
            if self._broken_off:
                return
            if self._begun:  # as text, an incomplete answer is on the screen already, so far as it came
                self._screen.write("\n")
            for answer in self._order[self._next :]:
                if answer.finish is not FinishReason.NONE:
                    self._begun = False
                    self._show_one(answer, complete=True)

    def _add(self, answer: Answer, part: Part | HalError) -> None:
        answer.add(part)
        self.tokens += 0 if isinstance(part, HalError) else len(part.token_ids)
        self.ended += answer.finish is not FinishReason.NONE

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
        line = progress_line(self.tokens, self.ended, len(self._order))
        self._screen.progress(line if self.panel is None else self.panel.text(line, self.tokens))

    def _show_one(self, answer: Answer, complete: bool) -> None:
        if self._device is None:
            self._show_text(answer, complete)
        elif complete:
            self._screen.write(answer.as_json(self._device, self.drafts) + "\n")

    def _show_text(self, answer: Answer, complete: bool) -> None:
        if not self._begun:
            self._begun = True
            if len(self._order) > 1:
                self._screen.write(f"{chr(10) * (answer is not self._order[0])}--- {answer.request_id} ---\n")
            self._screen.write(answer.prompt)
        self._screen.write(answer.take())
        if complete:
            self._screen.write("\n")
            if answer.finish in (FinishReason.ERROR, FinishReason.ABORT) and not self._broken_off:
                who = f"request {answer.request_id!r}: "
                self._screen.note(who + (answer.message or "aborted").removeprefix(who))


def progress_line(tokens: int, ended: int, total: int) -> str:
    """Return the progress line: tokens and, for several prompts, a bar with how many are done."""
    if total == 1:
        return f"{tokens} tokens"
    counts = f"{ended} of {total} prompts, {tokens} tokens"
    room = min(columns_of(sys.stderr) - len(counts) - 4, _BAR)
    done = room * ended // total
    return f"[{'#' * done}{'.' * (room - done)}] {counts}" if room >= _LEAST_BAR else counts


def _logprob(pairs: Sequence[tuple[int, float]], rank: int) -> dict[str, Any]:
    """Return the entry of a token: its log-probability (nats) and rank, and the best alternatives."""
    first, *top = [{"token_id": token, "logprob": value if math.isfinite(value) else None} for token, value in pairs]
    return {**first, "rank": rank, "top": top}


def speculation_of(name: str, drafted: int | None, steps: int, tokens: int) -> dict[str, Any]:
    """Return the statistics of an answer of ``tokens`` from ``steps``, for JSON. ``drafted``: None if drafts stay on
    the device."""
    rate = round(tokens / steps, 3) if steps else 0.0
    known = {} if drafted is None else {"drafted": drafted}
    return {"proposer": name, **known, "accepted": max(0, tokens - steps), "tokens_a_step": rate}


def summed_up(drafts: int, who: str, acceptance: Acceptance) -> list[str]:
    """Return the line about drafts, or no line if no step verifies any. ``who``: the drafter."""
    if not drafts:
        return []
    summary = (
        f"{acceptance.accepted} of {acceptance.drafted} drafts accepted, {acceptance.tokens_a_turn:.2f} tokens a step"
    )
    return [f"{summary} ({who})"]


def used_up(most: int, slots: int, preemptions: int) -> str:
    """Return the line about slots: most at once, their number, preemptions."""
    return f"{most} of {slots} slots used, {preemptions} preemption{'s' * (preemptions != 1)}"


class Shown:
    """Thread that shows records, so that a slow reader of standard output does not delay the engine."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._records: queue.SimpleQueue[OutputRecord | Finished | None] = queue.SimpleQueue()
        self._answers: Answers | None = None
        self._thread = threading.Thread(target=self._serve, name="hal-run-shown", daemon=True)

    def by(self, answers: Answers) -> Shown:
        """Set the object that shows the records."""
        self._answers = answers
        return self

    def take(self, record: OutputRecord) -> None:
        """Queue a record."""
        self._records.put(record)

    def end(self, finished: Finished) -> None:
        """Queue the end of a request that is in no record."""
        self._records.put(finished)

    def _serve(self) -> None:
        assert self._answers is not None
        while (record := self._records.get()) is not None:
            try:
                if self.error is not None:
                    continue
                if isinstance(record, OutputRecord):
                    self._answers.take(record)
                else:
                    self._answers.end(record)
            except BaseException as error:  # noqa: BLE001 (handed to the command's thread, which raises it)
                self.error = error

    def __enter__(self) -> Shown:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait until everything is shown, however slow its reader; a signal ends the wait."""
        self._records.put(None)
        while self._thread.is_alive() and signals.came() is None:
            self._thread.join(TIMEOUTS.look)
        self._thread.join(TIMEOUTS.shown)
        if self._thread.is_alive() and signals.came() is not None:
            say("hal: standard output takes nothing: what was left of the text is not shown")
            signals.end_now()
        if kind is None and self.error is not None:
            raise self.error
        if kind is not None and not self._thread.is_alive() and self._answers is not None:
            self._answers.show_rest()


def drive(engine: Engine, plan: Plan, answers: Answers, show: Shown) -> None:
    """Run every request to its end. After a signal, abort all of them with half of the remaining time: if a step hangs,
    the rest can still end in order."""
    engine.submit_all(plan.requests)
    aborted = False
    while engine.busy and show.error is None and signals.since() < TIMEOUTS.signal / 2:
        for finished in engine.step():
            if not finished.reported:
                show.end(finished)
        while answers.stopped:
            engine.abort(answers.stopped.popleft())
        if signals.came() is not None and not aborted:
            aborted = True
            answers.break_off()
            for request in plan.requests:
                engine.abort(request.request_id)


def summarize(
    screen: Screen,
    answers: Answers,
    output: Output,
    *,
    seconds: float,
    place: str,
    details: Sequence[str],
    notes: Sequence[str],
) -> None:
    """Print one line with the number of tokens, the speed and ``place``: the device and what the model ran on.

    With ``-v``, ``details`` of the run and ``notes`` such as fallbacks are lines of their own; otherwise notes are
    counted. ``--live`` shows the details too: a short run has ended before its panel is read.
    """
    screen.close()
    if output.quiet:
        return
    if answers.cut_off:
        screen.note(answers.cut_off)
    speed = answers.tokens / seconds if seconds else 0.0
    more = (
        f"; {len(notes)} note{'s' * (len(notes) > 1)} (-v shows {'them' if notes[1:] else 'it'})"
        if notes and not output.verbose
        else ""
    )
    for line in (*(details if output.verbose or output.live else ()), *(notes if output.verbose else ())):
        screen.note(line)
    screen.note(f"{answers.tokens} tokens in {seconds:.2f} s ({speed:.1f} tokens/s), {place}{more}")
