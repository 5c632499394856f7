"""``insert_tasks``: G9, G11 and G12; G8 is in ``test_invalid_batches.py``, G10 in ``test_submissions.py``."""

from __future__ import annotations

from typing import cast

import numpy as np
from hal_core.output.ticket import OutputTicket
from hal_core.slots.admission import Request, SamplingParams
from hal_core.slots.fields import SplitRole, StateConfig
from hal_core.slots.tasks import Task, TaskKind
from hypothesis import strategies as st

from .draw.requests import sizes
from .fixtures.batches import ALL, draw_batch, told
from .fixtures.state import StateFixture
from .fixtures.stepping import draw_proposal, draw_sampling, draw_step, free_ended, run_step
from .harness.backdoor import PATIENCE
from .harness.guarantees import guarantee
from .kit import Draw, Kit, examples


def insert_and_check(draw: Draw, rig: StateFixture, kinds: tuple[TaskKind, ...] = ALL, *, least: int = 0) -> list[Task]:
    """Insert a valid batch, and compare every byte of the state."""
    __tracebackhide__ = True
    tasks = draw_batch(draw, rig, kinds, least=least)
    rig.insert(tasks).wait(PATIENCE)
    rig.check(f"insert_tasks({told(tasks)})")
    return tasks


@guarantee(9)
@examples()
def test_g09_every_field_of_every_slot_is_as_the_model_says(kit: Kit, draw: Draw) -> None:
    rig = StateFixture(kit, draw(sizes(), "sizes"))
    for _ in range(draw(st.integers(1, 4), "rounds")):
        insert_and_check(draw, rig)
        rig.output(run_step(draw, rig))
        rig.check("save_output")
        free_ended(rig)


@guarantee(9)
@examples(0.5)
def test_g09_new_requests_enter_many_slots_at_once(kit: Kit, draw: Draw) -> None:
    rig = StateFixture(kit, draw(sizes(most_slots=12), "sizes"))
    insert_and_check(draw, rig, (TaskKind.PREFILL,), least=rig.sizes.num_slots)


@guarantee(9)
@examples(0.5)
def test_g09_requests_leave_go_on_and_enter_in_one_batch(kit: Kit, draw: Draw) -> None:
    rig = StateFixture(kit, draw(sizes(), "sizes"))
    insert_and_check(draw, rig, (TaskKind.PREFILL, TaskKind.REMOTE_PREFILL), least=1)
    rig.output(run_step(draw, rig))
    insert_and_check(draw, rig, least=rig.sizes.num_slots)


@guarantee(9)
@examples(0.5)
def test_g09_a_step_changes_only_what_its_documentation_says(kit: Kit, draw: Draw) -> None:
    rig = StateFixture(kit, draw(sizes(), "sizes"))
    insert_and_check(draw, rig, (TaskKind.PREFILL, TaskKind.REMOTE_PREFILL), least=1)
    for _ in range(draw(st.integers(1, 6), "steps")):
        run_step(draw, rig)  # compares every byte after update_inputs


@guarantee(9)
def test_g09_a_full_row_ends_its_request_whatever_it_might_still_be_given(kit: Kit) -> None:
    rig = StateFixture(kit, StateConfig(num_slots=2, max_model_len=4, block_size=2))
    tasks = []
    for slot, prompt in enumerate(([1, 2, 3], [1])):
        request = rig.admit(Request(rig.new_name(), prompt, SamplingParams(max_tokens=9)))
        tasks.append(Task(TaskKind.PREFILL, slot, request, 0, len(prompt), [2 * slot, 2 * slot + 1]))
    rig.insert(tasks).wait(PATIENCE)
    for number in range(2):
        rig.poke({"sampled_token_ids": np.array([5, 6])})
        rig.update_inputs(rig.step([0, 1])).wait(PATIENCE)
        rig.check(f"step {number}, after which a row is full")


@guarantee(9)
@examples(0.5)
def test_g09_one_batch_serves_two_states_with_their_own_slots(kit: Kit, draw: Draw) -> None:
    size = draw(sizes(), "sizes")
    target, proposer = StateFixture(kit, size), StateFixture(kit, size, name="proposer")
    for rig in (target, proposer):
        insert_and_check(draw, rig, least=1)
    target.check("insert_tasks into another state")


@guarantee(9)
def test_g09_slots_beside_a_named_one_keep_what_the_last_step_wrote(kit: Kit) -> None:
    n = 9  # the last flag is alone in its word
    rig = StateFixture(kit, StateConfig(num_slots=n, max_model_len=8, block_size=2))
    tasks = []
    for slot in range(n):
        request = rig.admit(Request(rig.new_name(), [1, 2], SamplingParams(max_tokens=1 + slot % 3)))
        tasks.append(Task(TaskKind.PREFILL, slot, request, 0, 2, [slot]))
    rig.insert(tasks).wait(PATIENCE)
    for slot in range(n):
        rig.poke({"sampled_token_ids": 40 + np.arange(n)})
        rig.update_inputs(rig.step(range(n))).wait(PATIENCE)
        rig.insert([Task(TaskKind.MORE_BLOCKS, slot, tasks[slot].request, blocks=[20 + slot], first_block=1)])
        rig.check(f"a step, and one more block for slot {slot}")


@guarantee(11)
@examples()
def test_g11_nothing_of_the_former_request_is_left_in_a_slot(kit: Kit, draw: Draw) -> None:
    rig = StateFixture(kit, draw(sizes(most_slots=3), "sizes"))
    for _ in range(draw(st.integers(2, 4), "requests a slot")):
        free_ended(rig)
        insert_and_check(draw, rig, (TaskKind.PREFILL, TaskKind.REMOTE_PREFILL, TaskKind.PREEMPTED), least=1)
        rig.output(run_step(draw, rig))


@guarantee(11)
def test_g11_every_row_is_reset_to_the_largest_length_written_before(kit: Kit) -> None:
    rig = StateFixture(
        kit,
        StateConfig(
            num_slots=2, max_model_len=24, block_size=2, max_draft_tokens=3, max_bad_words=4, max_stop_sequences=3
        ),
    )
    long = SamplingParams(max_tokens=9, bad_words=(1, 2, 3, 4), stop_sequences=((1, 2), (3,), (4, 5)))
    first = rig.admit(Request("long", list(range(1, 18)), long))
    rig.insert([Task(TaskKind.PREFILL, 0, first, 0, 17, list(range(9)))]).wait(PATIENCE)
    rig.check("a long request entered")
    rig.poke_cell("stop_flags", 0, True)
    rig.release([0])
    middle = rig.admit(Request("middle", [7, 8, 9], SamplingParams(bad_words=(6,), stop_sequences=((6,),))))
    rig.insert([Task(TaskKind.REMOTE_PREFILL, 0, middle, 3, blocks=[3, 4], first_token=5, drafts=[1, 2, 3])]).wait(
        PATIENCE
    )
    rig.check("a shorter request followed")
    short = rig.admit(Request("short", [6]))
    left = Task(TaskKind.ABORTED, 0, middle)
    rig.insert([left, Task(TaskKind.PREFILL, 0, short, 0, 1, [8])]).wait(PATIENCE)
    rig.check("a short request followed in one batch")
    row = rig.bytes()[rig.state.layout.fields["block_tables"].offset :][:8].view(np.int32)
    assert row[1] == -1, f"entry 1 of the block table is {row[1]}, the former request's, but should be reset to -1"


@guarantee(12)
@examples()
def test_g12_the_decode_role_goes_on_after_the_first_token(kit: Kit, draw: Draw) -> None:
    rig = StateFixture(kit, draw(sizes(), "sizes"))
    tasks = insert_and_check(draw, rig, (TaskKind.REMOTE_PREFILL,), least=1)
    step = draw_step(draw, rig)
    draw_sampling(draw, rig, step)
    rig.update_inputs(step).wait(PATIENCE)
    rig.check("the first step after a handoff")
    given = {task.request.request_id: task.request.generated + 1 for task in tasks}
    for row in rig.output(step):
        if row.tokens:
            should = given[row.request_id]
            assert row.position == should, f"{row.request_id} continues at {row.position}, but should at {should}"


@guarantee(12)
@examples(0.5)
def test_g12_exactly_the_given_drafts_are_written(kit: Kit, draw: Draw) -> None:
    rig = StateFixture(kit, draw(sizes(drafts=True), "sizes"))
    for _ in range(2):
        tasks = insert_and_check(draw, rig, (TaskKind.REMOTE_PREFILL, TaskKind.ABORTED), least=1)
        drafts = [task for task in tasks if task.kind is TaskKind.REMOTE_PREFILL]
        place = rig.state.layout.fields["draft_tokens"]
        for task in drafts:
            begin = place.offset + task.slot * place.stride
            got = rig.bytes()[begin : begin + place.stride].view(np.int64).tolist()
            should = [*task.drafts, *[-1] * (place.width - len(task.drafts))]
            assert got == should, f"slot {task.slot} holds drafts {got}, but should hold {should}"
        rig.output(rig.step(sorted(rig.model.leavers)))


@guarantee(12)
@examples(0.5)
def test_g12_the_host_mirror_is_as_of_the_last_step_whose_output_was_taken(kit: Kit, draw: Draw) -> None:
    rig = StateFixture(kit, draw(sizes(), "sizes"))
    for _ in range(draw(st.integers(1, 3), "steps")):
        insert_and_check(draw, rig)
        step = draw_step(draw, rig)
        draw_sampling(draw, rig, step)
        rig.update_inputs(step).wait(PATIENCE)
        draw_proposal(draw, rig)
        should = {name: cells.copy() for name, cells in rig.model.cells.items()}
        ticket = cast(OutputTicket, rig.save(step))
        insert_and_check(draw, rig)  # work after the output is not in the mirror
        rig.state.take(ticket)
        for name, column in rig.state.mirror.items():
            assert (column == should[name]).all(), (
                f"mirror[{name!r}] is {column.tolist()}, but should be {should[name].tolist()}"
            )
        free_ended(rig)


@guarantee(9)
@examples(0.5)
def test_g09_roles_other_than_mixed_enter_alike(kit: Kit, draw: Draw) -> None:
    rig = StateFixture(kit, draw(sizes(), "sizes"))
    role = draw(st.sampled_from(SplitRole), "role")
    tasks = draw_batch(draw, rig, (TaskKind.PREFILL,), least=1, role=role)
    rig.insert(tasks).wait(PATIENCE)
    rig.check(f"insert_tasks({told(tasks)})")
