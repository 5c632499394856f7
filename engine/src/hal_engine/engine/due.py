"""When each running request has to be checked for KV blocks: few of many at each step."""

from __future__ import annotations

from operator import attrgetter

from .generation import Generation

_RANK = attrgetter("rank")


class DueChecks:
    """Requests by the step that may first find them short of blocks, so that a step does not check all slots.

    A request with room for ``room`` tokens more that gets at most ``most`` a step cannot run short earlier than
    ``room // most + 1`` steps from now.
    """

    def __init__(self, most: int) -> None:
        self._most, self._step = most, 0
        self._at: dict[int, list[Generation]] = {}

    def enter(self, generation: Generation) -> None:
        """Have a request that enters a slot checked with the next step."""
        self._put(generation, self._step + 1)

    def again(self, generation: Generation, room: int) -> None:
        """Have a request checked when ``room`` tokens more may be used up; at the next step if it has none."""
        self._put(generation, self._step + 1 + max(room, 0) // self._most)

    def next_step(self) -> list[Generation]:
        """Return the requests to check for the step that is scheduled now, in the order of service."""
        self._step += 1
        due = [one for one in self._at.pop(self._step, ()) if one.slot >= 0 and one.due == self._step]
        return sorted(dict.fromkeys(due), key=_RANK) if due else due

    def _put(self, generation: Generation, step: int) -> None:
        generation.due = step
        self._at.setdefault(step, []).append(generation)
