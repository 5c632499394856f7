"""What the host knows of a step's slots when its output is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..slots.fields import SplitRole
from ..slots.native_columns import native_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..slots.host_table import HostSlotTable
    from ..slots.state import SlotState
    from ..slots.step import Step


class OutputSnapshot(NamedTuple):
    """The host's data at the call, which must not change while the copy is in flight."""

    step: Step
    order: np.ndarray[Any, np.dtype[np.intp]]
    admission_ids: np.ndarray[Any, np.dtype[np.int64]]
    names: tuple[str, ...]
    prefill_role: np.ndarray[Any, np.dtype[np.bool_]]
    preempted: dict[int, tuple[int, str]]
    aborted: dict[int, tuple[int, str]]
    max_accept: int
    max_draft_tokens: int
    max_logprobs: int
    token_limit: int
    failed: dict[int, int]
    """The state's own dictionary, current when the record is built, which adds to it; see
    :class:`hal_core.slots.state.SlotState`."""
    plain: bool
    """All slots are held, and only tokens are reported."""
    native_rows: Callable[..., tuple[bytes, bytes, bytes] | None] | None
    """The device's native code that reads the rows of a usual step."""

    @classmethod
    def of(cls, state: SlotState, step: Step) -> OutputSnapshot:
        """Return the data of a step's slots now. Raises :class:`hal_core.InvalidValue` for a state that the step does
        not name."""
        host_table, sizes = state.host_table, state.sizes
        step.order(state.name)  # for its error
        order = step.places[state.name]
        admission_ids = host_table.admission_ids[order]
        names, prefill_role, ordinary = _held(host_table, order, admission_ids)
        slots = order.tolist() if host_table.preempted or host_table.aborted else []
        special = slots or step.logprobs is not None or step.errors or step.recovered
        preempted = {slot: host_table.preempted[slot] for slot in slots if slot in host_table.preempted}
        aborted = {slot: host_table.aborted[slot] for slot in slots if slot in host_table.aborted}
        native = native_of(state.device)
        plain = ordinary and not special
        return cls(
            step,
            order,
            admission_ids,
            names,
            prefill_role,
            preempted,
            aborted,
            sizes.max_accept,
            sizes.max_draft_tokens,
            sizes.max_logprobs,
            sizes.token_limit,
            state.failed,
            plain,
            None if native is None else native.of_rows,
        )


_Held = tuple[tuple[str, ...], np.ndarray[Any, np.dtype[np.bool_]], bool]
#: The requests of the last step: their admission ids, and the result of ``_held`` for them. An id is never reused, and
#: a batch mostly keeps its requests from step to step. One assignment replaces it: no lock.
_last_held: tuple[bytes, _Held] = (b"", ((), np.zeros(0, np.bool_), True))


def _held(host_table: HostSlotTable, order: np.ndarray[Any, Any], admission_ids: np.ndarray[Any, Any]) -> _Held:
    """Return each slot's request name ("" if free), whether it has the prefill role of a split, and whether all slots
    are held by requests without that role."""
    global _last_held
    key, (last, found) = admission_ids.tobytes(), _last_held
    if key != last:
        held = [host_table.requests[slot] for slot in order.tolist()]
        names = tuple([request.request_id if request else "" for request in held])
        prefill = [request is not None and request.role is SplitRole.PREFILL for request in held]
        prefill_role = np.array(prefill, np.bool_)
        prefill_role.flags.writeable = False
        found = (names, prefill_role, all(names) and not any(prefill))
        _last_held = (key, found)
    return found
