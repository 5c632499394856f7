"""The guards of KV transfer, in the form of :mod:`guard_table`."""

from __future__ import annotations

from guard import CORE, QUEUED, Guard

HANDED = "core/tests/handover/test_transfer.py::"

HANDOVER_GUARDS: tuple[Guard, ...] = (
    Guard(
        "a seal must say what has come",
        "G29",
        CORE + "handover/promises.py",
        "        if wrong := incomplete(promise, handover, message.digest):\n",
        '        if wrong := "":\n',
        ("test_g29_a_seal_of_another_count_is_no_arrival", "test_g29_what_was_changed_on_its_way_is_no_arrival"),
    ),
    Guard(
        "a block's checksum is compared",
        "G29",
        CORE + "handover/promises.py",
        "            if crc != told:\n",
        "            if False:\n",
        (HANDED + "test_what_was_changed_on_the_way_is_rejected_and_never_used",),
    ),
    Guard(
        "who misses a number takes nothing more",
        "G29",
        CORE + "handover/transfer.py",
        "        if number == source.number + 1:\n",
        "        if True:\n",
        (HANDED + "test_messages_that_are_lost_are_missed_and_said_again",),
    ),
    Guard(
        "an end waits for the writes that were begun",
        "G30",
        CORE + "handover/promises.py",
        "            if may_be_written(promise):\n",
        "            if False:\n",
        ("test_g30_no_end_is_told_while_blocks_are_being_written",),
        QUEUED,
    ),
    Guard(
        "an attempt that comes late is refused",
        "G30",
        CORE + "handover/promises.py",
        "        if key.attempt <= self._attempts.get(key.request_id, -1):\n",
        "        if False:\n",
        ("test_g30_an_older_attempt_is_fenced_off",),
    ),
    Guard(
        "the sender's fingerprint is compared",
        "G31",
        CORE + "handover/transfer.py",
        '        check_facts(self._facts, source.facts, source.url, "source")\n',
        "",
        ("test_g31_a_fact_that_differs_is_named_before_the_first_byte",),
    ),
    Guard(
        "a promise that nobody seals ends",
        "G32",
        CORE + "handover/transfer.py",
        "            elif is_over(promise.since, now, self._patience.deadline):\n",
        "            elif False:\n",
        ("core/tests/handover/test_silence.py::test_a_promise_that_nobody_seals_ends_although_its_source_lives",),
    ),
)
