"""The requests in a rank's slots, so that later step messages can name each by its slot alone."""

from __future__ import annotations

from collections.abc import Callable

from hal_core import LEAVING, AdmittedRequest, InvalidValue, Request, Task

from .steps import StepOrder


class RequestTable:
    """The request that each slot holds."""

    def __init__(self, admit: Callable[[Request], AdmittedRequest]) -> None:
        self._admit = admit
        self._held: dict[int, AdmittedRequest] = {}

    def tasks(self, order: StepOrder) -> list[Task]:
        """Return the tasks of a step message. Raises :class:`InvalidValue` for a request that is not in its slot."""
        return [
            Task(
                task.kind,
                task.slot,
                self._request(task.slot, task.name, task.request, leaves=task.kind in LEAVING),
                task.num_computed_tokens,
                task.num_scheduled_tokens,
                task.blocks,
                task.first_block,
                task.first_token,
                task.drafts,
            )
            for task in order.tasks
        ]

    def _request(self, slot: int, name: str, entering: Request | None, *, leaves: bool) -> AdmittedRequest:
        if entering is not None:
            self._held[slot] = self._admit(entering)
        held = self._held.get(slot)
        if held is None or held.request_id != name:
            raise InvalidValue(
                f"slot {slot} holds {held.request_id if held else 'nothing'!r}, not {name!r}",
                cure="report it: engine and ranks disagree about the slots",
                argument="step message",
            )
        if leaves:
            del self._held[slot]
        return held
