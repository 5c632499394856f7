"""The engine process of an asyncio engine: it owns the scheduler and the executor, and serves one caller to its end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from hal_core import GroupLost, HalError, OutputRecord, Request, SinkFull

from hal_engine.distributed.control_channel import RankChannel
from hal_engine.distributed.control_messages import Abort, Down, Ended, Hello, Message, Serve, Stats, Stop, Submit, Up
from hal_engine.distributed.errors import failed_message
from hal_engine.distributed.rank import versions
from hal_engine.opening import open_engine
from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport import open_sink

from .pulse import Pulse

if TYPE_CHECKING:
    from hal_engine.distributed.steps import StepOrder
    from hal_engine.engine import Engine


class Channel(Protocol):
    """The control channel's end here; :class:`RankChannel` is one."""

    def receive(self, timeout: float) -> Message | StepOrder | None: ...

    def send(self, message: Message, patience: float = ...) -> bool: ...


class _Taken:
    """A record that the engine has taken over, on its way to the sink."""

    def __init__(self, record: OutputRecord) -> None:
        self.step, self._record = record.step, record

    def resolve(self) -> OutputRecord:
        return self._record

    def ready(self) -> bool:
        return True

    def complete(self, error: BaseException | None) -> None:
        """No ticket waits for it."""


class _Gauge:
    """Measures the engine's steps; a context of each. ``pulse``: gets the number of the step in progress."""

    def __init__(self, engine: Engine, pulse: Pulse | None) -> None:
        self._engine, self._pulse = engine, pulse
        self._steps = 0
        self._host = self._elapsed = self._due = 0.0
        self._told: Stats | None = None

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
        """Return the figures if they are due and have changed."""
        now = time.monotonic()
        if now < self._due:
            return None
        self._due = now + TIMEOUTS.stats
        fed, accepted, _ = self._engine.drafts
        running, waiting, cache = self._engine.load()
        ranks, device = self._engine.spent
        told, self._told = (
            self._told,
            Stats(
                running,
                waiting,
                cache,
                self._engine.preemptions,
                self._steps,
                self._host,
                self._elapsed,
                fed,
                accepted,
                device,
                ranks,
            ),
        )
        return None if told == self._told else self._told


def serve_requests(channel: Channel, engine: Engine, pulse: Pulse | None = None) -> None:
    """Take requests and aborts and step until the caller sends Stop. ``pulse``: gets the number of each step.

    Raises the errors of a step, and :class:`GroupLost` if the caller is gone.
    """
    gauge, lost, come = _Gauge(engine, pulse), "", list[Request]()
    while True:
        message = channel.receive(0.0 if engine.busy else TIMEOUTS.process_idle)
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
                channel.send(Ended(one.request_id, len(one.token_ids), int(one.reason), one.message))
        if engine.lost != lost:
            channel.send(Down(lost := engine.lost))
        if (stats := gauge.read()) is not None:
            channel.send(stats)


def run(url: str, pulse: Pulse) -> int:
    """Serve the caller at ``url``; the exit status. ``pulse``: beats in a thread of its own."""
    channel = RankChannel(url, 0)
    try:
        channel.send(Hello(0, 1, versions()), TIMEOUTS.silence)
        serve = channel.receive(TIMEOUTS.serve)
        if not isinstance(serve, Serve):
            raise GroupLost("no message of what to serve came", argument="engine")
        sink = open_sink(serve.records)
        failed = True

        def send(record: OutputRecord) -> None:
            with contextlib.suppress(SinkFull):  # it is kept, and sent when there is room
                sink.put(_Taken(record))

        try:
            with open_engine(serve, send) as opened:
                able = opened.device.capabilities
                channel.send(Up(0, opened.device.name, dict(able.fallbacks), able.substituted))
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from here on, the caller sends Stop
                serve_requests(channel, opened.engine, pulse)
                failed = False
        finally:
            with contextlib.suppress(HalError):  # a caller that is gone acknowledges no record
                sink.close(0.0 if failed else TIMEOUTS.records_end)
    except Exception as error:  # noqa: BLE001 (the caller raises it)
        lost = isinstance(error, GroupLost) and error.argument == "engine"
        if not lost:
            channel.send(failed_message(error, 0, 0), 1.0)
        print(f"hal: engine process: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        channel.close()
    return 0


def main() -> None:
    """Serve the caller at the url in the first argument, and beat into the descriptor in the second. Exit at once: a
    framework's own exit may take seconds. SIGTERM ends the loading in order, folders and ranks included."""
    from hal_engine.mkl import choose_kernels

    choose_kernels(os.environ)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        status = run(sys.argv[1], Pulse(int(sys.argv[2])))
    except KeyboardInterrupt:
        status = 128 + signal.SIGTERM
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
