"""The engine process of an asyncio engine: it owns the scheduler and the executor, and serves one caller to its end."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core import GroupLost, OutputRecord, Request

from hal.cli.console import lines_by_thread
from hal.cli.logs import Few, level, printed
from hal_engine.distributed.control_channel import Contents, ControlEnd
from hal_engine.distributed.control_messages import Abort, Ended, Hello, Message, Setup, Stats, Stop, Submit, Up
from hal_engine.distributed.errors import failed_message
from hal_engine.distributed.rank import versions
from hal_engine.opening import open_engine
from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport.beats import Beats
from hal_engine.transport.channel import Channel

if TYPE_CHECKING:
    from hal_engine.engine import Engine


MOST_PENDING = 64 << 20
"""Bytes of records that wait for the caller before a step waits for it, too."""


class CallerEnd:
    """This process's end. ``step``: the number of the step in progress, from 1; 0 between steps."""

    def __init__(self, channel: Channel) -> None:
        self.step = 0
        self._channel, self._end = channel, ControlEnd(channel)
        self._received = deque[Contents]()
        self._beats = Beats(lambda: (channel,), lambda: self.step, TIMEOUTS.process_silence)
        self._poller = select.poll()

    def send(self, message: Message) -> bool:
        """Send a message."""
        return self._end.send(message)

    def send_record(self, record: OutputRecord) -> None:
        """Send a record. Wait a while if the caller has much to read, then keep it all the same."""
        self._end.send_record(record)
        if self._channel.pending > MOST_PENDING:
            self._channel.flush(TIMEOUTS.deadline)

    def receive(self, timeout: float) -> Contents | None:
        """Return the next message, or None after ``timeout`` seconds. Raises :class:`GroupLost` if the caller is
        gone."""
        if not self._received:
            self._received += self._end.receive()
        if not self._received and not self._channel.ended and timeout:
            self._poller.register(self._channel, select.POLLIN | (select.POLLOUT if self._channel.wants_room else 0))
            self._poller.poll(1000 * timeout)
            self._received += self._end.receive()
        if self._received:
            return self._received.popleft()
        if self._channel.ended:
            raise GroupLost(f"the caller is gone: {self._channel.ended}", argument="engine")
        return None

    def close(self, wait: float) -> None:
        """Close after what was sent has left, or after ``wait`` seconds."""
        self._beats.close()
        self._channel.part(wait)


class _Gauge:
    """Measures the engine's steps; a context of each. ``pulse``: gets the number of the step in progress."""

    def __init__(self, engine: Engine, pulse: CallerEnd | None) -> None:
        self._engine, self._pulse = engine, pulse
        self._steps = 0
        self._host = self._elapsed = self._due = 0.0
        self._last: Stats | None = None

    def __enter__(self) -> None:
        self._began = time.monotonic(), time.thread_time()
        if self._pulse is not None:
            self._pulse.step = self._steps + 1

    def __exit__(self, *_error: object) -> None:
        elapsed, host = self._began
        self._elapsed += time.monotonic() - elapsed
        self._host += time.thread_time() - host
        self._steps += 1
        if self._pulse is not None:
            self._pulse.step = 0

    def read(self) -> Stats | None:
        """Return the figures if they have changed and are due, which a loss of workers always is."""
        now, down = time.monotonic(), self._engine.lost
        if now < self._due and down == ("" if self._last is None else self._last.down):
            return None
        self._due = now + TIMEOUTS.stats
        fed, accepted, _ = self._engine.drafts
        running, waiting, cache = self._engine.load()
        ranks, device = self._engine.spent
        steps = self._engine.preemptions, self._steps, self._host, self._elapsed
        former, self._last = self._last, Stats(running, waiting, cache, *steps, fed, accepted, device, ranks, down)
        return None if former == self._last else self._last


def serve_requests(channel: CallerEnd, engine: Engine, pulse: CallerEnd | None = None) -> None:
    """Take requests and aborts and step until the caller sends Stop. ``pulse``: gets the number of each step.

    Raises the errors of a step, and :class:`GroupLost` if the caller is gone.
    """
    gauge, come = _Gauge(engine, pulse), list[Request]()
    while True:
        message = channel.receive(0.0 if engine.busy else TIMEOUTS.look)
        while message is not None:
            if isinstance(message, Stop):
                return
            if isinstance(message, Submit):
                ids: Any = np.frombuffer(message.prompt, np.int32)
                come.append(Request(message.request, ids, message.params, priority=message.priority))
            elif isinstance(message, Abort):
                engine.submit_all(come)  # it may be of one of them
                come.clear()
                engine.abort(message.request)
            message = channel.receive(0.0)
        engine.submit_all(come)
        come.clear()
        with gauge if engine.busy else contextlib.nullcontext():  # an idle turn looks after ranks, and is no step
            ended = engine.step()
        for one in ended:
            if not one.reported:
                channel.send(Ended(one.request_id, len(one.token_ids), int(one.reason), one.message, one.refused))
        if (stats := gauge.read()) is not None:
            channel.send(stats)


def run(channel: Channel) -> int:
    """Serve the caller at the other end of the channel; the exit status."""
    caller, wait = CallerEnd(channel), TIMEOUTS.parting
    try:
        caller.send(Hello(0, 1, versions()))
        setup = caller.receive(TIMEOUTS.starting)
        if not isinstance(setup, Setup):
            raise GroupLost("no message of what to serve came", argument="engine")
        with printed(level()), open_engine(setup, caller.send_record) as opened:
            able = opened.device.capabilities
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)  # from here on the caller's Stop ends it, and no send is cut
            caller.send(Up(0, opened.device.name, dict(able.fallbacks), able.substituted))
            serve_requests(caller, opened.engine, caller)
        wait = TIMEOUTS.ranks_end / 2
    except Exception as error:  # noqa: BLE001 (the caller raises it)
        lost = isinstance(error, GroupLost) and error.argument == "engine"
        if not lost:
            caller.send(failed_message(error, 0, 0))
        print(f"hal: engine process: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        caller.close(wait)
    return 0


def main() -> None:
    """Serve the caller at the other end of the socket whose descriptor is the first argument. Exit at once: a
    framework's own exit may take seconds. SIGTERM ends the loading in order, folders and ranks included."""
    from hal_engine.mkl import choose_kernels

    choose_kernels(os.environ)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)  # a process that this one starts would keep it open
    try:
        logging.getLogger("hal.runner").addFilter(Few())  # each step may fail
        with lines_by_thread(TIMEOUTS.shown):
            status = run(Channel(sock))
    except KeyboardInterrupt:
        status = 128 + signal.SIGTERM
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
