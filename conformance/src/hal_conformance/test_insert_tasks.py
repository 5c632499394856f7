"""``insert_tasks``: G9, G11 and G12; requests that are inserted late, and all hooks in any order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
from hal_core.slots.admission import AdmittedRequest, Request, SamplingParams
from hal_core.slots.fields import SplitRole, StateConfig
from hal_core.slots.tasks import Task, TaskKind
from hypothesis import seed
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from msgspec import structs

from .draw.requests import sizes
from .fixtures.batches import ALL, draw_batch, text_of
from .fixtures.machine import WorkerMachine
from .fixtures.many import MANY, prefill, prompt, request, varied
from .fixtures.stepping import draw_advance, draw_proposal, free_ended, run_step
from .fixtures.world import World
from .harness.backdoor import arrive
from .harness.guarantees import guarantee
from .harness.properties import Results, explore
from .kit import Draw, Kit, examples


def insert_and_check(draw: Draw, fixture: World, kinds: tuple[TaskKind, ...] = ALL, *, least: int = 0) -> list[Task]:
    """Insert a valid batch, and compare every byte of the state."""
    __tracebackhide__ = True
    tasks = draw_batch(draw, fixture, kinds, least=least)
    fixture.enter(tasks)
    fixture.check(f"insert_tasks({text_of(tasks)})")
    return tasks


@guarantee(9, also=(11, 12, 19, 20))
@examples()
def test_g09_every_field_of_every_slot_is_as_the_model_says(kit: Kit, draw: Draw) -> None:
    fixture = World(kit, draw(sizes(), "sizes"))
    for _ in range(draw(st.integers(1, 4), "rounds")):
        insert_and_check(draw, fixture)
        fixture.output(run_step(draw, fixture))
        fixture.check("save_output")
        free_ended(fixture)


@guarantee(9, requires=("async_h2d", "can_hold_stream"), also=(5, 11))
def test_g09_slots_beside_a_batch_may_be_written_on_another_stream(kit: Kit) -> None:
    """An insertion on a held stream must not bring back what other slots were at its call."""
    world, other = World(kit, StateConfig(num_slots=9, max_model_len=16)), kit.device.stream()
    world.enter(world.entering(slot) for slot in range(9))
    with kit.held(world.stream, "insert_tasks, or a write to other slots on another stream"):
        ticket = world.insert([*world.leaving([1, 4, 8]), world.entering(4, [7])])
        for name in ("stop_flags", "temperature", "top_k", "seed"):
            for slot in (0, 2, 3, 5, 7):
                target = world.state.view(name)[slot]
                last = kit.bound.async_set_value(target=target, value=1, stream=other)
                world.model.set(name, slot, 1)
        arrive(last, "a write to other slots on another stream")
    arrive(ticket)
    world.check("a batch was inserted on a held stream, and other slots were written on another one")


@guarantee(9)
@examples(0.5)
def test_g09_new_requests_enter_many_slots_at_once(kit: Kit, draw: Draw) -> None:
    fixture = World(kit, draw(sizes(most_slots=12), "sizes"))
    insert_and_check(draw, fixture, (TaskKind.PREFILL,), least=fixture.sizes.num_slots)


@guarantee(9, also=(11,))
@examples(0.5)
def test_g09_requests_leave_go_on_and_enter_in_one_batch(kit: Kit, draw: Draw) -> None:
    fixture = World(kit, draw(sizes(), "sizes"))
    insert_and_check(draw, fixture, (TaskKind.PREFILL, TaskKind.REMOTE_PREFILL), least=1)
    fixture.output(run_step(draw, fixture))
    insert_and_check(draw, fixture, least=fixture.sizes.num_slots)


@guarantee(9)
@examples(0.5)
def test_g09_a_step_changes_only_what_its_documentation_says(kit: Kit, draw: Draw) -> None:
    fixture = World(kit, draw(sizes(), "sizes"))
    insert_and_check(draw, fixture, (TaskKind.PREFILL, TaskKind.REMOTE_PREFILL), least=1)
    for _ in range(draw(st.integers(1, 6), "steps")):
        run_step(draw, fixture)  # compares every byte after update_inputs


@guarantee(9)
def test_g09_a_full_row_ends_its_request_whatever_it_might_still_be_given(kit: Kit) -> None:
    fixture = World(kit, StateConfig(num_slots=2, max_model_len=4, block_size=2))
    prompts = ([1, 2, 3], [1])
    fixture.enter(
        fixture.entering(slot, prompt, blocks=[2 * slot, 2 * slot + 1]) for slot, prompt in enumerate(prompts)
    )
    for number in range(2):
        fixture.poke({"sampled_token_ids": np.array([5, 6])})
        fixture.advance([0, 1])
        fixture.check(f"step {number}, after which a row is full")


@guarantee(9, also=(11,))
@examples(0.5)
def test_g09_one_batch_serves_two_states_with_their_own_slots(kit: Kit, draw: Draw) -> None:
    size = draw(sizes(), "sizes")
    target, proposer = World(kit, size), World(kit, size, name="proposer")
    for fixture in (target, proposer):
        insert_and_check(draw, fixture, least=1)
    target.check("insert_tasks into another state")


@guarantee(9)
def test_g09_slots_beside_a_named_one_keep_what_the_last_step_wrote(kit: Kit) -> None:
    n = 9  # the last flag is alone in its word
    fixture = World(kit, StateConfig(num_slots=n, max_model_len=8, block_size=2))
    fixture.enter(fixture.entering(slot, max_tokens=1 + slot % 3) for slot in range(n))
    for slot in range(n):
        fixture.poke({"sampled_token_ids": 40 + np.arange(n)})
        fixture.advance(range(n))
        fixture.insert(
            [
                Task(
                    TaskKind.MORE_BLOCKS,
                    slot,
                    fixture.model.residents[slot].admitted,
                    blocks=[20 + slot],
                    first_block=1,
                )
            ]
        )
        fixture.check(f"a step, and one more block for slot {slot}")


@guarantee(11, also=(9, 19))
@examples()
def test_g11_nothing_of_the_former_request_is_left_in_a_slot(kit: Kit, draw: Draw) -> None:
    fixture = World(kit, draw(sizes(most_slots=3), "sizes"))
    for _ in range(draw(st.integers(2, 4), "requests a slot")):
        free_ended(fixture)
        insert_and_check(draw, fixture, (TaskKind.PREFILL, TaskKind.REMOTE_PREFILL, TaskKind.PREEMPTED), least=1)
        fixture.output(run_step(draw, fixture))


@guarantee(11)
def test_g11_every_row_is_reset_to_the_largest_length_written_before(kit: Kit) -> None:
    fixture = World(
        kit,
        StateConfig(
            num_slots=2, max_model_len=24, block_size=2, max_draft_tokens=3, max_bad_words=4, max_stop_sequences=3
        ),
    )
    long = SamplingParams(max_tokens=9, bad_words=(1, 2, 3, 4), stop_sequences=((1, 2), (3,), (4, 5)))
    first = fixture.admit(Request("long", list(range(1, 18)), long))
    fixture.enter([Task(TaskKind.PREFILL, 0, first, 0, 17, list(range(9)))])
    fixture.check("a long request entered")
    fixture.poke_cell("stop_flags", 0, True)
    fixture.release([0])
    middle = fixture.admit(Request("middle", [7, 8, 9], SamplingParams(bad_words=(6,), stop_sequences=((6,),))))
    fixture.enter([Task(TaskKind.REMOTE_PREFILL, 0, middle, 3, blocks=[3, 4], first_token=5, drafts=[1, 2, 3])])
    fixture.check("a shorter request followed")
    short = fixture.admit(Request("short", [6]))
    left = Task(TaskKind.ABORTED, 0, middle)
    fixture.enter([left, Task(TaskKind.PREFILL, 0, short, 0, 1, [8])])
    fixture.check("a short request followed in one batch")
    row = fixture.bytes()[fixture.state.layout.fields["block_tables"].offset :][:8].view(np.int32)
    assert row[1] == -1, f"entry 1 of the block table is {row[1]}, the former request's, but should be reset to -1"


@guarantee(11)
def test_g11_blocks_that_were_added_later_leave_with_their_request(kit: Kit) -> None:
    fixture = World(kit, StateConfig(num_slots=2, max_model_len=24, block_size=2))
    first = fixture.admit(Request("first", [1, 2]))
    fixture.enter([Task(TaskKind.PREFILL, 1, first, 0, 2, [3])])
    fixture.enter([Task(TaskKind.MORE_BLOCKS, 1, first, blocks=[4, 5], first_block=1)])
    fixture.poke_cell("stop_flags", 1, True)
    fixture.release([1])
    fixture.enter([Task(TaskKind.PREFILL, 1, fixture.admit(Request("next", [6])), 0, 1, [8])])
    fixture.check("a request followed one that had got more blocks")


@guarantee(12)
@examples()
def test_g12_the_decode_role_goes_on_after_the_first_token(kit: Kit, draw: Draw) -> None:
    fixture = World(kit, draw(sizes(), "sizes"))
    tasks = insert_and_check(draw, fixture, (TaskKind.REMOTE_PREFILL,), least=1)
    step = draw_advance(draw, fixture)
    fixture.check("the first step after a handoff")
    given = {task.request.request_id: task.request.generated + 1 for task in tasks}
    for row in fixture.output(step):
        if row.tokens:
            should = given[row.request_id]
            assert row.position == should, f"{row.request_id} continues at {row.position}, but should at {should}"


@guarantee(12)
@examples(0.5)
def test_g12_exactly_the_given_drafts_are_written(kit: Kit, draw: Draw) -> None:
    fixture = World(kit, draw(sizes(drafts=True), "sizes"))
    for _ in range(2):
        tasks = insert_and_check(draw, fixture, (TaskKind.REMOTE_PREFILL, TaskKind.ABORTED), least=1)
        drafts = [task for task in tasks if task.kind is TaskKind.REMOTE_PREFILL]
        place = fixture.state.layout.fields["draft_tokens"]
        for task in drafts:
            begin = place.offset + task.slot * place.stride
            got = fixture.bytes()[begin : begin + place.stride].view(np.int64).tolist()
            should = [*task.drafts, *[-1] * (place.width - len(task.drafts))]
            assert got == should, f"slot {task.slot} holds drafts {got}, but should hold {should}"
        fixture.output(fixture.step(sorted(fixture.model.leavers)))


@guarantee(12, also=(22,))
@examples(0.5)
def test_g12_the_host_mirror_is_as_of_the_last_step_whose_output_was_taken(kit: Kit, draw: Draw) -> None:
    fixture = World(kit, draw(sizes(), "sizes"))
    for _ in range(draw(st.integers(1, 3), "steps")):
        insert_and_check(draw, fixture)
        step = draw_advance(draw, fixture)
        draw_proposal(draw, fixture)
        should, ticket = fixture.mirrored(), fixture.save(step)
        insert_and_check(draw, fixture)  # work after the output is not in the mirror
        fixture.take(ticket)
        fixture.check_mirror(should, "a step was taken late")
        free_ended(fixture)


@guarantee(9)
@examples(0.5)
def test_g09_roles_other_than_mixed_enter_alike(kit: Kit, draw: Draw) -> None:
    fixture = World(kit, draw(sizes(), "sizes"))
    role = draw(st.sampled_from(SplitRole), "role")
    tasks = draw_batch(draw, fixture, (TaskKind.PREFILL,), least=1, role=role)
    fixture.enter(tasks)
    fixture.check(f"insert_tasks({text_of(tasks)})")


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
        tasks.append(structs.replace(task, blocks=cast(Sequence[int], lent[-1])))
    with kit.held(fixture.stream):
        tickets = [fixture.insert(tasks[:3]), fixture.insert(tasks[3:])]
        for ids in lent:
            ids[...] = -77
    for ticket in tickets:
        arrive(ticket)
    fixture.check("the callers' block ids were overwritten")


@guarantee(9, also=(11, 12, 19, 20, 22))
def test_g09_all_hooks_in_any_order_agree_with_the_model(kit: Kit) -> None:
    class Machine(WorkerMachine):
        pass

    Machine.kit = kit
    seed(kit.effort.seed)(Machine)
    settings = kit.effort.settings(2.0)
    explore(kit.bound.name, Results(), lambda: run_state_machine_as_test(Machine, settings=settings))
