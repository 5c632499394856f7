"""The outcome of each test, and of a whole run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

NOT_RUN = "not run"
"""The outcome of a test that was chosen and not reached."""


@dataclass
class Outcome:
    """How one test ended: passed, failed, skipped, expected (to fail, and did), unexpected (to fail, and passed), or
    not run."""

    test: str
    guarantee: int
    outcome: str = NOT_RUN
    reason: str = ""
    error: str = ""
    kind: str = ""
    seconds: float = 0.0
    reproduce: str = ""
    cause: str = ""
    same_as: str = ""
    """The first test that failed with the same cause; "" for that one itself."""


@dataclass
class Report:
    """The result of one run, printed by ``--json``."""

    header: dict[str, Any]
    guarantees: list[dict[str, Any]]
    problems: list[str] = field(default_factory=list)
    unfinished: str = ""
    """Why chosen tests were not run, through no fault of the device; "" if all were."""

    @property
    def ok(self) -> bool | None:
        """True if no test failed and the list of expected failures is right; None (no verdict) for an unfinished
        run."""
        if self.unfinished:
            return None
        return not self.problems and all(entry["status"] != "failed" for entry in self.guarantees)
