"""Requests that are admitted by the thousand and inserted late, and changes by callers meanwhile (G9)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
from hal_core.slots.admission import AdmittedRequest, Request
from hal_core.slots.tasks import TaskKind

from .fixtures.many import MANY, prefill, prompt, request, varied
from .fixtures.world import World
from .harness.backdoor import arrive
from .harness.guarantees import guarantee
from .kit import Kit

EARLY = {"quick": 3000, "default": 20_000, "nightly": 70_000}
"""Requests admitted before the first of them is inserted."""


@guarantee(9)
def test_g09_requests_admitted_by_the_thousand_are_inserted_late(kit: Kit) -> None:
    size = replace(MANY, num_slots=64, max_model_len=24)
    fixture, other = World(kit, size), World(kit, size, name="another")
    params = [varied(at, size) for at in range(97)]
    made: list[AdmittedRequest] = []
    for at in range(EARLY[kit.effort.profile]):
        one = Request(fixture.new_name(), [at, at // 7, 2**31 - 1 - at][: 1 + at % 3], params[at % 97])
        made.append(fixture.admit(one))
        other.model.requests[made[-1].admission_id] = one
    middle = len(made) // 2
    parts = {
        "the first": made[:64],
        "the last": made[:-65:-1],
        "those between": made[middle : middle + 64],
        "first and last": [*made[64:96], *made[-96:-64]],
    }
    for what, chosen in parts.items():
        fixture.enter([prefill(fixture, slot, one) for slot, one in enumerate(chosen)])
        fixture.check(f"{what} of {len(made)} admitted requests entered")
        fixture.enter(fixture.leaving(range(64), TaskKind.ABORTED))
        fixture.output(fixture.step(range(64)))
    for at in (200, len(made) - 200, 201):  # single ones too: a core may treat a few requests differently
        fixture.enter([prefill(fixture, at % 64, made[at])])
    fixture.check("single requests entered late")
    rest = made[300:364]
    other.enter([prefill(other, slot, one) for slot, one in enumerate(rest)])
    other.check("requests that were admitted for another state of the same sizes entered late")
    fixture.check("the other state's requests entered")


@guarantee(9)
def test_g09_what_was_inserted_is_kept_while_thousands_more_are_admitted(kit: Kit) -> None:
    size = replace(MANY, num_slots=80, max_model_len=48)
    fixture = World(kit, size)
    with kit.held(fixture.stream, "thousands of admissions"):
        tickets = []
        for low in (0, 8, 9):  # a few, one, and many: each may be staged differently
            high = {0: 8, 8: 9, 9: 80}[low]
            tickets.append(
                fixture.insert([prefill(fixture, slot, request(fixture, slot)) for slot in range(low, high)])
            )
        for at in range(EARLY["quick"] // 2):
            fixture.state.admit(Request(f"later-{at}", prompt(at, 1 + at % 40)))  # dropped at once
    for ticket in tickets:
        arrive(ticket)
    fixture.check("thousands of requests were admitted before the insertion was carried out")


@guarantee(9)
def test_g09_block_ids_may_be_changed_once_the_call_has_returned(kit: Kit) -> None:
    fixture = World(kit, replace(MANY, num_slots=80, max_model_len=4096))
    tasks, lent = [], []
    for slot in range(80):
        task = prefill(fixture, slot, fixture.admit(Request(fixture.new_name(), prompt(slot, 3000 + slot))))
        lent.append(np.array(task.blocks, np.int32))
        tasks.append(replace(task, blocks=cast(Sequence[int], lent[-1])))
    with kit.held(fixture.stream):
        tickets = [fixture.insert(tasks[:3]), fixture.insert(tasks[3:])]
        for ids in lent:
            ids[...] = -77
    for ticket in tickets:
        arrive(ticket)
    fixture.check("the callers' block ids were overwritten")
