"""The sink that writes FastDeploy's System V messages, for engines that read them today.

``put`` only queues. One thread resolves the outputs in order, makes the messages and sends them to the kernel. It waits
while the queue is full, so every message reaches the queue. There is no acknowledgement: only the number of unread
messages shows reading, and a reader cannot detect a loss (``detects_loss`` is False, and a log record repeats it).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import parse_qsl

from hal_core import CapabilityMissing, HalError, InvalidValue, OutputRecord, Unavailable, Undelivered
from hal_core.frames import PendingOutput, complete_with
from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport import SinkOptions
from hal_engine.transport.queued_sink import Deliveries, QueuedSink, closed

from hal_fastdeploy.sysv.layouts import Layout, Message, Variant, layout_named, messages
from hal_fastdeploy.sysv.queue import KEYS, Queue, derive_key

log = logging.getLogger("hal")
_MOST_ID = (1 << 31) - 1  #: readers hold ids in an int


@dataclass(frozen=True, slots=True)
class Address:
    """The parts of a url ``sysv://FOLDER?layout=…&id=…``; each but the layout has a default."""

    layout: Layout
    variant: Variant
    key: int
    mode: int
    drop_stale: bool


def address_of(url: str, sender: int) -> Address:
    """Read the url and the legacy readers' two environment variables; ``sender`` is added to the queue's id.

    Raises InvalidValue.
    """
    folder, _, query = url.removeprefix("sysv://").partition("?")
    pairs = parse_qsl(query, keep_blank_values=True)
    options = dict(pairs)
    known = {"layout", "id", "slots", "meta", "key", "mode", "stale"}
    if unknown := options.keys() - known:
        raise _bad(url, f"has unknown options {sorted(unknown)}", f"there are {', '.join(sorted(known))}")
    if len(options) < len(pairs):
        raise _bad(url, "gives an option twice", "say each once")
    if "layout" not in options:
        raise _bad(url, "names no layout", "write sysv://?layout=plain, topk, speculative or speculative-topk")
    slots = _number(url, "slots", options["slots"]) if "slots" in options else None
    layout = layout_named(options["layout"], slots)
    packed = _choice(url, options, "meta", ("packed", "flag")) == "packed"
    if strange := {"slots", "meta"} & options.keys() - layout.options:
        names = " or ".join(sorted(strange))
        raise _bad(url, f"gives {names}, and layout {layout.name} has no such option", f"leave {names} out")
    kind = _choice(url, options, "key", KEYS)
    stale = _choice(url, options, "stale", ("refuse", "drop"))
    number = _queue_number(url, options) + sender
    if number > _MOST_ID:
        raise _bad(url, f"gives id {number} to worker {sender}", f"give an id of at most {_MOST_ID - sender}")
    key = derive_key(folder or layout.folder, number, kind)
    mode = _mode(url, options.get("mode", "600"))
    return Address(layout, Variant(_message_id(), packed, layout.slots), key, mode, stale == "drop")


def _queue_number(url: str, options: dict[str, str]) -> int:
    """Return the queue's id: ``INFERENCE_MSG_QUEUE_ID`` if set, as in the readers. A url must agree."""
    given = options.get("id")
    if (variable := os.environ.get("INFERENCE_MSG_QUEUE_ID")) is None:
        return _number(url, "id", "1" if given is None else given)
    number = _number("INFERENCE_MSG_QUEUE_ID", "its value", variable)
    if given is not None and _number(url, "id", given) != number:
        raise _bad(url, f"asks for id {given}, INFERENCE_MSG_QUEUE_ID is {number}", "let them agree, or unset one")
    return number


def _message_id() -> int:
    number = _number("INFERENCE_MSG_ID", "its value", os.environ.get("INFERENCE_MSG_ID", "1"))
    if number in (0, 2):
        why = "has no sign to stop with" if number == 0 else "is reserved"
        raise _bad(
            "INFERENCE_MSG_ID", f"is {number}, which {why}", "leave it unset, or give another whole number above 0"
        )
    return number


def open_sink(url: str, options: SinkOptions) -> SysvSink:
    """Return the sink of a ``sysv://`` url: the entry point of ``hal.transports``.

    ``capacity``, ``deadline`` and ``sender`` are used. A queue has one sender: ``sender`` is added to its id.
    """
    if options.require_loss_detection or options.curve is not None:
        raise CapabilityMissing(
            f"{url!r}: the legacy messages have neither sequence numbers, so no reader can notice a loss, nor keys",
            cure="use ipc or tcp",
            argument="url",
        )
    return SysvSink(url, capacity=options.capacity, deadline=options.deadline, sender=options.sender)


class SysvSink(QueuedSink):
    """See :func:`open_sink` and :func:`hal_engine.transport.open_sink`."""

    detects_loss = False
    full_cure = "start the reader, or raise capacity, deadline and kernel.msgmnb"

    def __init__(self, url: str, *, capacity: int, deadline: float, sender: int) -> None:
        super().__init__(capacity, deadline)
        self.url = url
        to = self._address = address_of(url, sender)
        self.entries = to.layout.slots
        self._queue = Queue(to.key, to.layout.nbytes, to.mode, drop_stale=to.drop_stale)
        log.warning("%s: readers of this transport cannot detect a loss", url)
        self._sent: deque[Callable[[], Deliveries]] = deque()  # of messages that may be unread
        self._unsent: deque[Message] = deque()  # of the output in hand
        self._messages = self._full_waits = 0
        self._thread = threading.Thread(target=self._run, name="hal-sink-sysv", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._queue.release()
            cure = "raise the limits on processes and memory (ulimit -u, -v)"
            raise Unavailable(f"no thread for {url!r}: {error}", cure=cure, argument="url") from error

    def close(self, timeout: float) -> None:
        """See :class:`hal_core.output.sinks.Sink`. Messages that are unread by then are taken back and named."""
        end = time.monotonic() + timeout
        if not self._begin_close():
            return
        self._thread.join(min(timeout, threading.TIMEOUT_MAX))
        while not self._thread.is_alive() and self._count_unread() and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, TIMEOUTS.poll_most))
        with self._room:
            self._stop = True
            self._room.notify_all()
        self._thread.join(TIMEOUTS.parting)
        try:
            self._report_undelivered(timeout)
        finally:
            self._queue.release()

    def counters(self) -> dict[str, int]:
        """Return sent and unread messages, queued outputs, waits for room, and removed messages of a dead worker."""
        return {
            "frames": self._messages,
            "queued": len(self._outputs),
            "unacknowledged": self._queue.unread() or 0,
            "full_waits": self._full_waits,
            "stale_removed": self._queue.stale_removed,
        }

    def _is_full(self) -> bool:
        return len(self._outputs) + bool(self._unsent) >= self._capacity

    def _wake_thread(self) -> None:
        self._room.notify_all()

    def _backlog(self) -> str:
        unread = self._queue.unread() or 0
        return f"{len(self._outputs)} outputs queued here, {unread} messages unread in {self._queue}"

    def _report_undelivered(self, timeout: float) -> None:
        taken = self._queue.take_back()  # None: they cannot be had, so all that was not seen to be read is named
        lost = [*self._sent][len(self._sent) - taken :] if taken is not None else [*self._sent]
        names: Deliveries = [delivery for deliveries in lost for delivery in deliveries()]
        names += [delivery for message in self._unsent for delivery in message.deliveries()]
        names += self._in_hand_names()
        self._abandon_outputs(names)
        self._raise_undelivered(names, f"not read within {timeout} s")

    # The thread's side -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._next_output() is not None:
                self._send_all()
        except HalError as error:
            self._failure = self._with_what_is_unread(error)
        except BaseException as error:  # noqa: BLE001  # of any type: the next call must raise it
            self._failure = closed(f"the sender thread failed: {error!r}")
        finally:
            with self._room:
                self._room.notify_all()

    def _next_output(self) -> PendingOutput | None:
        """Wait for an output, resolve it and make its messages; None after the last one."""
        with self._room:
            while not self._outputs and not self._closing:
                self._room.wait(TIMEOUTS.look if self._sent else None)
                self._count_unread()
                if self._sent:
                    self._queue.check()
            if self._stop or not self._outputs:
                return None
            self._in_hand = pending = self._outputs.popleft()
        record = complete_with(pending)
        if record is not None:
            self._make(pending, record)
        self._in_hand = None
        return pending

    def _make(self, pending: PendingOutput, record: OutputRecord) -> None:
        batch_ids = getattr(pending, "batch_ids", None) or range(len(record))
        batch_size = getattr(pending, "batch_size", None) or len(record)
        try:
            goes_on = getattr(pending, "goes_on", None)
            to = self._address
            self._unsent.extend(messages(record, batch_ids, batch_size, to.layout, to.variant, goes_on))
        except InvalidValue as error:
            self._unsent.clear()
            lost = Undelivered(f"{error.what} ({error.cure})", record.deliveries())
            lost.__cause__ = error
            pending.complete(lost)
        else:
            pending.complete(None)

    def _send_all(self) -> None:
        """Send the messages in order, waiting while the queue is full, until close() stops it."""
        wait = TIMEOUTS.poll
        while self._unsent and not self._stop:
            if self._queue.send(self._unsent[0].data):
                self._sent.append(self._unsent.popleft().deliveries)
                self._messages += 1
                wait = TIMEOUTS.poll
                continue
            self._full_waits += 1
            self._count_unread()
            with self._room:
                self._room.wait_for(lambda: self._stop, wait)
            wait = min(2 * wait, TIMEOUTS.poll_most)
        self._count_unread()
        with self._room:
            self._room.notify_all()

    def _count_unread(self) -> int:
        """Return the number of this sink's unread messages, and forget the read ones while the queue exists."""
        unread = self._queue.unread()
        while unread is not None and len(self._sent) > unread:
            self._sent.popleft()
        return 0 if unread is None else len(self._sent)

    def _with_what_is_unread(self, error: HalError) -> HalError:
        """Return the error with the messages that may be lost with the queue: those unread at the last look."""
        self._count_unread()
        if not self._sent:
            return error
        requests = list(dict.fromkeys(name for deliveries in self._sent for name, _, _ in deliveries()))
        more = f" and {len(requests) - 8} more" if len(requests) > 8 else ""
        nbytes = len(self._sent) * self._address.layout.nbytes
        what = f"{len(self._sent)} messages ({nbytes} bytes) in it may be unread, of {', '.join(requests[:8])}{more}"
        return closed(f"{error.what}; {what}", error.cure)


def _number(where: str, name: str, text: str) -> int:
    with contextlib.suppress(ValueError):
        if 0 <= (number := int(text)) <= _MOST_ID:
            return number
    raise _bad(where, f"gives {text!r} for {name}", "give a whole number from 0 to 2147483647")


def _mode(url: str, text: str) -> int:
    """Return the queue's mode: this user must be able to send, and to take back unread messages."""
    with contextlib.suppress(ValueError):
        mode = int(text, 8)
        if mode & ~0o777 == 0 and mode & 0o600 == 0o600:
            return mode
    raise _bad(url, f"gives {text!r} for mode", "give three octal digits, as 600, 660 or 666")


def _choice(url: str, options: dict[str, str], name: str, choices: tuple[str, ...]) -> str:
    chosen = options.get(name, choices[0])
    if chosen not in choices:
        raise _bad(url, f"gives {chosen!r} for {name}", f"there are {', '.join(choices)}")
    return chosen


def _bad(where: str, what: str, cure: str) -> HalError:
    return InvalidValue(f"{where!r} {what}", cure=cure, argument="url")
