"""The places of the core that a liar may replace, by the names of their functions. The only list of these places.

A liar gives ``seam = "check of a batch"``. If a module moves, only its line here changes. A place is where the core
looks the function up when calling it; for an imported one that is the importing module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

from hal_core.errors import InvalidValue

CORE = "hal_core"
SEAMS: dict[str, str] = {
    # writes
    "overlaps in a plan": "memory.plan:last_wins",
    "plan of a value": "devices.base:plan_value",
    "plan of several memories": "devices.asynchronous:across",
    "plan of an insertion": "devices.base:plan_insert",
    "conversion of an array": "runtime.policy:prepare_array",
    "conversion of a value": "runtime.policy:prepare",
    "elements of a host tensor": "memory.values:host_elements",
    # steps
    "stop sequences of a step": "slots.update:_ends_with_stop",
    "several tokens of a step": "slots.update:_append_several",
    "one token of a step": "slots.update:_append_single",
    # streams
    "place of a span": "devices.staging:Segment.place",
    "wait of a stream": "devices.events:AsyncStream.wait",
    # batches and slots
    "check of a batch": "runtime.policy:problems",
    "order of drafts": "slots.drafts:_check_order",
    "plan of drafts": "runtime.policy:plan_drafts",
    "plain step over drafts": "slots.draft_book:DraftBook.check_update",
    "plan of a companion's tasks": "slots.insertion:tasks_of_companion",
    "values of declared fields": "slots.admission:fill_declared",
    "leaving of slots": "slots.insertion:_with_empty",
    "table of declared fields": "slots.companions:table_with",
    "booking of a batch": "slots.host_table:HostSlotTable.commit",
    "booking of a report": "slots.host_table:HostSlotTable.reported",
    "release of slots": "slots.state:SlotState.release",
    "guard of slots": "slots.state:SlotState.wait_for_readers",
    "guard of a batch": "slots.state:SlotState.wait_for_readers_of_batch",
    "use of a state": "slots.state:SlotState.check_usable",
    # output
    "check of a step": "runtime.policy:_check_step",
    "record of an output": "output.ticket:OutputTicket.resolve",
    "build of a record": "output.ticket:build_record",
    "clean-up of a step": "slots.state:SlotState.cleanup_plan",
    "host mirror": "slots.state:SlotState.take",
    # broadcasts
    "terms of a group": "ranks.channel:shared_config_of",
    "comparison of terms": "ranks.channel:differences",
    "header of a broadcast": "ranks.channel:BroadcastChannel.begin",
    "check of a broadcast": "ranks.channel:BroadcastChannel.checked",
    "check of an output's broadcast": "ranks.channel:OutputCheck.of",
    "loss of a group": "ranks.channel:BroadcastChannel.lost",
    # handovers
    "check of a seal": "handover.promises:incomplete",
    "contents of a promise": "handover.promises:Promises.take",
    "writes of a promise": "handover.promises:may_be_written",
    "end of a promise": "handover.promises:Promises.end",
    "comparison of fingerprints": "handover.transfer:check_facts",
    "end of patience": "handover.transfer:is_over",
    # life
    "errors nobody waited for": "runtime.open_tickets:OpenTickets.unseen",
    "telling of earlier errors": "runtime.bound:raise_unseen",
    "begin of a call": "runtime.bound:BoundDevice._begin",
    "tracking of a ticket": "runtime.open_tickets:OpenTickets.track",
    "state of a device": "runtime.bound:BoundDevice.state",
    "close of a device": "runtime.bound:BoundDevice.close",
}
"""Function to the module (below the core) and attribute that implement it."""


def find(seam: str) -> tuple[Any, str, Any]:
    """Return owner, attribute and current value, as it is stored (a classmethod as one). Raises
    :class:`InvalidValue`."""
    if seam not in SEAMS:
        raise InvalidValue(f"no seam {seam!r}", cure=f"one of {', '.join(map(repr, SEAMS))}", argument="seam")
    module, _, path = SEAMS[seam].partition(":")
    owner: Any = import_module(f"{CORE}.{module}")
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name, inspect.getattr_static(owner, name)


def put(seam: str, change: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace a seam by ``change(current value)``; return the function that undoes it."""
    owner, name, stored = find(seam)
    setattr(owner, name, change(getattr(owner, name)))
    return lambda: setattr(owner, name, stored)
