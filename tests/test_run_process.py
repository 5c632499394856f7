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

from .commands import (
    LIBRARIES,
    RUN,
    heed_interrupts,
    private_folders,  # noqa: F401 (a fixture)
)

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


WAITS_WHILE_LOADING = """
import os
import hal_paddle_runner
import hal.cli

def load(*_):
    open(os.environ["HAL_TEST_BEGUN"], "w").close()
    open(os.environ["HAL_TEST_NEVER"]).read()

hal_paddle_runner.Paddle.__call__ = load
hal.cli.main()
"""


def test_interrupted_while_loading_it_just_ends(tmp_path, started):
    """Loading opens one pipe, for which this test waits, and then waits at one that is never opened."""
    pipes = {f"HAL_TEST_{name}": str(tmp_path / name) for name in ("BEGUN", "NEVER")}
    for pipe in pipes.values():
        os.mkfifo(pipe)
    process = started("--prompt", "def f(", code=WAITS_WHILE_LOADING, env=os.environ | pipes)
    with open(pipes["HAL_TEST_BEGUN"]) as begun:
        begun.read()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, "Traceback" in err) == ("", False)


def test_a_closed_pipe_ends_it_quietly(started):
    reading, writing = os.pipe()
    os.close(reading)
    process = started("--prompt", "def f(", "--temperature=0", "--max-tokens", "200", stdout=writing)
    os.close(writing)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Traceback" not in err


#: The same, with a run that would wait ten days for a reader that has gone.
PATIENT = (
    "from hal.cli import main; from hal_engine.timeouts import TIMEOUTS; TIMEOUTS.look = TIMEOUTS.shown = 1e6; main()"
)


def redirected(started, *arguments, shell, code=RUN):
    """Run it with a shell's redirections of its standard streams: ``2>/dev/full`` and ``<&-``, for instance."""
    options, closed, opened = {}, [], []
    for word in shell.split():
        number = "0" if word[0] == "<" else "1" if word[0] == ">" else word[0]
        target = word.partition(">" if ">" in word else "<")[2]
        if target == "&-":
            closed.append(int(number))
        else:
            opened.append(open(target, "w"))  # noqa: SIM115
            options[{"1": "stdout", "2": "stderr"}[number]] = opened[-1]
    process = started(*arguments, code=code, closed=closed, **options)
    for one in opened:
        one.close()
    out, err = process.communicate(timeout=60)
    return process.returncode, out or "", err or ""


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
@pytest.mark.parametrize("shell", [">/dev/full", ">&-"])
def test_an_unwritable_output_is_one_line_and_does_not_wait(started, shell, options):
    arguments = ("--prompt", "def f(", "--temperature=0", "--max-tokens", "4", *options)
    status, _, err = redirected(started, *arguments, shell=shell, code=PATIENT)
    assert status == 2
    assert err.startswith("hal: error: standard output: cannot be written: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("shell", ["2>&-", "2>/dev/full", "<&- 2>&-"])
def test_the_text_comes_without_a_standard_error_too(started, shell):
    status, out, err = redirected(started, "--prompt", "def f(", "--temperature=0", "--max-tokens", "4", shell=shell)
    assert (status, err) == (0, "")
    assert out.startswith("def f(")


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


def test_piped_text_is_whole_and_progress_goes_to_the_terminal():
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
