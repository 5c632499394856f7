"""SIGINT, SIGTERM and SIGHUP at every moment of every command: a usual status, no traceback, no leftovers."""

from __future__ import annotations

import json
import re
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
from hal_conformance.opening import subject
from hal_conformance.replay.player import replay
from hal_core import InvalidValue
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests import share

from .commands import LIBRARIES, check_end, environment, heed_interrupts, left_in, start

pytestmark = pytest.mark.long(20)

#: Not hal itself: it is patched where it is imported.
WARM = LIBRARIES
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
PROMPTS = (
    "run",
    "--prompt",
    "def f(",
    "--prompt",
    "import",
    "--temperature=0",
    "--max-tokens",
    "16",
    "--slots",
    "1",
    "--json",
)
#: Sends this process a signal the first time that a module is looked for, or a function called or left.
INJECTED = """
    import functools, importlib.util, os, sys
    kind, where, number = sys.argv[1:4]
    del sys.argv[1:4]
    module, _, function = (where, "", "") if kind == "import" else where.rpartition(".")
    fired = []

    def fire():
        if not fired:
            fired.append(True)
            os.write(2, b"FIRED\\n")
            os.kill(os.getpid(), int(number))

    def around(old):
        @functools.wraps(old)
        def new(*arguments, **options):
            if kind == "call":
                fire()
            try:
                return old(*arguments, **options)
            finally:
                if kind == "return":
                    fire()
        return new

    def patch(owner):
        for name, value in list(vars(owner).items()):
            if name == function and isinstance(value, classmethod):
                setattr(owner, name, classmethod(around(value.__func__)))
            elif name == function and callable(value):
                setattr(owner, name, around(value))
            elif isinstance(value, type) and value.__module__ == module and owner.__name__ == module:
                patch(value)

    class Finder:
        def find_spec(self, name, path, target=None):
            if name != module:
                return None
            sys.meta_path.remove(self)
            if kind == "import":
                return fire()
            spec = importlib.util.find_spec(name)
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda made: (execute(made), patch(made))
            return spec

    sys.meta_path.insert(0, Finder())
    from hal.cli import main
    main()
"""
POINTS = [
    ("import", "hal_core"),
    ("import", "typer"),
    ("import", "numpy"),
    ("import", "paddle"),
    ("import", "paddle.base.core"),
    ("call", "hal.opening.open_device"),
    ("return", "hal.opening.open_device"),
    ("call", "hal_paddle_runner.llama.load"),
    ("return", "hal_engine.transport.open_sink"),
    ("call", "hal_paddle_runner.worker.__init__"),
    ("return", "hal_engine.engine.engine.step"),
    ("return", "hal_engine.cli.run_output.drive"),
    ("call", "hal_engine.transport.acknowledged_sink.close"),
    ("return", "hal_engine.transport.acknowledged_sink.close"),
    ("call", "hal_engine.cli.run_output.summarize"),
    ("return", "hal.cli._main"),
]


#: In ``make test``: the first and the last of each kind of thing that a run holds. Those of imports are whole runs.
AT_HAND = [
    ("import", "hal_core"),
    ("import", "paddle"),
    ("call", "hal.opening.open_device"),
    ("return", "hal_engine.transport.open_sink"),
    ("return", "hal_engine.engine.engine.step"),
    ("call", "hal_engine.transport.acknowledged_sink.close"),
    ("return", "hal.cli._main"),
]


@pytest.mark.parametrize(("kind", "where"), share.cases(POINTS, AT_HAND.__contains__), ids=lambda value: value)
def test_hal_run_ends_in_order_wherever_a_signal_meets_it(tmp_path, warm, kind, where):
    number = SIGNALS[POINTS.index((kind, where)) % len(SIGNALS)]
    forked = None if kind == "import" else warm  # where all is imported, no import is met
    sink = ("--sink", f"ipc://{tmp_path}/none") if "transport" in where else ()
    arguments = (kind, where, str(int(number)), *PROMPTS, *sink)
    process = start(tmp_path, *arguments, code=textwrap.dedent(INJECTED), warm=forked)
    out, err = process.communicate(timeout=120)
    assert "FIRED\n" in err, "the moment was never reached"
    check_end(process.returncode, out, err, number)
    assert left_in(tmp_path) == []
    answers = [json.loads(line) for line in out.splitlines()]
    assert {answer["finish_reason"] for answer in answers} <= {"abort", "length", "stop"}


@pytest.mark.parametrize("number", share.cases(SIGNALS, signal.SIGTERM.__eq__))
def test_in_the_middle_all_answers_are_told_as_far_as_they_have_come(tmp_path, warm, number):
    point = ("return", "hal_engine.engine.engine.step", str(int(number)))
    process = start(tmp_path, *point, *PROMPTS, code=textwrap.dedent(INJECTED), warm=warm)
    out, err = process.communicate(timeout=120)
    check_end(process.returncode, out, err, number)
    assert [json.loads(line)["finish_reason"] for line in out.splitlines()] == ["abort", "abort"]


LOADING = ("call", "hal_paddle_runner.llama.load")
"""Before any call: the recording has none."""
STEPPING = ("return", "hal_engine.engine.engine.step")
RECORDING = [
    LOADING,
    STEPPING,
    ("return", "hal_conformance.replay.recorder._insert"),
    ("call", "hal_conformance.replay.frames._write"),
    ("call", "hal_conformance.replay.recorder.close"),
    ("return", "hal_conformance.replay.frames.close"),
]


@pytest.mark.parametrize(("kind", "where"), share.cases(RECORDING, STEPPING.__eq__))
def test_after_ctrl_c_a_recording_is_replayed_up_to_there(tmp_path, warm, kind, where):
    path = tmp_path / "x.rec"
    arguments = (kind, where, str(int(signal.SIGINT)), *PROMPTS, "--record", str(path))
    process = start(tmp_path, *arguments, code=textwrap.dedent(INJECTED), warm=warm)
    out, err = process.communicate(timeout=120)
    assert "FIRED\n" in err, "the moment was never reached"
    check_end(process.returncode, out, err, signal.SIGINT)
    if (kind, where) == LOADING:
        with pytest.raises(InvalidValue, match=r"magic is missing: no call was recorded \(give a file of"):
            replay(subject("cpu"), path)
        return
    differs, told = replay(subject("cpu"), path)
    assert not differs, told
    if (kind, where) == STEPPING:
        assert re.match(r"[1-9]\d* calls, [1-9]\d* records of ", told)


COMMANDS = {
    "run": PROMPTS,
    "tail": ("tail", "ipc://{folder}/socket"),
    "devices": ("devices",),
    "devices --open": ("devices", "--open"),
    "conform": ("conform", "cpu", "--profile", "quick", "--only", "G25", "--examples", "3"),
    "conform with ranks": ("conform", "cpu", "--profile", "quick", "--only", "G17"),
}


# : Prints when the handlers are installed; before that, the interpreter handles signals.
BEGUN = """
    import os
    from hal.cli import main, signals
    install = signals._install
    def begin():
        former = install()
        signals._install = install
        os.write(2, b"begun\\n")
        return former
    signals._install = begin
    main()
"""


IMPORTS_LONG = ("run", "devices --open", "conform", "conform with ranks")
RANKS = pytest.param("conform with ranks", marks=pytest.mark.conform)


@pytest.mark.drawn
@pytest.mark.parametrize("command", [RANKS if "ranks" in command else command for command in COMMANDS])
def test_at_any_time_there_is_no_traceback_and_nothing_left(command, warm):
    """A property over delays. Signals before the interpreter reaches the command are out of scope."""
    at_any_time(command, 1.2, warm if command in IMPORTS_LONG else None)


@pytest.mark.conform
@pytest.mark.parametrize("command", IMPORTS_LONG)
def test_a_signal_at_any_time_leaves_no_traceback_and_no_files(command):
    at_any_time(command, 6.0, None)


def at_any_time(command, longest, warm):
    @settings(max_examples=share.of(6, 2), deadline=None, phases=[Phase.explicit, Phase.generate])
    @given(st.floats(0.0, longest), st.sampled_from(SIGNALS))
    def check(delay, number):
        with tempfile.TemporaryDirectory(prefix="s-") as name:
            folder = Path(name)
            arguments = [text.format(folder=folder) for text in COMMANDS[command]]
            process = start(folder, *arguments, code=textwrap.dedent(BEGUN), warm=warm)
            assert process.stderr.readline() == "begun\n"
            try:
                out, err = process.communicate(timeout=delay)
            except subprocess.TimeoutExpired:
                process.send_signal(number)
                out, err = process.communicate(timeout=120)
            assert process.returncode in (0, 128 + number), err
            assert "Traceback" not in out + err, out + err
            assert "INTERNALERROR" not in out + err, out + err
            assert "Exception ignored" not in err, err
            assert left_in(folder) == []
            assert not (folder / "socket").exists()

    check()


AT_THE_LAST = """
    import os, signal, sys
    class Last:
        def __del__(self, kill=os.kill, me=os.getpid(), number=int(sys.argv.pop(1))):
            kill(me, number)
    sys.last = Last()
    from hal.cli import main
    main()
"""


@pytest.mark.parametrize("number", share.cases(SIGNALS, signal.SIGHUP.__eq__))
def test_a_signal_while_the_interpreter_goes_changes_nothing(tmp_path, number):
    """By then it has removed the handlers, and every signal would end the process instead of its status."""
    process = start(tmp_path, str(int(number)), "devices", code=textwrap.dedent(AT_THE_LAST))
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "cpu" in out


#: As ``nohup`` and a shell start it, and then the command.
IGNORING = """
    import os, signal
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    os.write(2, b"begun\\n")
    from hal.cli import main
    main()
"""


def test_signals_that_were_ignored_stay_so(tmp_path, warm):
    """``nohup`` and a shell's background jobs."""
    arguments = ("run", "--prompt", "def f(", "--temperature=0", "--max-tokens", "4")
    process = start(tmp_path, *arguments, code=textwrap.dedent(IGNORING), warm=warm)
    assert process.stderr.readline() == "begun\n"
    while process.poll() is None and not select.select([process.stdout], [], [], 0)[0]:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out.startswith("def f(")


IN_PROCESS = """
    import gc, os, signal, sys
    from hal.cli import main, signals
    from hal_engine.timeouts import TIMEOUTS
    before = [signal.getsignal(number) for number in signals._NUMBERS]
    try:
        main(["--version"])
    finally:
        assert [signal.getsignal(number) for number in signals._NUMBERS] == before
    now = [0.0]
    signals.time.monotonic = lambda: now[0]
    ended = []
    signals.os._exit = ended.append
    with signals.watched(to_the_end=False), signals.noted():
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.came() == signal.SIGTERM
        now[0] = TIMEOUTS.second_signal / 2
        os.kill(os.getpid(), signal.SIGHUP)  # a closing terminal's second word
        assert ended == []
        now[0] = TIMEOUTS.second_signal * 2
        os.kill(os.getpid(), signal.SIGINT)
        assert ended == [128 + signal.SIGTERM]
    assert signals.came() is None
    lost = []
    sys.unraisablehook = lost.append
    def collected(phase, _):
        phase == "stop" and os.kill(os.getpid(), signal.SIGTERM)
    gc.callbacks.append(collected)
    with signals.watched(to_the_end=False), signals.raised(KeyboardInterrupt):
        gc.collect()
        gc.callbacks.remove(collected)
        assert signals.came() == signal.SIGTERM
    assert lost == []
    print("fine")
"""


def test_a_second_signal_ends_at_once_unless_it_belongs_to_the_first(tmp_path):
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


SWALLOWED = """
    import os, signal
    from hal_conformance.report import command
    main = command.main
    class Swallows:
        def pytest_runtest_call(self):
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except KeyboardInterrupt:
                pass
    command.main = lambda given, plugins, *more: main(given, [*plugins, Swallows()], *more)
    from hal.cli import main as hal
    hal()
"""


def test_a_signal_that_a_test_of_the_kit_swallows_ends_it_before_the_next(tmp_path, warm):
    arguments = ("conform", "cpu", "--profile", "quick", "--only", "G25,G24")
    process = start(tmp_path, *arguments, code=textwrap.dedent(SWALLOWED), warm=warm)
    out, err = process.communicate(timeout=120)
    check_end(process.returncode, out, err, signal.SIGTERM)
    assert ("!!!" in out, "KeyboardInterrupt" in out, "conforms" in out) == (False, False, False)
    assert out.splitlines()[-1].startswith("  interrupted: "), out
    assert out.splitlines()[-1].endswith(" not run: no verdict")
    reached, not_reached = (line for line in out.splitlines() if line.startswith(("  G24 ", "  G25 ")))
    assert ("not run" in reached, reached.endswith(": not run]")) == (True, True)
    assert not_reached.startswith("  G25  not run every mode")
