"""The guards of the core: where each is, what it guarantees, and which tests fail without it."""

from __future__ import annotations

from guard import CORE, QUEUED, Guard
from handover_guards import HANDOVER_GUARDS

BASE = "core/tests/devices/test_asynchronous.py::"


GUARDS: tuple[Guard, ...] = (
    # -- policy ------------------------------------------------------------------------------------------------
    Guard(
        "an invalid batch is refused",
        "G8",
        CORE + "runtime/policy.py",
        "            if found := problems(state.host_table, batch):\n                raise InvalidBatch(found)\n",
        "",
        ("test_g08_an_invalid_batch_changes_nothing_and_every_problem_is_listed",),
    ),
    Guard(
        "a group of one does not communicate",
        "G15",
        CORE + "runtime/policy.py",
        "        if len(group.ranks) == 1:\n            return DONE\n",
        "",
        ("test_g15_a_group_of_one_communicates_nothing",),
    ),
    Guard(
        "only the first rank sends",
        "G17",
        CORE + "runtime/policy.py",
        "        first = step.group.is_first\n",
        "        first = True\n",
        ("test_g17_a_rank_that_is_not_the_first_sends_nothing",),
    ),
    Guard(
        "the clean-up is in a finally",
        "G18",
        CORE + "runtime/policy.py",
        "                device.submit(state.cleanup_plan(order), stream)\n",
        "",
        ("test_g18_every_rank_cleans_up_also_where_nothing_is_sent",),
    ),
    Guard(
        "an unusable state is refused",
        "G14",
        CORE + "runtime/policy.py",
        'cure="use its own device", argument="state")\n    if state.unusable:\n        state.check_usable()\n',
        'cure="use its own device", argument="state")\n',
        ("test_g14_a_state_that_ranks_disagree_about_is_refused_by_every_hook",),
    ),
    Guard(
        "memory of another device is refused",
        "G26",
        CORE + "runtime/policy.py",
        "        if view.memory.device is not device:\n",
        "        if False:\n",
        ("test_g26_memory_of_another_opened_device_is_refused",),
    ),
    Guard(
        "a step's slots are checked",
        "G21",
        CORE + "runtime/policy.py",
        '    state.check_slots(step.spans[state.name], "step")\n',
        "",
        ("test_g21_what_the_host_can_see_out_of_bounds_raises_at_the_call",),
    ),
    Guard(
        "a batch waits for its slots' readers",
        "G28",
        CORE + "runtime/policy.py",
        "        state.wait_for_readers_of_batch(batch, stream)\n",
        "",
        ("test_g28_a_slot_is_not_written_before_its_last_reader_has_passed",),
        QUEUED,
    ),
    # -- the host table and a batch's checks -------------------------------------------------------------------
    Guard(
        "only who is in a slot can leave it",
        "G8",
        CORE + "slots/checks.py",
        "    if not _holds(host_table, row):\n",
        "    if False:\n",
        ("test_g08_only_who_is_in_a_slot_can_leave_it",),
    ),
    Guard(
        "a slot that is held is not entered",
        "G8",
        CORE + "slots/checks.py",
        "    if holder is not None and slot not in left:\n",
        "    if False:\n",
        ("test_g08_a_slot_that_is_held_is_not_entered",),
    ),
    Guard(
        "negative block ids are found",
        "G8",
        CORE + "slots/checks.py",
        "int(np.minimum.reduce(tasks.blocks)) < 0\n",
        "False\n",
        ("core/tests/test_insertion.py::test_g08_one_bad_task_is_found_however_many_there_are",),
    ),
    Guard(
        "the host table knows what a step appended",
        "G11",
        CORE + "slots/host_table.py",
        "        row[slots] = np.minimum(row[slots] + most, self.sizes.max_model_len)\n",
        "",
        (
            "test_g11_nothing_of_the_former_request_is_left_in_a_slot",
            "test_g11_every_row_is_reset_to_the_largest_length_written_before",
        ),
    ),
    # -- insertion ---------------------------------------------------------------------------------------------
    Guard(
        "tails of rows are reset",
        "G11",
        CORE + "slots/insertion.py",
        "            if (stale := length * size - nbytes) > 0:\n",
        "            if (stale := 0) > 0:\n",
        ("test_g11_nothing_of_the_former_request_is_left_in_a_slot",),
    ),
    # -- staging -----------------------------------------------------------------------------------------------
    Guard(
        "a staging block waits for its fence",
        "G3",
        CORE + "devices/staging.py",
        "        while self.entries and self.entries[0][2].done():\n",
        "        while self.entries:\n",
        ("core/tests/test_staging.py::test_g03_a_span_is_never_handed_out_under_a_fence",),
    ),
    Guard(
        "a ring that stays full raises",
        "G3",
        CORE + "devices/staging.py",
        "        if not segment.entries[0][2].wait(self.deadline):\n",
        "        if not segment.entries.popleft()[2].wait(self.deadline) and False:\n",
        ("core/tests/test_staging.py::test_g03_a_ring_that_stays_full_raises_with_nothing_taken",),
    ),
    # -- the asynchronous base -----------------------------------------------------------------------------------
    Guard(
        "a write waits for copies out of the same bytes",
        "G22",
        CORE + "devices/tickets.py",
        "            if memory is None or any(begin < stop and start < end for start, stop in parts):\n",
        "            if False:\n",
        (BASE + "test_g22_a_write_waits_for_copies_of_the_same_bytes_by_any_view",),
    ),
    Guard(
        "a host block waits for its copy",
        "G23",
        CORE + "devices/blocks.py",
        "        self.blocks.give_after(self.event, self.block)\n",
        "        self.blocks.give(self.block)\n",
        (BASE + "test_blocks_of_unread_copies_are_released_after_the_copies",),
    ),
    Guard(
        "memory waits for the last work of every stream",
        "G5",
        CORE + "devices/retired_memory.py",
        "events = [event for event in self.device.last.values() if not event.passed]",
        "events = ()",
        (BASE + "test_dropped_memory_is_freed_once_its_work_is_done",),
    ),
    Guard(
        "what a failed call has staged keeps its fence",
        "G3",
        CORE + "devices/asynchronous.py",
        "            self.staging.fence(span, self.mark(stream))  # a part of it may be in flight\n",
        "            self.staging.drop(span)\n",
        (BASE + "test_closing_waits_for_a_failed_calls_work_on_the_stream",),
    ),
    Guard(
        "a fault ends the device",
        "G26",
        CORE + "devices/health.py",
        "            self.fault, self.unusable = error, True\n",
        "            pass\n",
        ("core/tests/devices/test_ends.py::test_a_fault_sticks_to_its_device_alone",),
    ),
    # -- output ------------------------------------------------------------------------------------------------
    Guard(
        "counts and drafts are in bounds",
        "G21",
        CORE + "output/rows.py",
        "wrong = strange | (held & ((counts < 0) | (counts > most) | (drafts < 0) | (drafts > "
        "snapshot.max_draft_tokens)))",
        "wrong = strange",
        ("test_g21_a_draft_count_out_of_bounds_is_an_error_of_its_row",),
    ),
    Guard(
        "the output is of the broadcast's step",
        "G14",
        CORE + "output/ticket.py",
        "                    self._check.verify(data)\n",
        "                    pass\n",
        ("test_g14_the_output_of_a_slice_with_another_header_is_not_sent",),
    ),
    # -- collectives -------------------------------------------------------------------------------------------
    Guard(
        "ranks compare their terms",
        "G14",
        CORE + "ranks/channel.py",
        "        if found:\n            error = StateUnusable(",
        "        if False:\n            error = StateUnusable(",
        ("test_g14_what_ranks_hold_unequal_is_found_before_the_first_collective",),
    ),
    Guard(
        "a slice's header is compared",
        "G14",
        CORE + "ranks/channel.py",
        "error = None if header == self._expected else self._channel.disagreement(header, self._expected)",
        "error = None",
        ("test_g14_a_rank_that_missed_a_broadcast_is_found_by_the_header",),
    ),
    # -- a step's update ---------------------------------------------------------------------------------------
    Guard(
        "a count out of bounds appends nothing",
        "G21",
        CORE + "slots/update.py",
        "        gives = gives & ~bad\n",
        "",
        ("test_g21_what_only_the_device_knows_is_checked_before_encoding",),
    ),
    Guard(
        "a full row ends its request",
        "G9",
        CORE + "slots/update.py",
        '    full = (generated >= column["max_dec_len"][slots]) | (total >= sizes.max_model_len)\n',
        '    full = generated >= column["max_dec_len"][slots]\n',
        ("test_g09_a_full_row_ends_its_request_whatever_it_might_still_be_given",),
    ),
    # -- conversion --------------------------------------------------------------------------------------------
    Guard(
        "ints that do not fit are refused",
        "G6",
        CORE + "memory/convert.py",
        "        _refuse_where(out != native, native, source, dtype)  # NumPy compares mixed signs by value\n",
        "        pass\n",
        ("test_g06_arrays_are_converted_by_value_at_the_edges_of_every_type",),
    ),
    Guard(
        "floats that would overflow are refused",
        "G6",
        CORE + "memory/convert.py",
        "            _refuse_where(np.isfinite(values) & (np.abs(values) >= limit), native, source, dtype)\n",
        "            pass\n",
        ("test_g06_arrays_are_converted_by_value_at_the_edges_of_every_type",),
    ),
    Guard(
        "counts of elements must fit",
        "G6",
        CORE + "memory/convert.py",
        "    if count != wanted:\n",
        "    if False:\n",
        ("test_g06_a_wrong_count_is_refused_and_both_shapes_are_named",),
    ),
    *HANDOVER_GUARDS,
)
