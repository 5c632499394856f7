"""Standard streams that are full, closed, missing or unread: one line where it is possible, and no traceback."""

import os
import subprocess
from itertools import product

import pytest

from . import share
from .commands import LIBRARIES, RUN, environment
from .fixtures_plugins.builder import Site

WARM = LIBRARIES
pytestmark = pytest.mark.usefixtures("private_folders")
GENERATE = "run --prompt x --temperature=0 --max-tokens 4"
#: With a run that would wait ten days for a reader that has gone.
PATIENT = (
    "from hal.cli import main; from hal_engine.timeouts import TIMEOUTS; TIMEOUTS.look = TIMEOUTS.shown = 1e6; main()"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A plugin that prints, in a folder of the path."""
    site = Site(tmp_path_factory.mktemp("streams") / "site")
    site.device("alpha", priority=30, state="prints")
    return site


@pytest.fixture
def redirected(warm, site, tmp_path):
    """Run a command with a shell's redirections: ``redirected("devices", "<&- 2>/dev/full")``."""

    def run(command, shell, code=RUN, **more):
        options, closed, opened = {}, [], []
        for word in shell.split():
            number = "0" if word[0] == "<" else "1" if word[0] == ">" else word[0]
            target = word.partition(">" if ">" in word else "<")[2]
            if target == "&-":
                closed.append(int(number))
            else:
                opened.append(open(target, "w"))  # noqa: SIM115 (closed below)
                options[{"1": "stdout", "2": "stderr"}[number]] = opened[-1]
        env = environment(tmp_path, PYTHONPATH=str(site.folder), **more)
        done = warm.run(*command.split(), code=code, env=env, closed=closed, **options)
        for file in opened:
            file.close()
        return done.returncode, done.stdout or "", done.stderr or ""

    return run


OUTPUTS = {">/dev/full": "No space left on device", ">&-": "Bad file descriptor"}
PRINT = (
    "--version",
    "devices",
    "devices --json",
    "--help",
    "tail --help",
    "run --help",
    GENERATE,
    f"{GENERATE} --json",
)
WAYS = [(command, *way) for command in PRINT for way in product(OUTPUTS, ("", "1"))]
HERE = {WAYS[4 * at + at % 4] for at in range(len(PRINT))} | {("devices", ">&-", ""), (GENERATE, ">&-", "")}
"""In ``make test``: every command, and every fault."""


@pytest.mark.parametrize(("command", "shell", "unbuffered"), share.cases(WAYS, HERE.__contains__))
def test_an_output_that_cannot_be_written_is_one_line(redirected, command, shell, unbuffered):
    status, _, err = redirected(command, shell, code=PATIENT, PYTHONUNBUFFERED=unbuffered)
    (line,) = (line for line in err.splitlines() if line != "noise of a plugin")
    cure = "(make room there, or send it elsewhere)"
    assert (status, line) == (2, f"hal: error: standard output: cannot be written: {OUTPUTS[shell]} {cure}")


@pytest.mark.parametrize(
    ("command", "shell", "status", "begin"),
    [
        ("--version", "2>&-", 0, "hal "),
        ("--version", "2>/dev/full", 0, "hal "),
        ("--version", "<&- >&- 2>&-", 2, ""),
        ("devices --json", ">&- 2>/dev/full", 2, ""),
        ("tail nonsense", "2>/dev/full", 2, ""),
        ("tail nonsense", "2>&-", 2, ""),
        (GENERATE, "2>&-", 0, "x"),
        (GENERATE, "2>/dev/full", 0, "x"),
        (GENERATE, "<&- 2>&-", 0, "x"),
    ],
)
def test_errors_that_nobody_can_read_change_nothing(redirected, command, shell, status, begin):
    code, out, err = redirected(command, shell)
    assert (code, err) == (status, "")
    assert out.startswith(begin)
    assert bool(out) == bool(begin)


@pytest.mark.parametrize("command", ["devices", f"{GENERATE[:-1]}200"])
def test_a_closed_pipe_ends_it_quietly(warm, site, tmp_path, command):
    reading, writing = os.pipe()
    os.close(reading)
    env = environment(tmp_path, PYTHONPATH=str(site.folder))
    done = warm.run(*command.split(), code=RUN, env=env, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
