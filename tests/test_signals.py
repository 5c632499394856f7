"""SIGINT, SIGTERM and SIGHUP at every moment of every command: its status, in time, no traceback, no leftovers."""

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM
from types import SimpleNamespace

import pytest
from hal_conformance.opening import subject
from hal_conformance.replay.player import replay
from hal_core import InvalidValue
from hal_engine.cli.run_output import drive
from hal_engine.timeouts import TIMEOUTS
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hal.cli import signals

from . import share
from .commands import LIBRARIES, check_end, environment, heed_interrupts, left_in, start

pytestmark = pytest.mark.long(30)

#: Not hal itself: it is patched where it is imported.
WARM = LIBRARIES
SIGNALS = [SIGINT, SIGTERM, SIGHUP]
RUN = ("run", "--prompt", "def f(", "--temperature=0", "--max-tokens", "4")
TWO = ("run", "--prompt", "def f(", "--prompt", "import", "--temperature=0", "--max-tokens", "16")
TWO += ("--slots", "1", "--json")
SINK = ("--sink", "ipc://{}/none")
RECORD = ("--record", "{}/x.rec")


def started(folder, function, *arguments, warm=None, **options):
    """Start a command through a function of ``tests/signalled.py``."""
    given = [one.format(folder) for one in arguments]
    return start(folder, *given, code=f"from tests.signalled import {function}; {function}()", warm=warm, **options)


LOAD = ("call", "hal_paddle_runner.loading.load_model")
STEP = ("return", "hal_engine.engine.engine.step")
CLOSE = ("call", "hal_engine.transport.acknowledged_sink.close")
MOMENTS = [
    # whole runs: where all is imported, no import is met
    (SIGINT, "import", "hal_core", ()),
    (SIGTERM, "import", "typer", ()),
    (SIGHUP, "import", "numpy", ()),
    (SIGINT, "import", "paddle", ()),
    (SIGTERM, "import", "paddle.base.core", ()),
    (SIGTERM, "return", "paddle.base.core.init_devices", SINK),  # it has replaced the handler by one that dumps a stack
    # forks of a process that has imported the libraries
    (SIGHUP, "call", "hal.opening.open_device", ()),
    (SIGINT, "return", "hal.opening.open_device", ()),
    (SIGTERM, *LOAD, ()),
    (SIGHUP, "return", "hal_engine.transport.open_sink", SINK),
    (SIGINT, "call", "hal_paddle_runner.runner.__init__", ()),
    *((number, *STEP, ()) for number in SIGNALS),
    (SIGHUP, "return", "hal_engine.cli.run_output.drive", ()),
    (SIGINT, *CLOSE, SINK),
    (SIGTERM, "return", "hal_engine.transport.acknowledged_sink.close", SINK),
    (SIGHUP, "call", "hal_engine.cli.run_output.summarize", ()),
    (SIGINT, "return", "hal.cli._main", ()),
    # what is recorded is replayed; before any call there is nothing
    (SIGINT, *LOAD, RECORD),
    (SIGINT, *STEP, RECORD),
    (SIGINT, "return", "hal_conformance.replay.recorder._insert", RECORD),
    (SIGINT, "call", "hal_conformance.replay.frames._write", RECORD),
    (SIGINT, "call", "hal_conformance.replay.recorder.close", RECORD),
    (SIGINT, "return", "hal_conformance.replay.frames.close", RECORD),
]
#: In ``make test``: the first and the last of each kind of thing that a run holds.
AT_HAND = [
    MOMENTS[0],
    (SIGTERM, "return", "paddle.base.core.init_devices", SINK),
    (SIGHUP, "call", "hal.opening.open_device", ()),
    (SIGHUP, "return", "hal_engine.transport.open_sink", SINK),
    (SIGTERM, *STEP, ()),
    (SIGINT, *CLOSE, SINK),
    (SIGINT, "return", "hal.cli._main", ()),
    (SIGINT, *STEP, RECORD),
]


@pytest.mark.parametrize(("number", "kind", "where", "options"), share.cases(MOMENTS, AT_HAND.__contains__))
def test_hal_run_ends_in_order_wherever_a_signal_meets_it(tmp_path, warm, number, kind, where, options):
    forked = None if kind == "import" or where.startswith("paddle") else warm
    limit = {"HAL_SECONDS_SIGNAL": "1"} if (kind, where) == CLOSE else {}  # a sink that nobody reads is given up then
    env = environment(tmp_path, **limit)
    process = started(tmp_path, "main", str(int(number)), kind, where, *TWO, *options, warm=forked, env=env)
    out, err = process.communicate(timeout=120)
    assert "sent\n" in err, "the moment was never reached"
    check_end(process.returncode, out, err, number)
    assert left_in(tmp_path) == []
    reasons = [json.loads(line)["finish_reason"] for line in out.splitlines()]
    assert {*reasons} <= {"abort", "length", "stop"}
    if (kind, where) == STEP:
        assert reasons == ["abort", "abort"], "all answers are shown as far as they have come"
    if options != RECORD:
        return
    if (kind, where) == LOAD:
        with pytest.raises(InvalidValue, match=r"magic is missing: no call was recorded \(give a file of"):
            replay(subject("cpu"), tmp_path / "x.rec")
        return
    differs, summary = replay(subject("cpu"), tmp_path / "x.rec")
    assert not differs, summary
    if (kind, where) == STEP:
        assert re.match(r"[1-9]\d* calls, [1-9]\d* records of ", summary)


STATES = {
    "loading": ("python", *LOAD, *RUN),
    "loading, in a library": ("c", *LOAD, *RUN),
    "in a step": ("python", "call", "hal_paddle_runner.runner.launch", *RUN),
    "in a step, in a library": ("c", "call", "hal_paddle_runner.runner.launch", *RUN),
    "closing": ("python", *CLOSE, *RUN, *SINK),
    "closing a sink that nobody reads": ("tell", *CLOSE, *RUN, *SINK),
    "a tail that waits": ("c", "call", "hal_engine.reading.reader.read", "tail", "ipc://{}/socket"),
    "a rank hangs in a step": ("ranks tell", "call", "hal_engine.cli.run._message", *RUN, "--dp", "2"),
    "ranks are started again": (
        "ranks tell",
        "call",
        "hal_engine.cli.run._message",
        *RUN,
        "--dp",
        "2",
        "--restart",
        "1",
    ),
}
FORCED = "hal: ended by force: the signal could not be obeyed in order within 0.3 s\n"


def check_end_of_hanging(process, folder, number, *, is_forced=True):
    """Once it hangs, it ends after one signal, with its status, and leaves nothing behind."""
    assert any(line.endswith("hangs\n") for line in process.stdout), process.communicate()
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, (out, err)
    assert err is None or (err.endswith(FORCED) if is_forced else "force" not in err)
    assert err is None or "Traceback" not in err
    assert left_in(folder) == []


@pytest.mark.parametrize("state", STATES)
def test_a_command_that_hangs_ends_by_force(tmp_path, warm, state):
    """Where there is nothing to wait for, it ends at once."""
    process = started(tmp_path, "main", *STATES[state], warm=warm)
    number = SIGINT if "rank" in state else SIGTERM
    check_end_of_hanging(process, tmp_path, number, is_forced=state != "loading")


def full_pipe():
    """A pipe that takes nothing until it is read."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    return reading, writing


def test_neither_a_full_standard_error_nor_output_holds_the_end_up(tmp_path, warm):
    reading, writing = full_pipe()
    process = started(tmp_path, "main", *STATES["in a step"], warm=warm, stderr=writing)
    os.close(writing)
    check_end_of_hanging(process, tmp_path, SIGTERM)
    os.close(reading)


SENDING = """
    import sys
    import numpy as np
    from hal_core.output.records import OutputRecord
    from hal_engine.transport import open_sink

    class Output:
        step = 0
        def resolve(self):
            one = np.ones(1, np.uint8)
            return OutputRecord(0, ("req",), one, one, np.array([0]), one.astype("i4"), np.array([7]), one < 0)
        def complete(self, error):
            pass

    sink = open_sink(sys.argv[1], heartbeat=0.05)
    sink.put(Output())
    sink.close(60)
"""


def end_unread(folder, *arguments, warm=None, senders=()):
    """A command whose output is full and unread ends all the same at SIGTERM."""
    reading, writing = full_pipe()
    process = start(folder, *arguments, stdout=writing, warm=warm)
    os.close(writing)
    others = [start(folder, *rest, code=textwrap.dedent(code)) for code, *rest in senders]
    tasks = Path(f"/proc/{process.pid}/task")
    while not any("pipe" in (task / "wchan").read_text() for task in tasks.iterdir()):  # until it waits for its reader
        assert process.poll() is None
        assert all(one.poll() is None for one in others)
        time.sleep(0.01)
    process.send_signal(SIGTERM)
    _, err = process.communicate(timeout=120)
    os.close(reading)
    check_end(process.returncode, "", err, SIGTERM)
    return others


def test_a_run_whose_output_nobody_reads_ends_all_the_same(tmp_path, warm):
    end_unread(tmp_path, *RUN, warm=warm)
    assert left_in(tmp_path) == []


def test_a_tail_whose_output_nobody_reads_ends_and_the_record_comes_again(tmp_path):
    url = f"ipc://{tmp_path}/socket"
    (worker,) = end_unread(tmp_path, "tail", url, senders=[(SENDING, url)])
    again = start(tmp_path, "tail", url, "--timeout", "60")
    out, _ = again.communicate(timeout=120)
    worker.communicate(timeout=60)
    assert worker.returncode == 0
    assert "req  at 0: 7" in out


def test_a_tail_that_listens_is_ended_by_an_interrupt_with_its_counts(tmp_path):
    process = start(tmp_path, "tail", f"ipc://{tmp_path}/socket")
    while not (tmp_path / "socket").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "")
    assert err.startswith("hal tail: 0 frames")
    assert not (tmp_path / "socket").exists()


COMMANDS = {
    "run": TWO,
    "tail": ("tail", "ipc://{}/socket"),
    "devices": ("devices",),
    "devices --open": ("devices", "--open"),
    "conform": ("conform", "cpu", "--profile", "quick", "--only", "G25", "--examples", "3"),
    "conform with ranks": ("conform", "cpu", "--profile", "quick", "--only", "G17"),
}
LONG = ("run", "devices --open", "conform", "conform with ranks")
DELAYS = [(command, 1.2, command in LONG) for command in COMMANDS] + [(command, 6.0, False) for command in LONG]


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("command", "longest", "is_warm"), share.cases(DELAYS, lambda row: row[1] < 2 and "ranks" not in row[0])
)
def test_at_any_time_there_is_no_traceback_and_nothing_left(command, longest, is_warm, warm):
    """A property over delays. Signals before the interpreter reaches the command are out of scope."""

    @settings(max_examples=share.of(6, 2), deadline=None, phases=[Phase.explicit, Phase.generate])
    @given(st.floats(0.0, longest), st.sampled_from(SIGNALS))
    def check(delay, number):
        with tempfile.TemporaryDirectory(prefix="s-") as name:
            folder = Path(name)
            process = started(folder, "begin", *COMMANDS[command], warm=warm if is_warm else None)
            assert process.stderr.readline() == "begun\n"
            try:
                out, err = process.communicate(timeout=delay)
            except subprocess.TimeoutExpired:
                process.send_signal(number)
                out, err = process.communicate(timeout=120)
            assert process.returncode in (0, 128 + number), err
            for word in ("Traceback", "INTERNALERROR", "Exception ignored"):
                assert word not in out + err, out + err
            assert left_in(folder) == []
            assert not (folder / "socket").exists()

    check()


@pytest.mark.parametrize("number", share.cases(SIGNALS, SIGHUP.__eq__))
def test_a_signal_while_the_interpreter_goes_changes_nothing(tmp_path, number):
    """By then it has removed the handlers, and every signal would end the process instead of its status."""
    process = started(tmp_path, "last", str(int(number)), "devices")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "cpu" in out


def test_signals_that_were_ignored_stay_so(tmp_path, warm):
    """``nohup`` and a shell's background jobs."""
    process = started(tmp_path, "ignoring", *RUN, warm=warm)
    assert process.stderr.readline() == "begun\n"
    while process.poll() is None and not select.select([process.stdout], [], [], 0)[0]:
        process.send_signal(SIGHUP)
        process.send_signal(SIGINT)
        time.sleep(0.01)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out.startswith("def f(")


def test_a_signal_that_a_test_of_the_kit_swallows_ends_it_before_the_next(tmp_path, warm):
    arguments = ("conform", "cpu", "--profile", "quick", "--only", "G25,G24")
    process = started(tmp_path, "swallowing", *arguments, warm=warm)
    out, err = process.communicate(timeout=120)
    check_end(process.returncode, out, err, SIGTERM)
    assert ("!!!" in out, "KeyboardInterrupt" in out, "conforms" in out) == (False, False, False)
    assert out.splitlines()[-1].startswith("  interrupted: "), out
    assert out.splitlines()[-1].endswith(" not run, 26 not chosen (--only): no verdict")
    reached, not_reached = (line for line in out.splitlines() if line.startswith(("  G24 ", "  G25 ")))
    assert ("not run" in reached, reached.endswith(": not run]")) == (True, True)
    assert not_reached.startswith("  G25  not run every mode")


IN_PROCESS = """
    import ctypes, gc, os, signal, sys, time
    from hal.cli import main, signals
    from hal_engine.timeouts import TIMEOUTS
    me, before = os.getpid(), [signal.getsignal(number) for number in signals.NUMBERS]
    try:
        main(["--version"])
    finally:
        assert [signal.getsignal(number) for number in signals.NUMBERS] == before

    # What was noted is raised by the next stage that does not note it.
    with signals.watched(to_the_end=False), signals.noted():
        os.kill(me, signal.SIGTERM)
        for stage, kind in ((signals.at_once(), signals.Interrupted), (signals.raised(KeyError), KeyError)):
            try:
                with stage:
                    raise AssertionError
            except kind:
                pass

    # A library's handler is replaced again.
    library = ctypes.CDLL(None)
    with signals.watched(to_the_end=False), signals.noted():
        with signals.held():
            library.signal(signal.SIGTERM, 0)
            os.kill(me, signal.SIGTERM)
            while signals.came() is None:
                time.sleep(0)
        os.kill(me, signal.SIGTERM)

    # A second signal ends the process at once, unless it belongs to the first.
    now, ended = [0.0], []
    signals.time.monotonic = lambda: now[0]
    signals.os._exit = ended.append
    with signals.watched(to_the_end=False), signals.noted():
        os.kill(me, signal.SIGTERM)
        assert signals.came() == signal.SIGTERM
        now[0] = TIMEOUTS.second_signal / 2
        os.kill(me, signal.SIGHUP)  # a closing terminal's second word
        assert ended == []
        now[0] = TIMEOUTS.second_signal * 2
        os.kill(me, signal.SIGINT)
        assert ended == [128 + signal.SIGTERM]
    assert signals.came() is None

    # In a callback of the garbage collector the exception would be lost: the signal is noted.
    lost = []
    sys.unraisablehook = lost.append
    def collected(phase, _):
        phase == "stop" and os.kill(me, signal.SIGTERM)
    gc.callbacks.append(collected)
    with signals.watched(to_the_end=False), signals.raised(KeyboardInterrupt):
        gc.collect()
        gc.callbacks.remove(collected)
        assert signals.came() == signal.SIGTERM
    assert lost == []

    # A signal to a forked child does not end its parent.
    TIMEOUTS.signal, forced = 0.0, []
    signals.os._exit = forced.append
    with signals.watched(to_the_end=False), signals.noted():
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGTERM)
            os.execv("/bin/sh", ["sh", "-c", f"exit {signals.came()}"])
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == signal.SIGTERM
    assert signal.set_wakeup_fd(-1) == -1
    assert forced == []
    print("fine")
"""


def test_handlers_in_a_process_that_goes_on(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(IN_PROCESS)],
        capture_output=True,
        text=True,
        env=environment(tmp_path),
        preexec_fn=heed_interrupts,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["fine"], done.stderr


def test_the_page_names_the_seconds():
    page = Path(__file__).parents[1] / "docs/running.md"
    assert f"within {TIMEOUTS.signal:g} s" in page.read_text(encoding="utf-8")


def test_a_drive_leaves_an_engine_that_does_not_come_to_its_end(monkeypatch):
    """Requests are aborted at once; work that need not wait for the hanging step has half of the time for its end."""
    passed = iter([0.0, 0.0, TIMEOUTS.signal / 2])
    monkeypatch.setattr(signals, "came", lambda: SIGTERM)
    monkeypatch.setattr(signals, "since", lambda: next(passed))
    aborted = []
    engine = SimpleNamespace(busy=True, submit_all=lambda requests: None, abort=aborted.append, step=list)
    plan = SimpleNamespace(requests=[SimpleNamespace(request_id="a")])
    answers = SimpleNamespace(stopped=[], break_off=lambda: aborted.append("the text"))
    drive(engine, plan, answers, SimpleNamespace(error=None))
    assert aborted == ["the text", "a"]
    assert list(passed) == []
