"""The outcome of each test, and of a whole run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PASSED, FAILED, SKIPPED, EXPECTED, UNEXPECTED = "passed", "failed", "skipped", "expected", "unexpected"
NOT_RUN = "not run"
"""The outcome of a test that was chosen and not reached."""
PRIMITIVES = "the primitives fail, by which every other test reads and writes: mend them first"
"""Why a run ends at a failure of theirs."""
LEFT_OUT = "left out (--skip)"
"""The reason of a test that the caller left out."""
NOT_CHOSEN = "not chosen (--only)"
"""The note of a guarantee outside ``--only``."""
IN_PART = "in part (--only)"
"""The note of a guarantee outside ``--only`` of which some tests are those of a chosen one."""


LONGEST = 400
"""Characters of a line of an error that the terminal shows; the other forms of the report have it whole."""


def clipped(line: str) -> str:
    """Return a line as the terminal shows it."""
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} … ({len(line)} characters, whole in --report FILE)"


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
    stopped: str = ""
    """Why the run ended at its first failure; "" if it did not."""

    @property
    def ok(self) -> bool | None:
        """True if no test failed and the list of expected failures is right; None (no verdict) for an unfinished
        run."""
        if self.unfinished:
            return None
        return not self.problems and all(entry["status"] != "failed" for entry in self.guarantees)
