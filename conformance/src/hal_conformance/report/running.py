"""Runs of every liar against the tests of its own guarantee: one of them must kill it, by assertion.

Each runs in its own process, one after the other, and is named before it begins. If a liar ends its process, as one on
a native device may, it is reported as crashed, and the next one runs.

Unless a profile is given, each liar is tried with quick, and the survivors with default: quick must kill at least
:data:`SHARE` of them, and default the rest.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from functools import partial
from html import escape
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from hal_core.errors import PluginError

from ..kit import Effort, Kit
from ..liars import Liar, everyone
from ..opening import subject
from ..ranks.pool import release
from .apart import Say, apart
from .key import KEY
from .options import Options, arguments
from .report import Recorder, bears, chosen

KILLS = "AssertionError"
HANG = 2.0
"""Seconds without progress after which a liar's call counts as waiting for a held stream, without ``--hang``; some do,
so the runs wait this long."""


LIMIT = 300.0
"""Seconds without an end of a phase of a test, after which a liar hangs; its tests wait for 60."""
LADDER = ("quick", "default")
"""The profiles tried on a liar, in this order, until one kills it."""
SHARE = 0.8
"""The share of the possible liars that the profile quick must kill."""


@dataclass
class Verdict:
    """The result of one liar: "killed", "alive", "skipped" (impossible on the device) or "crashed".

    ``profile`` is the one that killed it, or the last that did not; ``seconds`` is the duration.
    """

    liar: str
    guarantee: str
    story: str
    seen: str
    verdict: str
    by: str = ""
    profile: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """True unless the kit missed it."""
        return self.verdict in ("killed", "skipped")


class Session:
    """A pytest plugin of a liar's run: it keeps the recorder, names each test that begins, and collects ``modules``."""

    def __init__(self, say: Say, modules: Set[Path]) -> None:
        self.recorder: Recorder | None = None
        self._say, self._modules = say, modules

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Leave out a module that has no test of the guarantee."""
        return True if collection_path.suffix == ".py" and collection_path not in self._modules else None

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Name it."""
        self._say(doing=nodeid.rpartition("::")[2])

    def pytest_runtest_logreport(self) -> None:
        """Say that it goes on."""
        self._say()

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Keep the recorder."""
        self.recorder = session.config.stash.get(KEY, None)


def run(
    options: Options,
    begin: Callable[[Verdict], None],
    tell: Callable[[Verdict], None],
    came: Callable[[], object] = lambda: None,
) -> list[Verdict]:
    """Test all liars of the chosen guarantees on the device of ``options``. ``begin`` is called before each runs;
    ``came``: see :func:`.apart.apart`."""
    wanted, verdicts = chosen(options.only), []
    found = [one for one in everyone() if not wanted or one.guarantee in wanted]
    lacking = apart(lambda _: missing(found, options))
    if lacking.result is None:
        what = f"{options.device or options.device_factory} was not opened: {lacking.why}"
        raise PluginError(what, cure="run hal conform without --liars first", argument="--liars")
    modules = modules_of(options)
    for one in found:
        verdict = Verdict(one.name, f"G{one.guarantee}", one.story, one.seen, "alive")
        begin(verdict)
        if why := lacking.result[one.name]:
            verdict.verdict, verdict.by = "skipped", f"needs {why}"
        else:
            _climb(one, options, verdict, modules[one.guarantee], came)
        if came():
            raise KeyboardInterrupt
        verdicts.append(verdict)
        tell(verdict)
    return verdicts


def missing(liars: Sequence[Liar], options: Options) -> dict[str, str]:
    """What the device lacks to be each liar; "" where it can be one."""
    honest = Kit(subject(options.device, factory=options.device_factory, target=options.target), Effort())
    found = {one.name: honest.missing(one.requires) for one in liars}
    honest.renew()
    return found


class Collected:
    """A pytest plugin that keeps the modules with tests of each guarantee."""

    def __init__(self) -> None:
        self.modules: dict[int, set[Path]] = defaultdict(set)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Keep them."""
        for item in session.items:
            for number in bears(item):
                self.modules[number].add(item.path)


def modules_of(options: Options) -> Mapping[int, Set[Path]]:
    """Guarantee to the modules with tests of it, which stay imported: each liar's process is a fork of this one."""
    found = Collected()
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main([*arguments(options.but(only="", profile="")), "--collect-only", "-qq"], plugins=[found])
    return found.modules


def _climb(one: Liar, options: Options, verdict: Verdict, modules: Set[Path], came: Callable[[], object]) -> None:
    """Run one profile after the other, until the liar is dead."""
    for profile in [options.profile] if options.profile else LADDER:
        began = monotonic()
        work = partial(_judged, one, options.but(profile=profile), verdict, modules)
        ended = apart(work, limit=lambda: LIMIT, came=came)
        if ended.result is None:
            verdict.verdict, verdict.by = "crashed", f"{ended.why} in {ended.doing or 'no test'}"
        else:
            verdict.verdict, verdict.by = ended.result
        verdict.profile, verdict.seconds = profile, round(monotonic() - began, 2)
        if verdict.verdict != "alive":
            return


def _judged(one: Liar, options: Options, verdict: Verdict, modules: Set[Path], say: Say) -> tuple[str, str]:
    """In the liar's process: the verdict and the reason."""
    try:
        judge(one, options, verdict, modules, say)
    finally:
        release()
    return verdict.verdict, verdict.by


def judge(one: Liar, options: Options, verdict: Verdict, modules: Set[Path], say: Say) -> None:
    """Run one liar against its guarantee's tests, and record how it ended."""
    session = Session(say, modules)
    chosen_options = options.but(
        only=f"G{one.guarantee}",
        liar=one.name,
        shrink=False,
        hang=options.hang or HANG,
        report=(),
        html="",
        seed=options.seed or 0,
    )
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        status = pytest.main([*arguments(chosen_options), "--exitfirst", "--tb=no", "-qq"], plugins=[session])
    if status == pytest.ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if session.recorder is None:
        verdict.verdict, verdict.by = "crashed", f"pytest ended with {pytest.ExitCode(status).name}"
        return
    failed = [outcome for outcome in session.recorder.findings.outcomes.values() if outcome.outcome == "failed"]
    killers = [outcome.test for outcome in failed if outcome.kind == KILLS]
    if killers:
        verdict.verdict, verdict.by = "killed", ", ".join(killers)
    elif not failed:
        own = [outcome for outcome in session.recorder.findings.outcomes.values() if outcome.guarantee == one.guarantee]
        if not any(outcome.outcome == "passed" for outcome in own):
            reasons = sorted({outcome.reason for outcome in own if outcome.reason})
            verdict.verdict, verdict.by = "skipped", "; ".join(reasons) or "no test of its guarantee runs here"
    elif failed:
        verdict.verdict = "crashed"
        verdict.by = "; ".join(f"{outcome.test}: {outcome.kind}: {outcome.error.splitlines()[0]}" for outcome in failed)


COLUMNS = ("guarantee", "liar", "verdict", "profile", "seconds", "killed by, or its story")


def row(verdict: Verdict) -> tuple[str, ...]:
    """Return a verdict under :data:`COLUMNS`."""
    seconds = f"{verdict.seconds:.1f}" if verdict.profile else ""
    last = verdict.by or verdict.story
    return verdict.guarantee, verdict.liar, verdict.verdict, verdict.profile, seconds, last


def begun(cells: Sequence[str]) -> str:
    """The part of a row that is known before the liar runs."""
    return f"{cells[0]:<9} {cells[1]:<32}"


def ended(cells: Sequence[str]) -> str:
    """The rest of the row."""
    return f" {cells[2]:<8} {cells[3]:<8} {cells[4]:>7} {cells[5]}"


@dataclass(frozen=True)
class Tally:
    """The verdicts, counted."""

    verdicts: Sequence[Verdict]
    laddered: bool
    """True if the share killed by quick was measured, and so counts."""

    @property
    def alive(self) -> list[str]:
        """Liars that no profile killed."""
        return [verdict.liar for verdict in self.verdicts if not verdict.ok]

    @property
    def share(self) -> float:
        """The share of the tested liars that the profile quick killed."""
        met = [verdict for verdict in self.verdicts if verdict.verdict != "skipped"]
        quick = [verdict for verdict in met if verdict.verdict == "killed" and verdict.profile == "quick"]
        return len(quick) / len(met) if met else 1.0

    @property
    def ok(self) -> bool:
        """True if every liar is dead, and quick killed enough of them."""
        return not self.alive and (not self.laddered or self.share >= SHARE)

    def lines(self) -> list[str]:
        """Return the sums, for a terminal."""
        killed = [verdict for verdict in self.verdicts if verdict.verdict == "killed"]
        skipped = len(self.verdicts) - len(killed) - len(self.alive)
        lines = [f"{len(killed)} killed, {skipped} skipped, {len(self.alive)} missed {self.alive or ''}".rstrip()]
        if self.laddered:
            enough = "" if self.share >= SHARE else f": less than {SHARE:.0%}"
            lines.append(f"the profile quick kills {self.share:.0%} of those that were run{enough}")
        if killed:
            last = max(killed, key=lambda verdict: verdict.seconds)
            lines.append(f"the longest to die: {last.liar}, {last.seconds:.1f} s of the profile {last.profile}")
        return lines


def as_json(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Return the verdicts as data."""
    return [asdict(verdict) for verdict in verdicts]


def document(tally: Tally, *, html: bool) -> str:
    """Return the table as a document."""
    if not html:
        found = {"ok": tally.ok, "quick": round(tally.share, 3), "liars": as_json(tally.verdicts)}
        return json.dumps(found, indent=2)
    rows = ["".join(f"<td>{escape(cell)}" for cell in row(verdict)) for verdict in tally.verdicts]
    head = "".join(f"<th>{escape(name)}" for name in COLUMNS)
    sums = "".join(f"<p>{escape(line)}" for line in tally.lines())
    body = f"<h1>hal conformance: liars</h1>{sums}<table><tr>{head}{''.join(f'<tr>{cells}' for cells in rows)}</table>"
    return f'<!doctype html><html lang="en"><meta charset="utf-8"><title>hal conformance: liars</title>{body}</html>'
