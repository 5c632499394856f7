"""The standard streams of the commands, where one of them may be closed (``1>&-``) or refuse what is written."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, TextIO, cast

_USUAL_COLUMNS = 80
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters but for tab and newline; a terminal obeys them, ESC first of all."""


def shown(text: str, stream: TextIO) -> str:
    """The text as ``stream`` is to get it: a terminal gets control characters as escapes such as ``\\x1b``, because
    prompts and answers are not the user's own commands. Files and pipes get it unchanged."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text) if stream.isatty() else text


def columns_of(stream: TextIO) -> int:
    """Return how many columns the terminal behind ``stream`` has; ``COLUMNS`` goes before it."""
    with contextlib.suppress(OSError, ValueError):
        if not os.environ.get("COLUMNS", "").isdecimal():
            return os.get_terminal_size(stream.fileno()).columns or _USUAL_COLUMNS
    return shutil.get_terminal_size((_USUAL_COLUMNS, 24)).columns


def fitted(text: str, stream: TextIO) -> str:
    """The text as ``stream`` is to get it: on a terminal, lines of hal's that are too long break between words."""
    if not stream.isatty():
        return text
    columns = columns_of(stream)
    lines = [
        _wrapped(line, columns) if line.startswith("hal: ") and len(line) > columns else line
        for line in text.split("\n")
    ]
    return "\n".join(lines)


def _wrapped(line: str, columns: int) -> str:
    return textwrap.fill(line, max(columns, 2), break_long_words=False, break_on_hyphens=False)


class Output:
    """Standard output, noting why it took nothing: libraries on the way may swallow the error, or make it theirs."""

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
        """Flush; unless it is ``wanted``, only have nothing left that the interpreter would flush at its exit.

        After a signal that broke off a write, a flush would wait for the same reader that the write has waited for.
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
    """Standard output, watched; a stream that is closed has a stand-in meanwhile, behind :func:`occupy`.

    What goes to a closed standard error is lost, as its user wants it. A closed standard output cannot be written, and
    the command fails as on a full disk.
    """
    if sys.stdout is None:
        sys.stdout = vars(sys)["__stdout__"] = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = vars(sys)["__stderr__"] = os.fdopen(2, "w", buffering=1, closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # text in another script must not break a listing
    output = Output(sys.stdout)
    sys.stdout = cast(TextIO, output)
    try:
        yield output
    finally:
        sys.stdout = output.stream
        if output.failure is not None:
            _mute(output.stream)


def occupy() -> None:
    """Give the standard streams that are closed their numbers, before anything else is opened.

    A file or pipe opened later would take the number, and what is written to the stream would go into it.
    """
    for number, flags in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            descriptor = os.open(os.devnull, flags)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)


_status = ""
"""What the status line shows."""


def status(text: str) -> None:
    """Show on a terminal what the command is at, in a line that goes when anything else is written; "": clear it."""
    global _status
    if (text or _status) and sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not quiet:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"\r{text}\x1b[K")
            sys.stderr.flush()
        _status = text


quiet = False
"""Whether the command shows no status (``-q``)."""


def say(text: str) -> None:
    """A line on standard error. Where that cannot be written nobody can be told, and what is done goes on."""
    status("")
    try:
        print(fitted(shown(text, sys.stderr), sys.stderr), file=sys.stderr, flush=True)
    except OSError:
        _mute(sys.stderr)


def _mute(stream: TextIO) -> None:
    """Lead a stream that failed to nowhere, so that the interpreter's last flush of it finds nothing to say."""
    with contextlib.suppress(OSError, ValueError):  # a test's stream has no number
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)
