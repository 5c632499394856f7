"""Requests in flight, by admission: a name may belong to another request when the record comes.

A step costs this one copy of the names, however many requests are in their slots: changes are booked when they happen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from hal_core import FinishReason, OutputRecord, SlotStatus

from .generation import Generation

Names = dict[str, int]
"""Name to admission id of all requests in a step, including those that leave with it."""
_ONE = (1).to_bytes(4, "little")
"""A row's count of one token, as bytes."""


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A scheduled step: its requests, those that it may give the most tokens, and those that it may give one."""

    names: Names
    decoding: Sequence[Generation]
    first: Sequence[Generation]


class InFlight:
    """The stays of requests in slots, from their first step to the record that reports their end.

    ``most``: tokens that a step may give to a request that decodes.
    """

    def __init__(self, most: int) -> None:
        self.steps: deque[StepInFlight] = deque()
        self._most = most
        self._held: dict[int, Generation] = {}
        self._names: Names = {}  # of those in slots
        self._leaving: Names = {}
        self._launched: Names | None = None  # of the last step, while the next one has the same
        self._found: tuple[Names, Sequence[str], list[Generation | None]] | None = None  # of the last record

    def enter(self, generation: Generation) -> None:
        """Add a request: it is in its slot from the next step on."""
        admission_id = self._names[generation.request_id] = generation.admitted.admission_id
        self._held[admission_id] = generation
        self._launched = None

    def leave(self, generation: Generation, *, reported: bool) -> None:
        """Remove a request from its slot. ``reported``: the next step names it once more, and its record says so."""
        admission_id = self._names.pop(generation.request_id)
        self._launched = None
        if reported:
            self._leaving[generation.request_id] = admission_id

    def launch(self, decoding: Sequence[Generation], first: Sequence[Generation]) -> None:
        """Book a scheduled step, of the requests in slots and those that leave with it. It may give ``most`` tokens to
        each that was ``decoding`` already, and one to each whose prompt it ends."""
        most = self._most
        for one in decoding:
            one.pending += most
        for one in first:
            one.pending += 1
        names = self._launched if self._launched is not None else self._leaving | self._names
        self._launched = None if self._leaving else names
        self.steps.append(StepInFlight(names, decoding, first))
        self._leaving = {}

    def take(self, record: OutputRecord) -> list[tuple[Generation, int, str]]:
        """Book the output of the oldest step: give its requests their tokens. Yield each that it ends, with reason and
        message.

        Rows are matched by the admission that the step had under a name. Tokens for a request that has ended since are
        dropped, and so are tokens for an earlier request of the same name.
        """
        step, most, names = self.steps.popleft(), self._most, record.request_ids
        for one in step.decoding:
            one.pending -= most
        for one in step.first:
            one.pending -= 1
        if self._found is None or self._found[0] is not step.names or self._found[1] != names:
            self._found = step.names, names, self._find(step.names, names)
        rows = self._found[2]
        tokens, counts, finish, at = record.tokens.tolist(), record.counts, record.finish, 0
        if counts.tobytes() == _ONE * len(rows):  # the usual step
            for generation, token in zip(rows, tokens, strict=True):
                if generation is not None:
                    generation.generated.append(token)
            over = finish.nonzero()[0] if any(finish.tobytes()) else ()
        else:
            for generation, count in zip(rows, counts.tolist(), strict=True):
                if generation is not None:
                    generation.generated += tokens[at : at + count]
                at += count
            over = ((record.status == SlotStatus.PREEMPTED) | (finish != FinishReason.NONE)).nonzero()[0]
        ended: list[tuple[Generation, int, str]] = []
        for row in map(int, over):
            if (gone := rows[row]) is not None:
                self._over(step.names, names[row])
                if finish[row] != FinishReason.NONE:
                    ended.append((gone, int(finish[row]), record.messages.get(row, "")))
        return ended

    def _find(self, names: Names, request_ids: Sequence[str]) -> list[Generation | None]:
        """Return the requests that a step had by those names; None for a stay that is over."""
        held, known = self._held.get, names.get
        return [held(known(name, 0)) for name in request_ids]

    def _over(self, names: Names, request_id: str) -> None:
        """End a stay whose end a record has reported; later records do not report it again."""
        self._found = None
        del self._held[names[request_id]]

    def forget(self, generation: Generation) -> None:
        """End a stay that ended with a token although its request has not ended: it continues elsewhere."""
        self.leave(generation, reported=False)
        self._found = None
        del self._held[generation.admitted.admission_id]
