"""The caller's end of an engine process: one thread that talks to it, whatever the event loop is busy with."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue

import msgspec
import zmq
from hal_core import FinishReason, HalError, InvalidValue, Request, Unavailable

from hal_engine.children import TIED, environment
from hal_engine.distributed.control_channel import EngineChannel
from hal_engine.distributed.control_messages import (
    Abort,
    Down,
    Ended,
    Failed,
    Hello,
    Message,
    Serve,
    Stats,
    Stop,
    Submit,
    Up,
)
from hal_engine.model.streaming import AnswerText
from hal_engine.options import EngineSetup
from hal_engine.reading import Event, OutputReader, StreamLoss
from hal_engine.streams import Part, Stream, Streams
from hal_engine.timeouts import TIMEOUTS, Timeouts

from .pulse import PulseWatch

Put = Callable[[Part | HalError], object]
Post = Callable[..., object]
_TAIL = 400
"""Last characters of the process's output that an error shows."""
_RECORDS = 16
"""Most records that the thread takes before it looks for requests and aborts."""
_CHILD = TIED + "from hal_engine.generation.process import main; main()"


class EngineLink:
    """Starts an engine process and gives its output to the streams of the requests.

    ``post``: has the event loop call something, as ``loop.call_soon_threadsafe``; ``up``: done when the process takes
    requests; ``down``: done, with the reason, when it takes none any more. All methods may be called from any thread.
    """

    def __init__(self, setup: EngineSetup, post: Post) -> None:
        self.up: Future[Up] = Future()
        self.down: Future[HalError] = Future()
        self.stats: Stats | None = None  #: the newest
        self._down_workers = ""
        self._setup, self._post = setup, post
        self._commands: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._wake_end, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._wakes, self._over = threading.Lock(), False  # over: the thread has ended, and commands run at once
        self._outbox = deque[Submit | Abort]()  # until the process's queue has room
        self._streams, self._parts = Streams(), list[tuple[Put, Part | HalError]]()
        self._error: HalError | None = None
        self._silent: Unavailable | None = None  # while the process does not beat
        self._lost: StreamLoss | None = None
        self._closing, self._output_before = False, 0
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="hal-engine-link", daemon=True)
        self._thread.start()

    def submit(self, request: Request, answer: AnswerText, put: Put) -> None:
        """Send a request; ``put`` is called in the event loop with each part of ``answer``, or with an error."""
        self._do(partial(self._submit, request, Stream(answer, partial(self._collect, put))))

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
        self._do(partial(self._abort, name))

    def close(self) -> None:
        """End the process in order, by force if need be. Idempotent."""
        self._closing = True
        self._do(lambda: None)
        self._thread.join()
        with self._wakes:  # two callers may close at once
            ends, self._wake_end, self._wake = {self._wake_end, self._wake} - {-1}, -1, -1
        for one in ends:
            os.close(one)

    def _do(self, command: Callable[[], object]) -> None:
        with self._wakes:
            if self._over:
                command()
                self._flush()
                return
            self._commands.put(command)
            with contextlib.suppress(BlockingIOError):  # full: the thread is being woken
                os.write(self._wake, b"w")

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with (
                contextlib.closing(OutputReader(on_event=self._hear)) as self._reader,
                contextlib.closing(EngineChannel()) as self._channel,
                tempfile.TemporaryFile() as self._noise,
            ):
                self._start()
                try:
                    self._loop()
                finally:
                    self._end()
            self._fail(Unavailable("the engine was closed", cure="open another one"))
        except Exception as error:  # noqa: BLE001 (each stream raises it)
            self._fail(error if isinstance(error, HalError) else HalError(f"{type(error).__name__}: {error}"))
        while not self._closing:  # each later call of a failed engine gets its error
            self._commands.get()()
            self._flush()
        with self._wakes:
            while not self._commands.empty():
                self._commands.get()()
            self._flush()
            self._over = True

    def _start(self) -> None:
        reading, writing = os.pipe()
        self._beats, self._pulse = reading, PulseWatch(reading)
        try:
            self._process = subprocess.Popen(  # in a session of its own: Ctrl-C is the caller's
                [sys.executable, "-P", "-c", _CHILD, self._channel.url, str(writing)],
                stdin=subprocess.DEVNULL,
                stdout=self._noise,
                stderr=self._noise,
                env=environment(),
                start_new_session=True,
                pass_fds=[writing],
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)

    def _loop(self) -> None:
        poller, end = zmq.Poller(), time.monotonic() + TIMEOUTS.starting
        for socket in (self._wake_end, self._channel.socket, *self._reader.sockets):
            poller.register(socket, zmq.POLLIN)
        more = False  # records that were left
        while not self._closing:
            patience = 0.0 if more else TIMEOUTS.pause if self._outbox else TIMEOUTS.process_look
            if any(socket == self._wake_end for socket, _ in poller.poll(int(1000 * patience))):
                os.read(self._wake_end, 4096)
            assert self._process is not None
            status = self._process.poll()  # before its last messages are read
            while not self._commands.empty():  # aborts, before any more work for their streams
                self._commands.get()()
            more = self._read(last=status is not None)
            self._check_pulse()
            if self._outbox and self._channel.offer(self._outbox, 0):
                self._outbox.clear()
            self._flush()
            if status is not None:
                raise Unavailable(f"the engine process ended: {_how(status)}{self._tail()}", cure="start it again")
            if self._channel.unsent or self._lost is not None:
                raise Unavailable(f"the engine process takes no messages: {self._lost or 'its queue is full'}")
            if not self.up.done() and time.monotonic() > end:
                raise Unavailable(
                    "the engine process did not come up", cure=f"give it more time ({Timeouts.starting.variable})"
                )

    def _read(self, *, last: bool) -> bool:
        """Take some records, then messages; all if they are the ``last``. Return whether records may be left."""
        left = self._take_records(None if last else _RECORDS)
        for _, message in self._channel.last_messages() if last else self._channel.receive(0.0):
            if isinstance(message, Failed):  # no record follows
                self._take_records(None)
            self._take(message)
        return left

    def _take_records(self, most: int | None) -> bool:
        taken = 0
        while (most is None or taken < most) and (frame := self._reader.read(0.0)) is not None:
            self._streams.take(frame.record)
            taken += 1
        while self._streams.stopped:
            self._outbox.append(Abort(self._streams.stopped.popleft()))
        return taken == most

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
            self._outbox.extend(Abort(name) for name in self._streams.fail(self._silent))

    def _take(self, message: Message) -> None:
        if isinstance(message, Hello):
            self._channel.send(Serve(**self._setup.fields(), records=self._reader.url))
        elif isinstance(message, Up):
            self._output_before = os.fstat(self._noise.fileno()).st_size
            self._pulse.begin()
            self.up.set_result(message)
        elif isinstance(message, Stats):
            self.stats = message
        elif isinstance(message, Down):
            self._down_workers = message.what
        elif isinstance(message, Ended):
            self._streams.end(message.request, message.tokens, FinishReason(message.reason), message.message)
        elif isinstance(message, Failed):
            kind = InvalidValue if message.refused and not self.up.done() else Unavailable
            raise kind(message.what, cure=message.cure)

    def _hear(self, event: Event) -> None:
        if isinstance(event, StreamLoss):
            self._lost = event

    def _submit(self, request: Request, stream: Stream) -> None:
        if (error := self._error or self._silent) is not None:
            stream.fail(error)
            return
        self._streams.add(request.request_id, stream)
        ids = array("i", request.prompt).tobytes()
        self._outbox.append(Submit(request.request_id, ids, request.params, request.priority))

    def _abort(self, name: str) -> None:
        if self._streams.drop(name):
            self._outbox.append(Abort(name))

    def _collect(self, put: Put, part: Part | HalError) -> None:
        self._parts.append((put, part))

    def _flush(self) -> None:
        """Give the event loop all parts at once."""
        if self._parts:
            parts, self._parts = self._parts, []
            with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits
                self._post(_give, parts)

    def _fail(self, error: HalError) -> None:
        self._error = error
        if self.stats is not None:  # no request runs any more; the totals remain
            self.stats = msgspec.structs.replace(self.stats, running=0, waiting=0, cache=0.0)
        self.down.set_result(error)
        self._streams.fail(error)
        if not self.up.done():
            self.up.set_exception(error)
        self._flush()

    def _tail(self) -> str:
        """The last output of the process since it took requests."""
        size = os.fstat(self._noise.fileno()).st_size
        said = os.pread(self._noise.fileno(), _TAIL, max(self._output_before, size - _TAIL))
        words = " ".join(said.decode(errors="replace").split())
        return f"; its output: {words}" if words else ""

    def _end(self) -> None:
        """End the process, which sends its last records first."""
        assert self._process is not None
        if self._closing and self._silent is None:
            self._channel.send(Stop())
            if not self.up.done():  # it may not read messages yet
                self._process.terminate()
            end = time.monotonic() + (TIMEOUTS.ranks_end if self.up.done() else TIMEOUTS.process_start_end)
            while self._process.poll() is None and time.monotonic() < end:
                self._reader.read(TIMEOUTS.reader_slice)
        self._process.kill()
        self._process.wait()
        os.close(self._beats)


def _give(parts: list[tuple[Put, Part | HalError]]) -> None:
    for put, part in parts:
        put(part)


def _how(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
