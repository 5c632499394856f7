"""The caller's end of an engine process: the event loop reads its messages, and a thread watches it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec
from hal_core import FinishReason, HalError, InvalidValue, OutputRecord, Request, Unavailable

from hal.cli.logs import VARIABLE
from hal_engine.children import TIED, environment
from hal_engine.distributed.control_channel import Contents, ControlEnd
from hal_engine.distributed.control_messages import Abort, Ended, Failed, Hello, Setup, Stats, Stop, Submit, Up
from hal_engine.model.streaming import AnswerText
from hal_engine.options import EngineSetup
from hal_engine.streams import Part, Stream, Streams
from hal_engine.timeouts import TIMEOUTS, Timeouts
from hal_engine.transport.channel import Channel
from hal_engine.transport.urls import remove_folders_of_killed

from .pulse import PulseWatch

Put = Callable[[Part | HalError], object]
_AT_ONCE = 32
"""Requests that are given their parts in one call, some half a millisecond: the loop goes round in between."""
_TAIL = 400
"""Last characters of the process's output that an error shows."""
_CHILD = TIED + "from hal_engine.generation.process import main; main()"


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error that ends these streams, or all."""

    error: HalError
    names: tuple[str, ...] = ()


class EngineLink:
    """Starts an engine process and gives its output to the streams of the requests.

    ``loop``: the event loop that calls ``submit`` and ``abort``. It reads the process's messages as they come and
    gives the streams their parts. A thread starts the process, watches it, reads while the loop is busy, and ends it.
    ``up``: done when the process takes requests; ``down``: done, with the reason, when it takes none any more. Other
    methods may be called from any thread.
    """

    def __init__(self, setup: EngineSetup, loop: asyncio.AbstractEventLoop) -> None:
        self.up: Future[Up] = Future()
        self.down: Future[HalError] = Future()
        self.stats: Stats | None = None  #: the newest
        self._down_workers = ""
        self._setup, self._loop = setup, loop
        self._wake_end, self._wake = os.pipe()
        os.set_blocking(self._wake, False)  # a full pipe wakes, too
        self._wakes = threading.Lock()
        self._receiving = threading.Lock()  # by the loop or the thread
        self._read_end = -1  # a descriptor of the channel's socket, which the loop watches and closes
        self._streams = Streams()
        self._received = deque[OutputRecord | Ended | _Failure]()  # for the event loop, in order
        self._posted = False  # it is going to take them
        self._is_giving = False  # it is going to give more parts
        self._trouble: HalError | None = None  # the loop has read it, or found it
        self._error: HalError | None = None
        self._silent: Unavailable | None = None  # while the process does not beat
        self._closing, self._output_before = False, 0
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="hal-engine-link", daemon=True)
        self._thread.start()

    def submit(self, request: Request, answer: AnswerText, put: Put) -> None:
        """Send a request; ``put`` is called in the event loop with each part of ``answer``, or with an error."""
        self._streams.add(request.request_id, Stream(answer, put))
        if (error := self._error or self._silent) is not None:
            self._received.append(_Failure(error, (request.request_id,)))
            self._flush()
            return
        ids = array("i", request.prompt).tobytes()
        self._send(Submit(request.request_id, ids, request.params, request.priority))

    @property
    def error(self) -> HalError | None:
        """Why the process has ended; None while it runs."""
        return self._error

    @property
    def lost(self) -> str:
        """Why requests wait or are refused for the time being: the process does not beat, or workers are lost; ""."""
        return self._down_workers if self._silent is None else str(self._silent)

    def abort(self, name: str) -> None:
        """Abort a request, unless it has ended."""
        if self._streams.drop(name):
            self._send(Abort(name))

    def close(self) -> None:
        """End the process in order, by force if need be. Idempotent."""
        self._closing = True
        self._wake_thread()
        self._thread.join()
        with self._wakes:  # two callers may close at once
            ends, self._wake_end, self._wake = {self._wake_end, self._wake} - {-1}, -1, -1
            if self._loop.is_closed():  # it cannot do so
                ends, self._read_end = ends | {self._read_end} - {-1}, -1
        for one in ends:
            os.close(one)

    def _wake_thread(self) -> None:
        with self._wakes:
            if self._wake >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.write(self._wake, b"w")

    def _send(self, message: Submit | Abort) -> None:
        self._end_here.send(message)  # without an effect once the channel is closed
        if self._channel.wants_room:
            self._wake_thread()

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            own, theirs = Channel.pair()
            with (
                contextlib.closing(own) as self._channel,
                contextlib.closing(theirs),
                tempfile.TemporaryFile() as self._noise,
            ):
                self._end_here, self._pulse = ControlEnd(own), PulseWatch(own)
                self._start(theirs)
                try:
                    self._watch()
                finally:
                    self._end()
                    self._close_channel()
            self._fail(Unavailable("the engine was closed", cure="open another one"))
        except Exception as error:  # noqa: BLE001 (each stream raises it)
            self._fail(error if isinstance(error, HalError) else HalError(f"{type(error).__name__}: {error}"))

    def _start(self, theirs: Channel) -> None:
        self._process = subprocess.Popen(  # in a session of its own: Ctrl-C is the caller's
            [sys.executable, "-P", "-c", _CHILD, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=self._noise,
            stderr=None if os.environ.get(VARIABLE) else self._noise,  # it prints its log
            env=environment(),
            start_new_session=True,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def _watch(self) -> None:
        """Watch the process until it is to end. Raises why it takes no requests."""
        poller, end = select.poll(), time.monotonic() + TIMEOUTS.starting
        poller.register(self._wake_end, select.POLLIN)
        while not self._closing:
            reads = select.POLLIN if self._read_end < 0 else 0
            poller.register(self._channel, reads | (select.POLLOUT if self._channel.wants_room else 0))
            ready = [number for number, _ in poller.poll(1000 * TIMEOUTS.look)]
            if self._wake_end in ready:
                os.read(self._wake_end, 4096)
            assert self._process is not None
            status = None if ready else self._process.poll()  # before its last messages are read
            if ready != [self._wake_end]:  # there is room to send, the peer has closed, or the loop does not read
                self._receive(whole=status is not None)
            if self._trouble is not None:
                raise self._trouble
            self._check_pulse()
            self._flush()
            if status is not None or self._channel.ended:
                how = _how(self._status() if status is None else status)
                raise Unavailable(f"the engine process ended: {how}{self._tail()}", cure="start it again")
            if not self.up.done() and time.monotonic() > end:
                raise Unavailable(
                    "the engine process did not come up", cure=f"give it more time ({Timeouts.starting.variable})"
                )

    def _check_pulse(self) -> None:
        """End the requests of a process that does not beat; raise if it is in a step beyond its limit."""
        self._pulse.look()
        if step := self._pulse.late:
            cure = f"see what holds it up; where steps take that long, give them more time ({Timeouts.step.variable})"
            raise Unavailable(f"the engine process has not ended step {step} within {TIMEOUTS.step:g} s", cure=cure)
        if not (self.up.done() and self._pulse.silent):
            self._silent = None
        elif self._silent is None:
            what = f"the engine process has not beaten for {TIMEOUTS.process_silence:g} s: it is stopped, or hangs"
            cure = "let it go on (SIGCONT), or start the engine again"
            self._silent = Unavailable(what, cure=cure)
            self._received.append(_Failure(self._silent))

    def _receive(self, *, whole: bool = False) -> None:
        """Take the messages that have come, or ``whole``: all until the end. The thread raises its error."""
        with self._receiving:
            try:
                while contents := self._end_here.receive():
                    for one in contents:
                        self._take(one)
                    if not whole:
                        break
            except HalError as error:
                self._trouble = self._trouble or error

    def _take(self, message: Contents) -> None:
        if isinstance(message, OutputRecord | Ended):
            self._received.append(message)
        elif isinstance(message, Hello):
            self._end_here.send(Setup(**self._setup.fields(), timeout=TIMEOUTS.collective))
        elif isinstance(message, Up):
            self._output_before = os.fstat(self._noise.fileno()).st_size
            self._pulse.begin()
            self._read_end = os.dup(self._channel.fileno())
            self._call_soon(self._begin_reading)
            self.up.set_result(message)
        elif isinstance(message, Stats):
            self.stats, self._down_workers = message, message.down
        elif isinstance(message, Failed):
            kind = InvalidValue if message.refused and not self.up.done() else Unavailable
            raise kind(message.what, cure=message.cure)

    def _flush(self) -> None:
        """Have the event loop take the received messages."""
        if self._received and not self._posted:
            self._posted = True
            self._call_soon(self._give)

    def _call_soon(self, call: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits
            self._loop.call_soon_threadsafe(call)

    # -- the event loop -------------------------------------------------------------------------------------------

    def _begin_reading(self) -> None:
        self._loop.add_reader(self._read_end, self._read)

    def _stop_reading(self) -> None:
        if self._read_end >= 0:
            self._loop.remove_reader(self._read_end)
            os.close(self._read_end)
            self._read_end = -1

    def _read(self) -> None:
        """Take the messages that have come, and give them, without another thread."""
        self._receive()
        if self._channel.ended:
            self._loop.remove_reader(self._read_end)
        if self._channel.ended or self._trouble is not None:
            self._wake_thread()
        self._give()

    def _give(self) -> None:
        """Give the streams all that was received."""
        self._posted = False  # before they are taken: later messages are posted again
        records, aborts = list[OutputRecord](), list[str]()
        try:
            while self._received:
                if isinstance(one := self._received.popleft(), OutputRecord):
                    records.append(one)
                    continue
                self._streams.take(*records)
                records.clear()
                if isinstance(one, Ended):
                    reason = FinishReason(one.reason)
                    self._streams.end(one.request, one.tokens, reason, one.message, refused=one.refused)
                else:
                    aborts += self._streams.fail(one.error, *one.names)
            self._streams.collect(*records)
        except HalError as error:
            self._trouble = self._trouble or error
            self._wake_thread()
        self._streams.give_edges()
        self._abort(aborts)
        self._post_rest()

    def _post_rest(self) -> None:
        if not self._is_giving:
            self._is_giving = True
            self._loop.call_soon(self._give_rest)  # behind the tasks that were woken

    def _give_rest(self) -> None:
        """Give some parts, and more in the next iteration of the loop: new requests are read in between."""
        self._is_giving = False  # also if a request's caller raises
        is_left = self._streams.give_some(_AT_ONCE)
        self._abort()
        if is_left:
            self._post_rest()

    def _abort(self, names: Sequence[str] = ()) -> None:
        """Abort these requests, and those that a stop text has ended."""
        for name in (*names, *self._streams.stopped):
            self._send(Abort(name))
        self._streams.stopped.clear()

    # -- the end --------------------------------------------------------------------------------------------------

    def _fail(self, error: HalError) -> None:
        self._error = error
        self._call_soon(self._stop_reading)
        if self.stats is not None:  # no request runs any more; the totals remain
            self.stats = msgspec.structs.replace(self.stats, running=0, waiting=0, cache=0.0)
        self.down.set_result(error)
        self._received.append(_Failure(error))
        if not self.up.done():
            self.up.set_exception(error)
        self._flush()

    def _close_channel(self) -> None:
        with self._receiving:
            self._channel.finish()  # as the loop may keep a descriptor a little longer
            self._channel.close()

    def _status(self) -> int:
        """The exit status of the process, which has closed its channel; it is killed if it does not end."""
        assert self._process is not None
        self._close_channel()  # the process waits for that
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(TIMEOUTS.ranks_end_forced)
        self._process.kill()
        return self._process.wait()

    def _tail(self) -> str:
        """The last output of the process since it took requests."""
        size = os.fstat(self._noise.fileno()).st_size
        output = os.pread(self._noise.fileno(), _TAIL, max(self._output_before, size - _TAIL))
        words = " ".join(output.decode(errors="replace").split())
        return f"; its output: {words}" if words else ""

    def _end(self) -> None:
        """End the process, which sends its last records first."""
        assert self._process is not None
        if self._closing and self._silent is None:
            self._end_here.send(Stop())
            if not self.up.done():  # it may not read messages yet
                self._process.terminate()
            end = time.monotonic() + (TIMEOUTS.ranks_end if self.up.done() else 3 * TIMEOUTS.signal / 4)
            while self._process.poll() is None and time.monotonic() < end:
                with self._receiving:
                    self._channel.receive()
                if self._channel.ended:
                    self._close_channel()  # the process waits for that, so that nothing is lost
                time.sleep(TIMEOUTS.pause)
        self._process.kill()
        if self._process.wait() == -signal.SIGKILL:
            remove_folders_of_killed()


def _how(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
