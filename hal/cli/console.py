"""Standard streams of the commands, including streams that are closed (``1>&-``) or refuse writes."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import sys
import textwrap
import threading
from collections.abc import Iterator
from typing import Any, TextIO, cast

_USUAL_COLUMNS = 80
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters except tab and newline. Terminals execute them, ESC in particular."""


def shown(text: str, stream: TextIO) -> str:
    r"""Return the text to write to ``stream``: for a terminal, control characters become escapes such as ``\\x1b``,
    because prompts and answers must not control it. Files and pipes get the text unchanged."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text) if stream.isatty() else text


def columns_of(stream: TextIO) -> int:
    """Return the number of columns of the terminal behind ``stream``. The variable ``COLUMNS`` takes precedence."""
    with contextlib.suppress(OSError, ValueError):
        if not os.environ.get("COLUMNS", "").isdecimal():
            return os.get_terminal_size(stream.fileno()).columns or _USUAL_COLUMNS
    return shutil.get_terminal_size((_USUAL_COLUMNS, 24)).columns


def fitted(text: str, stream: TextIO, *, every: bool = False) -> str:
    """Return the text to write to ``stream``: for a terminal, hal's long lines are wrapped between words and keep their
    indent; with ``every``, all long lines are."""
    if not stream.isatty():
        return text
    columns = columns_of(stream)
    lines = [
        _wrapped(line, columns) if (every or line.startswith("hal: ")) and len(line) > columns else line
        for line in text.split("\n")
    ]
    return "\n".join(lines)


def _wrapped(line: str, columns: int) -> str:
    indent = line[: len(line) - len(line.lstrip(" "))]
    return textwrap.fill(
        line.strip(),
        max(columns, len(indent) + 2),
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


class Output:
    """Standard output that records its first write error, because libraries in between may swallow or replace it."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.failure: OSError | None = None

    def write(self, text: str) -> int:
        with self._noting():
            return self.stream.write(text)

    def flush(self) -> None:
        with self._noting():
            self.stream.flush()

    def finish(self, *, wanted: bool) -> None:
        """Flush if ``wanted``; otherwise discard the buffer, so that the interpreter has no output left to flush at
        exit.

        After a signal that interrupted a write, a flush would wait for the same slow reader again.
        """
        if wanted:
            self.flush()
        else:
            _mute(self.stream)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (whatever else a stream has)
        return getattr(self.stream, name)

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = self.failure or error
            raise


@contextlib.contextmanager
def prepared() -> Iterator[Output]:
    """Yield a watched standard output; streams that are closed get a stand-in, on the numbers of :func:`occupy`.

    Output to a closed standard error is discarded. Output to a closed standard output fails, as on a full disk.
    """
    if sys.stdout is None:
        sys.stdout = vars(sys)["__stdout__"] = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = vars(sys)["__stderr__"] = os.fdopen(2, "w", buffering=1, closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # unencodable text must not break a listing
    output = Output(sys.stdout)
    sys.stdout = cast(TextIO, output)
    try:
        yield output
    finally:
        sys.stdout = output.stream
        if output.failure is not None:
            _mute(output.stream)


def occupy() -> None:
    """Open the null device on the numbers of closed standard streams, before any other file is opened.

    Otherwise a file or pipe opened later would get that number and receive the stream's output.
    """
    # Standard output read-only: writes to it fail, as on a full disk.
    for number, flags in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            descriptor = os.open(os.devnull, flags)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)


_status = ""
"""Text of the status line."""


def status(text: str) -> None:
    """Show the command's progress on a terminal. Other output replaces the line; "" clears it."""
    global _status
    if (text or _status) and sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not quiet:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"\r{text}\x1b[K")
            sys.stderr.flush()
        _status = text


quiet = False
"""Whether the status line is off (``-q``)."""


class LineWriter:
    """A thread that writes lines on a stream, for callers that may not wait for its reader. ``name``: the stream's, for
    the line that counts dropped ones."""

    ROOM = 256
    """Lines that wait for the reader; further ones are counted."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._lines, self._descriptor = queue.SimpleQueue[str | None](), stream.fileno()
        self._stream, self._name = stream, name
        self._lock, self._waiting, self._lost = threading.Condition(), 0, 0
        self._thread = threading.Thread(target=self._write, name="hal-lines", daemon=True)  # it may wait for ever
        self._thread.start()

    def put(self, text: str) -> None:
        """Write a line, or count it if there is no room."""
        with self._lock:
            if self._waiting == self.ROOM:
                self._lost += 1
                return
            lost, self._lost = self._lost, 0
            self._waiting += 1
        note = f"hal: {lost} lines are not shown: nobody read {self._name}\n" if lost else ""
        self._lines.put(f"{note}{fitted(shown(text, self._stream), self._stream)}\n")

    def _write(self) -> None:
        while (text := self._lines.get()) is not None:
            data = text.encode(errors="backslashreplace")
            with contextlib.suppress(OSError):  # as a line that cannot be printed
                while data:
                    data = data[os.write(self._descriptor, data) :]  # no lock of the stream's, which the exit needs
            with self._lock:
                self._waiting -= 1
                self._lock.notify_all()

    def wait(self, seconds: float) -> bool:
        """Return whether all lines are written within the seconds."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._waiting, seconds)

    def close(self) -> None:
        """End the thread, whose lines are all written."""
        self._lines.put(None)
        self._thread.join()


_writer: LineWriter | None = None


@contextlib.contextmanager
def lines_by_thread(seconds: float) -> Iterator[None]:
    """Inside, lines are written by a thread, so that :func:`say` never waits for the reader of standard error.

    At the end the remaining lines have ``seconds``; if they are not read by then, further lines are counted, without a
    wait."""
    global _writer
    sys.stderr.flush()
    _writer = LineWriter(sys.stderr, "standard error")
    try:
        yield
    finally:
        if _writer.wait(seconds):
            _writer.close()
            _writer = None


def lines_are_written(seconds: float) -> bool:
    """Wait until the lines of :func:`lines_by_thread` are written; return whether they are within the seconds."""
    return _writer is None or _writer.wait(seconds)


def say(text: str) -> None:
    """Print a line on standard error. If that fails, the line is discarded and the command continues."""
    status("")
    if _writer is not None:
        _writer.put(text)
        return
    try:
        print(fitted(shown(text, sys.stderr), sys.stderr), file=sys.stderr, flush=True)
    except OSError:
        _mute(sys.stderr)


def _mute(stream: TextIO) -> None:
    """Redirect a stream that failed to the null device, so that the interpreter's last flush succeeds."""
    with contextlib.suppress(OSError, ValueError):  # a stream of a test has no file number
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)
