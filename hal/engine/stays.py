"""Who is in the steps under way, by the admission of a request: its name may be another's when the record comes.

A step costs this one copy of the names, however many requests are in their slots: what changes is booked when it does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from hal_core import FinishReason, OutputRecord, SlotStatus

from .generation import Generation

Names = dict[str, int]
"""Name to admission id of everybody in a step, also of who leaves with it."""
_ONE = (1).to_bytes(4, "little")
"""A row's count of one token, as bytes."""


@dataclass(frozen=True, slots=True)
class StepUnderWay:
    """A step that was scheduled: who is in it; to whom it may give the most tokens, and to whom one."""

    names: Names
    decoding: Sequence[Generation]
    first: Sequence[Generation]


class Stays:
    """The stays of requests in slots, from the step that they enter with to the record that tells their end.

    ``most``: tokens that a step may give to a request that decodes.
    """

    def __init__(self, most: int) -> None:
        self.steps: deque[StepUnderWay] = deque()
        self._most = most
        self._held: dict[int, Generation] = {}
        self._names: Names = {}  # of those in slots
        self._leaving: Names = {}

    def enter(self, generation: Generation) -> None:
        """A request is in its slot from the next step on."""
        admission_id = self._names[generation.request_id] = generation.admitted.admission_id
        self._held[admission_id] = generation

    def leave(self, generation: Generation, *, told: bool) -> None:
        """It is not any more; ``told``: the next step names it once more, and its record tells so."""
        admission_id = self._names.pop(generation.request_id)
        if told:
            self._leaving[generation.request_id] = admission_id

    def launch(self, decoding: Sequence[Generation], first: Sequence[Generation]) -> None:
        """A step was scheduled, of those in slots and those that leave with it. It may give ``most`` tokens to each
        that was ``decoding`` already, and one to each whose prompt it ends."""
        most = self._most
        for one in decoding:
            one.pending += most
        for one in first:
            one.pending += 1
        self.steps.append(StepUnderWay(self._leaving | self._names, decoding, first))
        self._leaving = {}

    def take(self, record: OutputRecord) -> list[tuple[Generation, int, str]]:
        """The oldest step has its output: give its requests their tokens; whose end it tells, why, and its message.

        Rows are told apart by the admission that the step knew under a name: what a step gives a request that has ended
        since, or one that entered under the name of another, is dropped.
        """
        step, most, names = self.steps.popleft(), self._most, record.request_ids
        for one in step.decoding:
            one.pending -= most
        for one in step.first:
            one.pending -= 1
        rows = self._find(step.names, names)
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
        """Whom a step knew by those names; None where a stay is over."""
        held, known = self._held.get, names.get
        return [held(known(name, 0)) for name in request_ids]

    def _over(self, names: Names, request_id: str) -> None:
        """A record has told the end of a stay; later ones of it tell nothing."""
        del self._held[names[request_id]]

    def forget(self, generation: Generation) -> None:
        """A stay ended with a token and no end of the request: it goes on elsewhere."""
        self.leave(generation, told=False)
        del self._held[generation.admitted.admission_id]
