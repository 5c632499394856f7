"""Liars run one at a time, each in a separate process: the cause of that process's end is reported with the test's
name.
"""

import os
import signal
import subprocess
import sys
import types

import pytest
from hal_conformance.report.apart import apart
from hal_core.errors import Unavailable, trace_of


def test_the_result_comes_back_and_nothing_of_the_process_is_left():
    parent = os.getpid()
    ended = apart(lambda say: {"pid": os.getpid() != parent, "names": [1, "two"]})
    assert (ended.result, ended.why) == ({"pid": True, "names": [1, "two"]}, "")


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "the process ended with SIGKILL"),
        (lambda: os._exit(7), "the process ended with exit status 7"),
        (lambda: int("no device"), "ValueError: invalid literal for int() with base 10: 'no device'"),
        (lambda: os.closerange(3, 256), "the process ended with exit status 0"),
    ],
    ids=["signal", "exit", "error", "closed files"],
)
def test_what_ends_the_process_is_told_with_what_it_was_doing(end, why, capfd):
    def work(say):
        say(doing="test_one")
        say(doing="test_two")
        end()

    ended = apart(work)
    assert (ended.result, ended.why, ended.doing) == (None, why, "test_two")


def test_work_that_hangs_is_ended_and_shows_where_it_was():
    ended = apart(lambda say: signal.pause(), limit=lambda: 0.2)
    assert (ended.result, ended.late, ended.why) == (None, True, "no sign of progress for 0.2 s")
    assert "test_apart.py" in ended.trace


def test_a_signal_to_the_caller_interrupts_the_work_and_what_it_said_is_kept():
    def work(say):
        say(one=1)
        try:
            signal.pause()
        finally:
            say(cleaned_up=True)

    heard = {}
    ended = apart(work, heard.update, came=lambda: "one" in heard)
    assert (ended.result, ended.late) == (None, False)
    assert heard == {"one": 1, "cleaned_up": True, "interrupted": True}


def test_work_is_not_interrupted_where_its_frame_has_no_line_number():
    def spin():
        while not heard_often:
            pass

    spin = types.FunctionType(spin.__code__.replace(co_linetable=b""), {}, closure=spin.__closure__)
    heard_often = []

    def work(say):
        signal.signal(signal.SIGTERM, counted(signal.getsignal(signal.SIGTERM)))
        say(one=1)
        try:
            spin()
        except KeyboardInterrupt:
            say(where="in it")
            raise
        signal.pause()

    def counted(former):
        def count(number, frame):
            former(number, frame)
            heard_often.append(number)

        return count

    heard = {}
    apart(work, heard.update, came=lambda: "one" in heard)
    assert heard == {"one": 1, "interrupted": True}


def test_an_error_of_hals_comes_back_with_its_traceback():
    def work(say):
        try:
            int("no device")
        except ValueError as error:
            raise Unavailable("it is not here", cure="plug it in") from error

    with pytest.raises(Unavailable, match=r"it is not here \(plug it in\)") as raised:
        apart(work)
    assert "ValueError: invalid literal" in trace_of(raised.value)


def test_an_interrupt_of_the_work_is_one_of_the_caller():
    def work(say):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        apart(work)


LIARS = """
import os, signal, sys
from hal_conformance import liars
from hal_conformance.report.command import Options, run
liars.everyone()

class Ends(liars.Lie):
    @property
    def default_stream(self):
        os.kill(os.getpid(), signal.SIGSEGV)

class Honest(liars.Lie):
    pass

liars.LIARS[:] = [
    liars.Liar("EndsTheProcess", 20, "made here", Ends),
    liars.Liar("Lives", 25, "made here", Honest),
    liars.Liar("CannotBeTold", 25, "made here", Honest, ("can_hold_stream",)),
]
sys.exit(run(Options(device="cpu", liars=True, profile="quick", examples=1)))
"""


def test_a_liar_that_ends_its_process_is_named_and_the_next_one_runs():
    done = subprocess.run([sys.executable, "-c", LIARS], capture_output=True, text=True, timeout=300, check=False)
    rows = {
        cells[1]: cells
        for line in done.stdout.splitlines()
        if len(cells := line.split()) > 2 and cells[0] in ("G20", "G25")
    }
    assert done.returncode == 1, done.stdout + done.stderr
    assert rows["EndsTheProcess"][2] == "crashed"
    assert "SIGSEGV in test_g20_" in " ".join(rows["EndsTheProcess"])
    assert rows["Lives"][2] == "alive"
    assert rows["CannotBeTold"][2] == "skipped"
    assert "2 missed ['EndsTheProcess', 'Lives']" in done.stdout


SKIPPED = """
import sys
from hal_conformance import liars
from hal_conformance.report.command import Options, run
liars.everyone()

class Honest(liars.Lie):
    pass

liars.LIARS[:] = [liars.Liar("TestsAreSkipped", 28, "made here", Honest)]
sys.exit(run(Options(device="cpu", liars=True, profile="quick", examples=1)))
"""


def test_a_liar_whose_own_tests_are_all_skipped_is_no_failure():
    done = subprocess.run([sys.executable, "-c", SKIPPED], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = [line for line in done.stdout.splitlines() if "TestsAreSkipped" in line]
    assert row.split()[2] == "skipped"
    assert "needs async_h2d" in row
