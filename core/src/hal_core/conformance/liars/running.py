"""Run every liar against the tests of its own guarantee: each must be killed by one of them, by assertion."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import pytest

from ..command import Options, arguments
from ..kit import Effort, Kit
from ..opening import subject
from ..plugin import KEY
from ..rank_pool import kept
from ..report import Recorder, chosen
from . import Liar, everyone

KILLS = "AssertionError"
HANG = 2.0
"""Seconds after which a liar's call is taken to wait for a stream that is held; some do, so the runs wait as long."""


@dataclass
class Verdict:
    """What became of one liar: "killed", "alive", "skipped" (the device cannot tell this lie) or "crashed"."""

    liar: str
    guarantee: str
    story: str
    seen: str
    verdict: str
    by: str = ""

    @property
    def ok(self) -> bool:
        """True unless the kit missed it."""
        return self.verdict in ("killed", "skipped")


class Session:
    """A pytest plugin that keeps the recorder of a run."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Keep it."""
        self.recorder = session.config.stash.get(KEY, None)


def run(options: Options, tell: Callable[[Verdict], None]) -> list[Verdict]:
    """Test all liars of the chosen guarantees on the device of ``options``."""
    wanted = chosen(options.only)
    with kept():
        return _run(options, wanted, tell)


def _run(options: Options, wanted: set[int], tell: Callable[[Verdict], None]) -> list[Verdict]:
    verdicts = []
    honest = Kit(subject(options.device, factory=options.device_factory), Effort())
    for one in everyone():
        if not wanted or one.guarantee in wanted:
            verdict = Verdict(one.name, f"G{one.guarantee}", one.story, one.seen, "alive")
            missing = honest.missing(one.requires)
            if missing:
                verdict.verdict, verdict.by = "skipped", f"needs {missing}"
            else:
                judge(one, options, verdict)
            verdicts.append(verdict)
            tell(verdict)
    honest.renew()
    return verdicts


def judge(one: Liar, options: Options, verdict: Verdict) -> None:
    """Run one liar against its guarantee's tests alone, and write down how it ended."""
    session = Session()
    chosen_options = options.but(
        only=f"G{one.guarantee}", liar=one.name, shrink=False, hang=HANG, report="", seed=options.seed or 0
    )
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        status = pytest.main([*arguments(chosen_options), "--exitfirst", "--tb=no", "-qq"], plugins=[session])
    if session.recorder is None:
        verdict.verdict, verdict.by = "crashed", f"pytest ended with {pytest.ExitCode(status).name}"
        return
    failed = [outcome for outcome in session.recorder.outcomes.values() if outcome.outcome == "failed"]
    killers = [outcome.test for outcome in failed if outcome.kind == KILLS]
    if killers:
        verdict.verdict, verdict.by = "killed", ", ".join(killers)
    elif failed:
        verdict.verdict = "crashed"
        verdict.by = "; ".join(f"{outcome.test}: {outcome.kind}: {outcome.error.splitlines()[0]}" for outcome in failed)


def table(verdicts: list[Verdict]) -> list[str]:
    """The verdicts as lines: liar, guarantee, killed by which test."""
    return [f"{v.guarantee:<4} {v.verdict:<8} {v.liar:<24} {v.by or v.story}" for v in verdicts]


def as_json(verdicts: list[Verdict]) -> list[dict[str, Any]]:
    """The verdicts as data."""
    return [asdict(verdict) for verdict in verdicts]
