"""What became of each test, and the whole of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Outcome:
    """How one test ended: passed, failed, skipped, expected (to fail, and did) or unexpected (to fail, and passed)."""

    test: str
    guarantee: int
    outcome: str = ""
    reason: str = ""
    error: str = ""
    kind: str = ""
    seconds: float = 0.0
    reproduce: str = ""
    cause: str = ""
    same_as: str = ""
    """The first test that failed of the same cause; "" for that one itself."""


@dataclass
class Report:
    """The whole of one run; what ``--json`` prints."""

    header: dict[str, Any]
    guarantees: list[dict[str, Any]]
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True when nothing failed and the list of expected failures is true."""
        return not self.problems and all(entry["status"] != "failed" for entry in self.guarantees)
