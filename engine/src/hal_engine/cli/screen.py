"""Output of ``hal run``: text on standard output, progress and notes on standard error, or both on one terminal."""

from __future__ import annotations

import sys

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from hal.cli.console import say, shown, status


class Screen:
    """Shows text as it comes, on standard output and error as they are now: a later redirection of ``sys.stdout`` has
    no effect. Called by one thread at a time."""

    def __init__(self) -> None:
        self._out = sys.stdout

    def write(self, text: str) -> None:
        """Write text to standard output."""
        if text:
            self._out.write(shown(text, self._out))
            self._out.flush()

    def note(self, text: str) -> None:
        """Write one line beside the text."""
        say(f"hal: {text}")

    def progress(self, text: str) -> None:
        """Replace the progress line; here there is none."""

    def close(self) -> None:
        """Finish the output."""


def open_screen(*, quiet: bool = False) -> Screen:
    """Return the screen for the two standard streams. Without a terminal on standard error there is no progress
    line."""
    status("")
    if quiet or not sys.stderr.isatty():
        return Screen()
    return OneTerminal() if sys.stdout.isatty() else WithProgress()


class WithProgress(Screen):
    """Output goes elsewhere, and standard error is a terminal, which shows a progress line."""

    def __init__(self) -> None:
        super().__init__()
        self._live = _started(Live(console=Console(stderr=True), transient=True, redirect_stdout=False))

    def progress(self, text: str) -> None:
        self._live.update(_dim(text))

    def note(self, text: str) -> None:
        self._live.console.print(Text(shown(f"hal: {text}", sys.stderr)))

    def close(self) -> None:
        self._live.stop()


class OneTerminal(Screen):
    """Text and progress on one terminal: whole lines scroll, and below them are the unfinished line and the
    progress."""

    def __init__(self) -> None:
        self._line, self._progress = "", ""
        self._console = Console(file=sys.stdout)  # the stream of now, whatever redirects it later
        live = Live(console=self._console, transient=True, vertical_overflow="visible", refresh_per_second=20)
        self._live = _started(live)

    def write(self, text: str) -> None:
        lines, newline, rest = (self._line + shown(text, sys.stdout)).rpartition("\n")
        if newline:
            self._console.print(Text(lines), soft_wrap=True)
        self._line = rest
        self._update()

    def note(self, text: str) -> None:
        self._console.print(Text(shown(f"hal: {text}", sys.stdout)))

    def progress(self, text: str) -> None:
        self._progress = text
        self._update()

    def close(self) -> None:
        if self._line:
            self._console.print(Text(self._line), soft_wrap=True)
        self._line = ""
        self._live.update(Text(""))
        self._live.stop()

    def _update(self) -> None:
        self._live.update(Group(Text(self._line), _dim(self._progress)))


def _dim(text: str) -> Text:
    """Return a line that is cut to the terminal's width."""
    return Text(text, style="dim", no_wrap=True, overflow="ellipsis")


def _started(live: Live) -> Live:
    """Start it with the cursor shown, because a process that ends at once could not show it again."""
    live.start()
    live.console.show_cursor(True)
    return live
