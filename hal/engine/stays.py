"""Who is in the steps under way, by the admission of a request: its name may be another's when the record comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from .generation import Generation

Names = dict[str, int]
"""Name to admission id of everybody in a step, also of who leaves with it."""


@dataclass(frozen=True, slots=True)
class StepUnderWay:
    """A step that was scheduled: who is in it, and the most tokens that it may give to whom."""

    names: Names
    gives: list[tuple[Generation, int]]


class Stays:
    """The stays of requests in slots, from the step that they enter with to the record that tells their end."""

    def __init__(self) -> None:
        self.steps: deque[StepUnderWay] = deque()
        self._held: dict[int, Generation] = {}

    def launch(self, leaving: Names, running: Sequence[Generation], decoding: Sequence[Generation], most: int) -> None:
        """A step was scheduled, of those in slots and those that leave with it. It may give ``most`` tokens to each
        that was ``decoding`` already, and one to each whose prompt it ends."""
        known = set(decoding)
        gives = [(one, most if one in known else 1) for one in running if one.decoding]
        names = dict(leaving)
        for generation in running:
            admission_id = names[generation.request_id] = generation.admitted.admission_id
            self._held[admission_id] = generation
        for generation, tokens in gives:
            generation.pending += tokens
        self.steps.append(StepUnderWay(names, gives))

    def take(self) -> Names:
        """The oldest step has its output: what it could give is known now."""
        step = self.steps.popleft()
        for generation, tokens in step.gives:
            generation.pending -= tokens
        return step.names

    def find(self, names: Names, request_id: str) -> Generation | None:
        """Whom a step knew by that name; None where its stay is over."""
        return self._held.get(names.get(request_id, 0))

    def over(self, names: Names, request_id: str) -> None:
        """A record has told the end of a stay; later ones of it tell nothing."""
        del self._held[names[request_id]]

    def forget(self, admission_id: int) -> None:
        """A stay ended with a token and no end of the request: it goes on elsewhere."""
        del self._held[admission_id]
