"""A signal ends every command within a stated time, even if its main thread hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from hal_engine.cli.run_output import drive
from hal_engine.timeouts import TIMEOUTS

from hal.cli import signals

from .commands import LIBRARIES, left_in, start

pytestmark = pytest.mark.long(10)
WARM = LIBRARIES

#: Makes a function of the product wait forever, and reports when it does; the deadline is a short one.
HANGING = """
    import ctypes, importlib, os, sys, threading
    import hal.cli, hal_engine.distributed.starting
    from hal_engine.timeouts import TIMEOUTS
    TIMEOUTS.signal = 0.3
    kind, where = sys.argv[1:3]
    del sys.argv[1:3]

    def hangs():
        os.write(1, b"hangs\\n")

    def in_python(*_, **__):
        hangs()
        threading.Event().wait()

    def in_c(*_, **__):
        "No signal ends the wait, and no handler runs. It lets the mutex go once it waits: the other thread tells then."
        mutex, never, library = ctypes.create_string_buffer(64), ctypes.create_string_buffer(64), ctypes.CDLL(None)
        library.pthread_mutex_lock(mutex)
        threading.Thread(target=lambda: (library.pthread_mutex_lock(mutex), hangs()), daemon=True).start()
        library.pthread_cond_wait(never, mutex)

    module, _, path = where.partition(":")
    *owners, name = path.split(".")
    owner = importlib.import_module(module)
    for one in owners:
        owner = getattr(owner, one)
    original = getattr(owner, name)

    def on(*given, **options):
        hangs()
        return original(*given, **options)

    setattr(owner, name, {"c": in_c, "python": in_python, "on": on}[kind])
"""
#: Ranks that are threads of the engine's process: they come up, and never return from their first step; one of the :
#: restarted ranks fails at its start.
RANKS = """
    from tests.distributed.test_start import Actors
    from hal_engine.distributed.steps import StepOrder
    from hal_engine.distributed.control_messages import Failed, Stop

    class Idle(Actors):
        def __init__(self, size, **_):
            super().__init__(*[None] * size)

        def _wait(self, line, rank, wanted):
            if wanted is not Stop:
                return super()._wait(line, rank, wanted)
            while not isinstance(line.receive(60.0), StepOrder):
                pass
            in_python()

        def end(self, patience):
            pass

    class Failing(Idle):
        starts = 0

        def start(self, url):
            Failing.starts += 1
            if Failing.starts > 1:
                in_c()
            self.failed = [Failed(0, "gone"), None]
            super().start(url)

    hal_engine.distributed.starting.LocalLaunch = Failing if "--restart" in sys.argv else Idle
"""
MAIN = "\nhal.cli.main()\n"
PROMPT = ("run", "--device", "cpu", "--prompt", "def f(", "--temperature=0", "--max-tokens", "4")
STATES = {
    "loading": ("c", "hal_paddle_runner.llama:LlamaModel.load", *PROMPT),
    "in a step": ("python", "hal_paddle_runner.runner:ModelRunner.launch", *PROMPT),
    "in a step, in a library": ("c", "hal_paddle_runner.runner:ModelRunner.launch", *PROMPT),
    "closing": (
        "python",
        "hal_engine.transport.acknowledged_sink:AcknowledgedSink.close",
        *PROMPT,
        "--sink",
        "ipc://{}/none",
    ),
    "closing a sink that nobody reads": (
        "on",
        "hal_engine.transport.acknowledged_sink:AcknowledgedSink.close",
        *PROMPT,
        "--sink",
        "ipc://{}/none",
    ),
    "idle": ("c", "hal_engine.reading.reader:OutputReader.read", "tail", "ipc://{}/socket"),
}
ON_RANKS = {
    "a rank hangs in a step": ("--dp", "2"),
    "ranks are started again": ("--dp", "2", "--restart", "1"),
}
FORCED = "hal: ended by force: the signal could not be obeyed in order within 0.3 s\n"


def begin(folder, kind, where, *arguments, code=HANGING, warm=None, **options):
    """Start a command, and wait until it hangs."""
    given = [one.format(folder) for one in arguments]
    process = start(folder, kind, where, *given, code=textwrap.dedent(code) + MAIN, warm=warm, **options)
    assert any(line.endswith("hangs\n") for line in process.stdout), process.communicate()
    return process


def check(process, folder, number=signal.SIGTERM):
    """It ends after one signal, by force, with its status, and leaves nothing behind."""
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, (out, err)
    assert err is None or err.endswith(FORCED)
    assert err is None or "Traceback" not in err
    assert left_in(folder) == []


@pytest.mark.parametrize("state", STATES)
def test_a_command_that_hangs_ends_by_force(tmp_path, warm, state):
    check(begin(tmp_path, *STATES[state], warm=warm), tmp_path)


@pytest.mark.parametrize("state", ON_RANKS)
def test_an_engine_whose_ranks_hang_ends_by_force(tmp_path, warm, state):
    nothing = "on", "hal_engine.cli.run:_message"
    process = begin(tmp_path, *nothing, *PROMPT, *ON_RANKS[state], code=HANGING + RANKS, warm=warm)
    check(process, tmp_path, signal.SIGINT)


def test_neither_a_full_standard_error_nor_output_holds_the_end_up(tmp_path, warm):
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    process = begin(tmp_path, *STATES["in a step"], warm=warm, stderr=writing)
    os.close(writing)
    check(process, tmp_path)
    os.close(reading)


FORKED = """
    import os, signal
    from hal.cli import signals
    from hal_engine.timeouts import TIMEOUTS
    TIMEOUTS.signal = 0.0
    forced = []
    signals._Watch.force = lambda watch, number: forced.append(number)
    with signals.watched(to_the_end=False), signals.noted():
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(signals.came())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == signal.SIGTERM
    assert signal.set_wakeup_fd(-1) == -1
    assert forced == []
    print("fine")
"""


def test_a_signal_to_a_forked_child_does_not_end_its_parent(tmp_path):
    process = start(tmp_path, code=textwrap.dedent(FORKED))
    out, err = process.communicate(timeout=60)
    assert out == "fine\n", err


def test_the_page_names_the_seconds():
    page = Path(__file__).parents[1] / "docs/running.md"
    assert f"within {TIMEOUTS.signal:g} s" in page.read_text(encoding="utf-8")


def test_a_drive_leaves_an_engine_that_does_not_come_to_its_end(monkeypatch):
    """Requests are aborted at once; work that need not wait for the hanging step has half of the time for its end."""
    passed = iter([0.0, 0.0, TIMEOUTS.signal / 2])
    monkeypatch.setattr(signals, "came", lambda: signal.SIGTERM)
    monkeypatch.setattr(signals, "since", lambda: next(passed))
    aborted = []
    engine = SimpleNamespace(busy=True, submit_all=lambda requests: None, abort=aborted.append, step=list)
    plan = SimpleNamespace(requests=[SimpleNamespace(request_id="a")])
    answers = SimpleNamespace(stopped=[], break_off=lambda: aborted.append("the text"))
    drive(engine, plan, answers, SimpleNamespace(error=None))
    assert aborted == ["the text", "a"]
    assert list(passed) == []
