"""The command line of the kit: ``python -m hal_conformance NAME``, and the implementation of ``hal conform``."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from .options import Options, arguments

if TYPE_CHECKING:
    import pytest

EMBEDDED = "cpu"
"""The device in every core, used to test the kit itself (``--liars``) unless another is named."""


def run(options: Options, plugins: Sequence[object] = ()) -> int:
    """Run the kit, or its liars, and print the report; return 0 if the device conforms (or every liar was killed).

    ``plugins`` are pytest plugins of the caller, for the run of the kit.
    """
    try:
        return _run(options, plugins)
    except KeyboardInterrupt:
        print("hal conform: interrupted", file=sys.stderr)
        return INTERRUPTED


def _run(options: Options, plugins: Sequence[object]) -> int:
    absent = [name for name in ("pytest", "hypothesis") if find_spec(name) is None]
    if absent:
        what = f"{' and '.join(absent)} not installed (pip install 'hypothesis>=6.127' 'pytest>=8.3')"
        print(f"hal conform: error: {what}", file=sys.stderr)
        return 2
    import pytest

    _check(options)
    if options.liars:
        return _run_liars(options)
    if options.replay:
        return _replay(options)
    with tempfile.TemporaryDirectory(prefix="hal-conform-") as folder:
        report = Path(folder, "report.json")
        if not options.json:
            endings = Endings()
            with Witness() as witness:
                chosen = [*arguments(options), "--tb=short", "-q", "-rN"]
                status = int(pytest.main(chosen, plugins=[witness, endings, *plugins]))
            endings.tell(print)
            if endings.why:
                print(f"hal conform: error: {endings.why}", file=sys.stderr)
            return status
        noise, endings = io.StringIO(), Endings()
        with contextlib.redirect_stdout(noise), Witness() as witness:
            chosen = arguments(options.but(data=str(report)))
            status = int(pytest.main([*chosen, "--tb=no", "-q"], plugins=[witness, endings, *plugins]))
        if endings.why:
            print(f"hal conform: error: {endings.why}", file=sys.stderr)
        if endings.interrupted and not report.exists():
            raise KeyboardInterrupt
        if not report.exists():
            print(noise.getvalue(), file=sys.stderr)
            return status or 2
        print(report.read_text(encoding="utf-8"))
        return status


INTERRUPTED = 2
"""pytest's own exit status for an interrupt."""


class Endings:
    """A pytest plugin that reports why a run has ended early, in place of pytest's banner: an interrupt, or a device
    that was not opened."""

    def __init__(self) -> None:
        self._config: pytest.Config | None = None
        self.interrupted, self.why = False, ""

    def pytest_configure(self, config: pytest.Config) -> None:
        """Keep the configuration."""
        self._config = config

    def pytest_runtest_logstart(self) -> None:
        """Leave the failures of tests to the report, which has each once. Errors of collection pytest prints."""
        assert self._config is not None
        self._config.option.tbstyle = "no"

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Remove pytest's own reporter, which would print the banner. It stays where pytest stops by itself:
        only it prints errors of collection."""
        import pytest

        assert self._config is not None
        if excinfo.errisinstance(pytest.Session.Interrupted):
            return
        self.interrupted = excinfo.errisinstance(KeyboardInterrupt)
        self.why = "" if self.interrupted else str(excinfo.value)
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            self._config.pluginmanager.unregister(reporter)

    def tell(self, write: Callable[[str], None]) -> None:
        """Write the report after an interrupt, below pytest's line of dots. Raise the interrupt if no report was made
        yet."""
        from .key import KEY

        if self.interrupted:
            assert self._config is not None
            write("")
            recorder = self._config.stash.get(KEY, None)
            if recorder is None or not recorder.device:
                raise KeyboardInterrupt
            recorder.summarize(write)


class Witness:
    """A pytest plugin that names the running test on standard error when the process crashes, or hangs.

    The process itself cannot do that. Another process does: it receives each test's name through a pipe and sees the
    pipe end. Data in the pipe outlives a crash.
    """

    def __enter__(self) -> Witness:
        command = [sys.executable, "-I", "-S", "-c", _WITNESS, str(SILENCE)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0, start_new_session=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:  # a process forked meanwhile holds the pipe open
            self._process.kill()
            self._process.wait()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note the begin of a test."""
        self._tell(nodeid.rpartition("::")[2])

    def pytest_runtest_logfinish(self) -> None:
        """Note the end of a test."""
        self._tell("")

    def pytest_sessionfinish(self) -> None:
        """Note the end of all tests, perhaps by an interrupt."""
        self._tell("")

    def _tell(self, test: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the witness was ended from outside
            self._process.stdin.write(f"{test}\n".encode())


SILENCE = 60.0
"""Seconds after which a running test is named."""
_WITNESS = """
import os, select, sys
limit, rest, test, told = float(sys.argv[1]), b"", "", False
while True:
    if not select.select([0], [], [], limit if test and not told else None)[0]:
        told = True
        print(f"hal conform: {test} has been running for {limit:g} s", file=sys.stderr, flush=True)
    elif not (data := os.read(0, 65536)):
        break
    else:
        *lines, rest = (rest + data).split(b"\\n")
        if lines:
            test, told = lines[-1].decode(), False
if test:
    print(f"hal conform: the process ended while {test} was running", file=sys.stderr, flush=True)
"""


def _check(options: Options) -> None:
    """Raise with the cure for impossible options, before the run."""
    from ..draw.fields import declared_at
    from ..liars.faults import named
    from ..opening import liar_at, subject
    from .report import check_target, chosen

    chosen(options.only)
    for option in ("html", "report"):
        if path := getattr(options, option):
            check_target(path, f"--{option}")
    if options.liar:
        liar_at(options.liar)  # only checked: some liars take effect when they are made
    if options.fields:
        declared_at(options.fields)
    if options.fault:
        named(options.fault)
    if not options.liars:  # each liar's process finds the device: a driver that a probe has started survives no fork
        subject(options.device, factory=options.device_factory, policy=options.policy, target=options.target)


def _run_liars(options: Options) -> int:
    from .running import COLUMNS, Tally, Verdict, as_json, begun, document, ended, row, run

    def begin(verdict: Verdict) -> None:
        if not options.json:
            print(begun(row(verdict)), end="", flush=True)

    def tell(verdict: Verdict) -> None:
        if not options.json:
            print(ended(row(verdict)), flush=True)

    if not options.json:
        print(begun(COLUMNS) + ended(COLUMNS), flush=True)
    tally = Tally(run(options, begin, tell), laddered=not options.profile)
    for target in filter(None, (options.html, options.report)):
        try:
            Path(target).write_text(document(tally, html=target.endswith((".html", ".htm"))), encoding="utf-8")
        except OSError as error:  # the disk is full, or the folder was removed meanwhile
            print(f"hal conform: error: {target!r} was not written: {error.strerror}", file=sys.stderr)
            return 1
    print(json.dumps(as_json(tally.verdicts), indent=2) if options.json else "\n".join(tally.lines()))
    return 0 if tally.ok else 1


def _replay(options: Options) -> int:
    from ..opening import subject
    from ..replay.player import replay

    names = {name: getattr(options, name) for name in ("policy", "liar", "fault", "target")}
    device = subject(options.device, factory=options.device_factory, **names)
    try:
        differs, text = replay(device, options.replay)
    finally:
        device.undo()
    print(f"{device.name}: {text}")
    return int(differs)


def _at_least(least: int) -> Callable[[str], int]:
    """Return the type of an option that is a count."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return number

    return read


def _seconds(text: str) -> float:
    """Return a duration."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} are not seconds above 0")
    return seconds


_OF_TESTS = {"json", "html", "report", "examples", "hang", "seed", "only", "profile", "fields", "liars"}
"""Options that a replay does not use."""


class _Parser(argparse.ArgumentParser):
    """A parser that names the option which a mistyped one is close to."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and one line."""
        if message.startswith(unknown := "unrecognized arguments: "):
            mistyped = message.removeprefix(unknown).partition("=")[0].split()[0]
            close = difflib.get_close_matches(mistyped, self._option_string_actions, 1)
            cure = f"did you mean {close[0]}?" if close else f"{self.prog} -h lists the options"
            message = f"{mistyped}: no such option ({cure})"
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(
    given: Sequence[str] | None = None, plugins: Sequence[object] = (), find: Callable[[str], str] | None = None
) -> int:
    """Run the command. ``plugins``: see :func:`run`.

    ``find``: the caller's discovery. It returns the value of a device's entry point, or raises :class:`HalError` for a
    refused one. Without it, any device installed under the name is tested.
    """
    parser = _Parser("hal conform", description="Check that a device keeps the contract of hal.", allow_abbrev=False)
    parser.add_argument("device", nargs="?", default="", help="device name, as hal devices lists it")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--html", default="", metavar="FILE", help="write the report as HTML")
    parser.add_argument("--report", default="", metavar="FILE", help="write the report; .json or .html")
    parser.add_argument("--examples", type=_at_least(1), default=0, metavar="N", help="examples a property")
    parser.add_argument("--seed", type=_at_least(0), metavar="N", help="seed of everything that is drawn")
    parser.add_argument("--only", default="", metavar="G3,G15", help="only these guarantees")
    names = ["quick", "default", "nightly"]
    parser.add_argument("--profile", default="", choices=names, metavar="|".join(names), help="how thorough")
    parser.add_argument("--policy", default="", metavar="MODULE:ATTR", help="another Policy class or object")
    parser.add_argument("--device-factory", default="", metavar="MODULE:ATTR", help="callable that opens the device")
    parser.add_argument("--liar", default="", metavar="NAME", help="lay a liar over it: NAME, or MODULE:CLASS")
    parser.add_argument("--fault", default="", metavar="NAME", help="run the device under one of the kit's faults")
    parser.add_argument(
        "--hang", type=_seconds, default=0.0, metavar="SECONDS", help="without progress, after which a call waits (10)"
    )
    parser.add_argument("--fields", default="", metavar="MODULE:ATTR", help="a worker's StateFields, not drawn ones")
    parser.add_argument("--liars", action="store_true", help="test the kit: every liar must be killed")
    parser.add_argument("--replay", default="", metavar="FILE", help="replay a recording of hal run --record")
    found = vars(parser.parse_args(given))
    if found["liars"] and not found["device"] and not found["device_factory"]:
        found["device"] = EMBEDDED
    if found["html"] and not found["html"].endswith((".html", ".htm")):
        parser.error("--html FILE: name it .html; other names are written as JSON, by --report")
    if not found["device"] and not found["device_factory"]:
        parser.error("name a device, or give --device-factory")
    own = {name for name, value in found.items() if value != parser.get_default(name)}
    if found["replay"] and (useless := own & _OF_TESTS):
        parser.error(f"--{min(useless)}: --replay makes the calls of a recording and runs no test (leave it out)")
    if find is not None and not found["device_factory"]:
        found["target"] = find(found["device"])
    return run(Options(**found), plugins)
