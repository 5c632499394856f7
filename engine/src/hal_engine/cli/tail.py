"""``hal tail URL``: prints what workers send to a URL, with gaps, duplicates, restarts and losses.

It takes the engine's place as the one reader of that URL, and acknowledges what it printed.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hal.cli import signals
from hal.cli.console import say, shown
from hal.cli.failures import as_typed, check_seconds
from hal_engine.timeouts import TIMEOUTS

if TYPE_CHECKING:
    from hal_core import OutputRow
    from hal_core.frames import Frame

    from hal_engine.reading import Event, OutputReader


def command(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="ipc:///folder/name or tcp://host:port, where workers send to.")
    ],
    key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With tcp: the key that hal run --sink is given too; made if it is missing."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
    request: Annotated[str | None, typer.Option(metavar="ID", help="Print the rows of this request alone.")] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Acknowledge nothing: the next reader gets all of it again.")
    ] = False,
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help="End when nothing came for so long.")] = None,
) -> None:
    """Print what workers send to a url: records, gaps, duplicates, restarts, losses.

    It reads in the engine's place and acknowledges what it has printed. Ctrl-C ends it with status 0.
    """
    if timeout is not None:
        check_seconds(timeout)
    with as_typed(url="URL", file="--key"):
        tail(url, key, Printer(as_json=as_json, request=request), keep=keep, timeout=timeout)


def tail(url: str, key: Path | None, printer: Printer, *, keep: bool, timeout: float | None) -> None:
    """Print until every sender has closed its session, the time is over, or a signal comes. Counts go to stderr.

    Ctrl-C is the usual end: status 0. Other signals give their own status.
    """
    from hal_engine.reading import OutputReader
    from hal_engine.transport.key_file import record_keys

    keys = record_keys(url, key, make=True)
    counts: dict[str, int] = {}
    with (
        contextlib.suppress(signals.Interrupted),
        signals.noted(),
        OutputReader(url, auto_ack=not keep, on_event=printer.event, curve=keys) as reader,
    ):
        printer.reader = reader
        if reader.url != url:
            say(f"hal tail: listens on {reader.url}")
        while (frame := _next(reader, printer, timeout)) is not None:
            printer.record(frame)  # an interrupted print is not acknowledged
        counts = reader.counters()
    summary = ", ".join(f"{number} {name}" for name, number in (counts | printer.counts).items())
    say(f"hal tail: {summary}")
    if signals.came() not in (None, signal.SIGINT):
        raise signals.Interrupted


def _next(reader: OutputReader, printer: Printer, timeout: float | None) -> Frame | None:
    """Return the next frame; None when the last session has ended, the time is over, or a signal has come."""
    end = math.inf if timeout is None else time.monotonic() + timeout
    printer.has_ended = False
    while signals.came() is None:
        left = end - time.monotonic()
        frame = reader.read(max(0.0, min(left, TIMEOUTS.look)))
        if frame is not None or printer.has_ended or left <= 0:
            return frame
    return None


class Printer:
    """Prints lines of text or JSON. Duplicates were dropped before; their number is printed."""

    def __init__(self, *, as_json: bool, request: str | None) -> None:
        self.as_json, self.request = as_json, request
        self.counts = {"gaps": 0, "lost sessions": 0, "restarts": 0}
        self.reader: Any = None
        self.has_ended = False  #: whether the last session has ended, as far as is known
        self._duplicates = 0
        self._senders: set[int] = set()

    def record(self, frame: Frame) -> None:
        """Print a record: a line for each row with content."""
        self._tell_duplicates()
        for row in frame.record.rows():
            if self.request not in (None, row.request_id):
                continue
            if self.as_json:
                self._print_json({"event": "row", "step": frame.record.step} | _place(frame) | _facts(row))
            else:
                place = f"{frame.header.session:016x}:{frame.header.sequence} step {frame.record.step}"
                self._print(f"{place}  {row.request_id}  {_words(row)}")

    def event(self, event: Event) -> None:
        """Print an event of the reader."""
        from hal_engine.reading import FrameSkipped, Gap, SessionEnded, SessionLost, SessionStarted

        words, name = str(event), type(event).__name__
        if isinstance(event, SessionStarted):
            again = event.sender in self._senders
            self._senders.add(event.sender)
            self.counts["restarts"] += again
            words = f"session {event.session:016x} of sender {event.sender}, from frame {event.first}"
            words += "; the sender was started again" if again else ""
        elif isinstance(event, SessionEnded):
            words = f"session {event.session:016x} ended after frame {event.last_sequence}"
            words += "; its worker is started again" if event.again else ""
            self.has_ended = not event.again and self.reader is not None and not self.reader.cursors
        elif isinstance(event, SessionLost):
            self.counts["lost sessions"] += 1
        elif isinstance(event, Gap):
            self.counts["gaps"] += 1
        elif isinstance(event, FrameSkipped):
            words = event.reason
        if self.as_json:
            self._print_json({"event": name, "text": words})
        else:
            self._print(f"-- {name}: {words}")

    def _tell_duplicates(self) -> None:
        number = self.reader.counters()["duplicates"] if self.reader is not None else 0
        if number > self._duplicates:
            words = f"{number - self._duplicates} frame(s) came again and were dropped"
            self._duplicates = number
            if self.as_json:
                self._print_json({"event": "Duplicates", "text": words})
            else:
                self._print(f"-- Duplicates: {words}")

    def _print_json(self, facts: dict[str, object]) -> None:
        self._print(json.dumps(facts))

    def _print(self, line: str) -> None:
        with signals.raised():  # its reader may never take it
            print(shown(line, sys.stdout), flush=True)


def _place(frame: Frame) -> dict[str, object]:
    header = frame.header
    return {"session": f"{header.session:016x}", "sender": header.sender, "sequence": header.sequence}


def _facts(row: OutputRow) -> dict[str, object]:
    facts: dict[str, object] = {
        "request": row.request_id,
        "status": row.status.name,
        "finish": row.finish.name,
        "position": row.position,
        "tokens": row.tokens.tolist(),
    }
    if row.first_token:
        facts["first_token"] = True
    if row.drafts is not None and len(row.drafts):
        facts["drafts"] = row.drafts.tolist()
    if row.logprobs is not None and len(row.logprobs):
        facts["logprobs"] = row.logprobs[:, 0].tolist()
    if row.message:
        facts["message"] = row.message
    return facts


def _words(row: OutputRow) -> str:
    parts = [row.status.name.lower()]
    if len(row.tokens):
        parts = [f"at {row.position}: {' '.join(map(str, row.tokens.tolist()))}"]
    if row.first_token:
        drafts = [] if row.drafts is None else row.drafts.tolist()
        parts.append(f"first token, drafts {drafts}")
    if row.logprobs is not None and len(row.logprobs):
        parts.append("logprobs " + " ".join(f"{value:.3f}" for value in row.logprobs[:, 0].tolist()))
    if row.finish:
        parts.append(f"finished: {row.finish.name.lower()}")
    if row.message:
        parts.append(row.message)
    return ", ".join(parts)
