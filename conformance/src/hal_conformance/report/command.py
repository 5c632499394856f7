"""The command line of the kit: ``python -m hal_conformance NAME``, and the implementation of ``hal conform``."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hal_core.errors import PluginError

from .options import Options

if TYPE_CHECKING:
    from .apart import Say

EMBEDDED = "cpu"
"""The device in every core, used to test the kit itself (``--liars``) unless another is named."""


def run(
    options: Options,
    plugins: Sequence[object] = (),
    find: Callable[[str], str] | None = None,
    came: Callable[[], object] | None = None,
) -> int:
    """Run the kit, or its liars, and print the report; return 0 if the device conforms (or every liar was killed).

    ``plugins`` are pytest plugins of the caller, for the run of the kit. ``find``, ``came``: see :func:`main`.
    """
    absent = [name for name in ("pytest", "hypothesis") if find_spec(name) is None]
    if absent:
        what = f"{' and '.join(absent)} not installed (pip install 'hypothesis>=6.127' 'pytest>=8.3')"
        print(f"hal conform: error: {what}", file=sys.stderr)
        return 2
    from .apart import noted

    try:
        with nullcontext(came) if came else noted() as signalled:
            return _run(options, plugins, find, signalled)
    except KeyboardInterrupt:
        print("hal conform: interrupted", file=sys.stderr)
        return INTERRUPTED


def _run(
    options: Options,
    plugins: Sequence[object],
    find: Callable[[str], str] | None,
    came: Callable[[], object],
) -> int:
    from .findings import check_target

    for option, targets in (("html", filter(None, [options.html])), ("report", options.report)):
        for target in targets:
            check_target(target, f"--{option}")

    def prepare() -> Options:
        """In the process of the device alone, as a driver that a probe has started survives no fork."""
        named = find is not None and not options.device_factory
        found = options.but(target=find(options.device)) if named and find else options
        _check(found)
        return found

    if options.liars:
        return _run_liars(options.but(target=_apart(lambda _: prepare().target, came)), came)
    if options.replay:
        differs, text = _apart(lambda _: _replay(prepare()), came)
        print(text)
        return int(differs)
    from .supervisor import Supervisor

    return Supervisor(options, prepare, plugins, came).run()


def _apart(work: Callable[[Say], Any], came: Callable[[], object]) -> Any:  # noqa: ANN401 (what the work returns)
    """Return what a process of its own returns."""
    from .apart import apart

    ended = apart(work, came=came)
    if came():
        raise KeyboardInterrupt
    if ended.result is None:
        raise PluginError(ended.why, cure="mend the plugin, or its driver")
    return ended.result


INTERRUPTED = 2
"""pytest's own exit status for an interrupt."""


def _check(options: Options) -> None:
    """Raise with the cure for impossible options, before the run."""
    from ..draw.fields import declared_at
    from ..liars.faults import named
    from ..opening import liar_at, subject
    from .report import chosen

    chosen(options.only)
    if options.liar:
        liar_at(options.liar)  # only checked: some liars take effect when they are made
    if options.fields:
        declared_at(options.fields)
    if options.fault:
        named(options.fault)
    if not options.liars:  # each liar's process finds the device: a driver that a probe has started survives no fork
        subject(options.device, factory=options.device_factory, policy=options.policy, target=options.target)


def _run_liars(options: Options, came: Callable[[], object]) -> int:
    from .running import COLUMNS, Tally, Verdict, as_json, begun, document, ended, row, run

    def begin(verdict: Verdict) -> None:
        if not options.json:
            print(begun(row(verdict)), end="", flush=True)

    def tell(verdict: Verdict) -> None:
        if not options.json:
            print(ended(row(verdict)), flush=True)

    if not options.json:
        print(begun(COLUMNS) + ended(COLUMNS), flush=True)
    tally = Tally(run(options, begin, tell, came), laddered=not options.profile)
    for target in options.targets:
        try:
            Path(target).write_text(document(tally, html=target.endswith((".html", ".htm"))), encoding="utf-8")
        except OSError as error:  # the disk is full, or the folder was removed meanwhile
            print(f"hal conform: error: {target!r} was not written: {error.strerror}", file=sys.stderr)
            return 1
    print(json.dumps(as_json(tally.verdicts), indent=2) if options.json else "\n".join(tally.lines()))
    return 0 if tally.ok else 1


def _replay(options: Options) -> tuple[bool, str]:
    from ..opening import subject
    from ..replay.player import replay

    names = {name: getattr(options, name) for name in ("policy", "liar", "fault", "target")}
    device = subject(options.device, factory=options.device_factory, **names)
    try:
        differs, text = replay(device, options.replay)
    finally:
        device.undo()
    return differs, f"{device.name}: {text}"


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


_OF_TESTS = {"json", "html", "report", "examples", "hang", "seed", "skip", "only", "profile", "fields", "liars"}
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
    given: Sequence[str] | None = None,
    plugins: Sequence[object] = (),
    find: Callable[[str], str] | None = None,
    came: Callable[[], object] | None = None,
) -> int:
    """Run the command. ``plugins``: see :func:`run`.

    ``find``: the caller's discovery. It returns the value of a device's entry point, or raises :class:`HalError` for a
    refused one. Without it, any device installed under the name is tested. ``came``: returns the signal that the caller
    has noted, if one came; without it, signals are noted here.
    """
    parser = _Parser("hal conform", description="Check that a device keeps the contract of hal.", allow_abbrev=False)
    parser.add_argument("device", nargs="?", default="", help="device name, as hal devices lists it")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--html", default="", metavar="FILE", help="write the report as HTML")
    text = "write the report; .json, .xml (JUnit) or .html; repeatable"
    parser.add_argument("--report", action="append", default=[], metavar="FILE", help=text)
    parser.add_argument("--skip", action="append", default=[], metavar="NAME", help="leave a test out; repeatable")
    parser.add_argument("--examples", type=_at_least(1), default=0, metavar="N", help="examples a property")
    parser.add_argument("--seed", type=_at_least(0), metavar="N", help="seed of everything that is drawn")
    parser.add_argument("--only", default="", metavar="G3,G15", help="only these guarantees")
    names = ["quick", "default", "nightly"]
    parser.add_argument("--profile", default="", choices=names, metavar="|".join(names), help="how thorough")
    parser.add_argument("--policy", default="", metavar="MODULE:ATTR", help="another Policy class or object")
    text = "callable that opens the device; its attribute support is a Support"
    parser.add_argument("--device-factory", default="", metavar="MODULE:ATTR", help=text)
    parser.add_argument("--liar", default="", metavar="NAME", help="lay a liar over it: NAME, or MODULE:CLASS")
    parser.add_argument("--fault", default="", metavar="NAME", help="run the device under one of the kit's faults")
    parser.add_argument(
        "--hang",
        type=_seconds,
        default=0.0,
        metavar="SECONDS",
        help="without progress, after which a call waits (10; below 2 honest ones too); a test hangs after 30 times it",
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
    found |= {name: tuple(found[name]) for name in ("report", "skip")}
    return run(Options(**found), plugins, find, came)
