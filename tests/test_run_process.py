"""``hal run`` as a process: signals, pipes, standard streams that are missing or full, terminals."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys

import pytest

from .commands import LIBRARIES, RUN, heed_interrupts

WARM = LIBRARIES
pytestmark = pytest.mark.usefixtures("private_folders")


@pytest.fixture
def started(warm):
    """Start ``hal run`` in a fork of a process that has imported Paddle."""

    def start(*arguments, code=RUN, **options):
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return warm.start("run", *arguments, code=code, **streams | options)

    return start


def test_the_command_runs_by_itself_and_keeps_stdout_clean():
    """A whole process, as users start it; all further tests fork theirs."""
    command = [sys.executable, "-c", RUN, "run", "--prompt", "def main(", "--temperature=0", "--max-tokens", "8"]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=heed_interrupts, timeout=60, check=False)
    out, err = done.stdout, done.stderr
    assert done.returncode == 0
    assert out.startswith("def main(")
    assert len(err.splitlines()) == 1, "nothing but the summary, not even a warning of a framework"


def test_interrupted_it_tells_what_it_has_and_leaves_nothing(started):
    process = started(
        "--prompt", "def f(", "--prompt", "import", "--temperature=0", "--max-tokens", "480", "--slots", "1"
    )
    select.select([process.stdout], [], [])  # until the text begins
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert out.startswith("--- r0 ---\ndef f(")
    assert "interrupted: 2 of 2 prompts not answered to the end" in err


SHOW = """
import time
from hal_engine.cli.screen import open_screen
screen = open_screen()
screen.write("def f(")
screen.progress("3 tokens")
time.sleep(0.3)
screen.write("x):\\n" + "    long = " + "1 + " * 40)
screen.note("a note")
screen.close()
"""


def on_terminal(*, stdout: bool, code: str = SHOW) -> tuple[str, str]:
    """Run code with standard error, and perhaps output, on a terminal; return both outputs, terminal's and pipe's."""
    terminal, inner = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=inner if stdout else subprocess.PIPE, stderr=inner, env=TERMINAL
    )
    os.close(inner)
    piped = process.stdout.read().decode() if process.stdout else ""
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the other end is closed
        while piece := os.read(terminal, 4096):
            shown += piece
    os.close(terminal)
    if process.stdout:
        process.stdout.close()
    assert process.wait(30) == 0
    return shown.decode(), piped


TERMINAL = os.environ | {"TERM": "xterm", "COLUMNS": "60", "NO_COLOR": "1"}


def test_a_terminal_shows_text_with_a_progress_line_below():
    shown, _ = on_terminal(stdout=True)
    assert "3 tokens" in shown
    assert "def f(x):\r\n" in shown
    assert "    long = " + "1 + " * 40 in shown, "a long line is left to the terminal to wrap"
    assert "hal: a note" in shown


def test_piped_text_is_complete_and_progress_goes_to_the_terminal():
    shown, piped = on_terminal(stdout=False)
    assert piped == "def f(x):\n    long = " + "1 + " * 40
    assert "3 tokens" in shown
    assert "hal: a note" in shown


STARTS = """
import sys
from hal.cli import main

class Finder:
    def find_spec(self, name, path, target=None):
        if name in ("numpy", "hal_engine.cli.run"):
            print(f"imports {name}", file=sys.stderr)

sys.meta_path.insert(0, Finder())
try:
    main(["run", "--nonsense"])
except SystemExit as end:
    assert end.code == 2
"""


def test_a_terminal_shows_something_before_what_takes_long_is_imported():
    shown, piped = on_terminal(stdout=False, code=STARTS)
    assert shown.index("starting") < shown.index("imports hal_engine.cli.run") < shown.index("imports numpy")
    assert "\r\x1b[Khal: error: --nonsense: no such option" in shown, "and the line is gone before the next"
    assert piped == ""
    done = subprocess.run([sys.executable, "-c", STARTS], capture_output=True, text=True, check=True)
    assert ("starting" in done.stderr, "\x1b" in done.stderr) == (False, False)
