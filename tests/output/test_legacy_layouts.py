"""The six legacy messages: golden bytes by hand from the tables, and drawn records against the legacy reader."""

from __future__ import annotations

import importlib.util
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from hal_core.errors import InvalidValue
from hal_core.records import FinishReason, OutputRecord, SlotStatus
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.transport.sysv_layouts import Variant, layout_named, messages

_spec = importlib.util.spec_from_file_location("legacy_reader", Path(__file__).with_name("legacy_reader.py"))
legacy = importlib.util.module_from_spec(_spec)
sys.modules.setdefault("legacy_reader", legacy)
_spec.loader.exec_module(legacy)

TOKEN, NONE, PREEMPTED, ABORTED = SlotStatus.TOKEN, SlotStatus.NONE, SlotStatus.PREEMPTED, SlotStatus.ABORTED
ERROR, RECOVERED = SlotStatus.ERROR, SlotStatus.RECOVERED


def record(rows, *, columns=None, first=(), drafts=None):
    """A record of rows (status, tokens, finish), alternatives counted up from each token."""
    tokens = np.array([token for _, row, _ in rows for token in row], np.int64)
    optional = {}
    if columns:
        ids = tokens[:, None] + np.arange(columns)
        optional["logprob_token_ids"] = np.ascontiguousarray(ids)
        optional["logprobs"] = np.ascontiguousarray(-(ids % 7).astype(np.float32) / 2)
        optional["ranks"] = (tokens % 5).astype(np.int32)
    if drafts is not None:
        optional["draft_counts"] = np.array([len(row) for row in drafts], np.int32)
        optional["drafts"] = np.array([token for row in drafts for token in row], np.int64)
    n = len(rows)
    return OutputRecord(
        3,
        tuple(f"r{row}" for row in range(n)),
        np.array([status for status, _, _ in rows], np.uint8),
        np.array([finish for _, _, finish in rows], np.uint8),
        np.zeros(n, np.int64),
        np.array([len(row) for _, row, _ in rows], np.int32),
        tokens,
        np.array([row in first for row in range(n)], np.bool_),
        **optional,
    )


def told(source, batch_ids, size, name, variant=None, slots=None):
    variant = variant or Variant(slots=slots or 512)
    return [message.data for message in messages(source, batch_ids, size, layout_named(name, slots), variant)]


def golden(nbytes, parts):
    """Zeros, and at each byte offset the numbers given."""
    data = bytearray(nbytes)
    for offset, numbers in parts.items():
        kind = "f" if any(isinstance(number, float) for number in numbers) else "i"
        struct.pack_into(f"={len(numbers)}{kind}", data, offset, *numbers)
    return bytes(data)


GO, STOP, OVER = FinishReason.NONE, FinishReason.STOP, FinishReason.ERROR


def test_golden_save_output():
    source = record([(TOKEN, [101], GO), (NONE, [], GO), (PREEMPTED, [], GO), (TOKEN, [2**31 - 1], STOP)])
    assert told(source, [0, 1, 2, 4], 5, "plain") == [golden(2_056, {0: [1, 5, 101, -1, -9, -1, 2**31 - 1]})]


def test_golden_save_output_topk():
    source = record([(TOKEN, [7], STOP), (PREEMPTED, [], GO), (RECOVERED, [], OVER)], columns=3)
    expected = golden(
        88_072,
        {
            0: [-1, 3, 7, 8, 9, *[-1] * 18],
            92: [-9] * 21,
            176: [-3] * 21,
            43_016: [-0.0, -0.5, -1.0],
            86_024: [2],
        },
    )
    assert told(source, [0, 1, 2], 3, "topk") == [expected]


def test_golden_speculate_save_output():
    source = record([(TOKEN, [1, 2, 3], GO), (PREEMPTED, [], GO), (NONE, [], GO), (ERROR, [], OVER), (TOKEN, [9], GO)])
    expected = golden(7_176, {0: [1, 6, 3, -9, 0, -3, 0, 1], 1_032: [1, 2, 3], 1_032 + 24 * 5: [9]})
    assert told(source, [0, 1, 2, 3, 5], 6, "speculative") == [expected]


@pytest.mark.parametrize(("slots", "nbytes", "begin"), [(512, 530_448, 2_060), (256, 265_232, 1_036)])
@pytest.mark.parametrize(("packed", "flag"), [(False, 3), (True, 3 | 2 << 8)])
def test_golden_speculate_save_output_topk(slots, nbytes, begin, packed, flag):
    source = record([(TOKEN, [4, 5], GO), (PREEMPTED, [], GO)], columns=2)
    expected = golden(
        nbytes,
        {
            0: [77, flag, 2, 2, -9],
            begin: [4, 5, *[-1] * 19, 5, 6, *[-1] * 19],
            begin + 504: [-2.0, -2.5],
            begin + 504 + 84: [-2.5, -3.0],
            begin + 1_008: [4, 0],
        },
    )
    variant = Variant(77, packed, slots)
    assert told(source, [0, 1], 2, "speculative-topk", variant, slots) == [expected]


def test_golden_mtp_save_first_token():
    source = record([(TOKEN, [11], GO), (NONE, [], GO)], first=[0], drafts=[[12], []])
    assert told(source, [0, 1], 2, "speculative") == [golden(7_176, {0: [1, 2, 2, 0], 1_032: [11, 12]})]


def test_golden_mtp_save_first_token_with_topk():
    source = record([(TOKEN, [11], STOP), (NONE, [], STOP)], columns=2, first=[0], drafts=[[13], []])
    expected = golden(
        530_448,
        {0: [-1, 3, 2, 2, 0], 2_060: [11, 12, *[-1] * 19, 13, *[-1] * 20], 2_564: [-2.0, -2.5], 3_068: [1]},
    )
    assert told(source, [0, 1], 2, "speculative-topk") == [expected]


def test_g19_a_slot_that_tells_of_two_requests_takes_two_messages_and_the_stop_sign_comes_last():
    source = record([(PREEMPTED, [], GO), (TOKEN, [5], STOP), (TOKEN, [6], STOP)])
    first, second = map(legacy.parse_plain, told(source, [0, 0, 1], 2, "plain"))
    assert first == {"stop": 1, "tokens": [-9, 6]}
    assert second == {"stop": -1, "tokens": [5, -1]}


numbers = st.integers(0, 2**31 - 8)  # alternatives are counted up from a token
STATUS_WORDS = {NONE: (-1, 0), ABORTED: (-1, 0), PREEMPTED: (-9, -9), ERROR: (-3, -3), RECOVERED: (-3, -3)}
FINISHES = {ABORTED: FinishReason.ABORT, ERROR: OVER, RECOVERED: OVER}


@st.composite
def batches(draw, most):
    """Rows in some slots of a batch, and the batch's size."""
    size = draw(st.integers(1, 9))
    at = sorted(draw(st.sets(st.integers(0, size - 1), min_size=1)))
    rows = []
    for _ in at:
        status = draw(st.sampled_from(SlotStatus))
        tokens = draw(st.lists(numbers, min_size=1, max_size=most)) if status is TOKEN else []
        rows.append((status, tokens, FINISHES.get(status, GO)))
    return rows, at, size


@settings(deadline=None)
@given(batches(1), st.booleans())
def test_the_legacy_reader_reads_plain_and_topk(batch, topk):
    rows, at, size = batch
    columns = 4 if topk else None
    (data,) = told(record(rows, columns=columns), at, size, "topk" if topk else "plain")
    got = (legacy.parse_topk if topk else legacy.parse_plain)(data)
    by_id = dict(zip(at, rows, strict=True))
    for i in range(size):
        status, tokens, _ = by_id.get(i, (NONE, [], GO))
        word = tokens[0] if tokens else STATUS_WORDS[status][0]
        if not topk:
            assert got["tokens"][i] == word
        elif tokens:
            assert got["tokens"][i] == [(word + column) for column in range(4)] + [-1] * 17
            assert got["ranks"][i] == word % 5
        else:
            assert got["tokens"][i] == [word] * 21
            assert got["scores"][i] == [0.0] * 21
    goes_on = any(status in (TOKEN, NONE) for status, _, _ in rows)
    assert got["stop"] == (1 if goes_on else -1)


@settings(deadline=None)
@given(batches(6), st.sampled_from([None, 256, 512]))
def test_the_legacy_reader_reads_speculative_messages(batch, slots):
    rows, at, size = batch
    if slots:
        (data,) = told(record(rows, columns=2), at, size, "speculative-topk", slots=slots)
        got = legacy.parse_speculative_topk(data, slots)
    else:
        (data,) = told(record(rows), at, size, "speculative")
        got = legacy.parse_speculative(data)
    by_id = dict(zip(at, rows, strict=True))
    for i in range(size):
        status, tokens, _ = by_id.get(i, (NONE, [], GO))
        assert got["counts"][i] == (len(tokens) if tokens else STATUS_WORDS[status][1])
        said = [row[0] for row in got["tokens"][i]] if slots else got["tokens"][i]
        assert said == tokens


@pytest.mark.parametrize(
    ("source", "ids", "size", "name", "message"),
    [
        (record([(TOKEN, [5], GO)]), [0], 513, "plain", "a batch of 513, at most 512"),
        (record([(TOKEN, [5], GO)]), [0], 257, "speculative", "a batch of 257, at most 256"),
        (record([(TOKEN, [5, 6], GO)]), [0], 1, "plain", "r0: 2 tokens and drafts, at most 1"),
        (record([(TOKEN, [5] * 7, GO)]), [0], 1, "speculative", "7 tokens and drafts, at most 6"),
        (record([(TOKEN, [1 << 31], GO)]), [0], 1, "plain", "no int32"),
        (record([(TOKEN, [-1], GO)]), [0], 1, "plain", "no int32"),
        (record([(TOKEN, [2**31 - 2], GO)], columns=3), [0], 1, "topk", "an alternative is no int32"),
        (record([(TOKEN, [5], GO)], columns=22), [0], 1, "topk", "22 columns"),
        (record([(TOKEN, [5], GO)], columns=2), [0], 1, "plain", "log-probabilities have no place"),
        (record([(TOKEN, [5], GO)], first=[0], drafts=[[1]]), [0], 1, "plain", "2 tokens and drafts"),
        (record([(TOKEN, [5], GO)], drafts=[[1]]), [0], 1, "speculative", "without a first token"),
        (record([(TOKEN, [5], GO)]), [1], 1, "plain", "batch ids"),
        (record([(TOKEN, [5], GO)] * 2), [0], 1, "plain", "batch ids"),
    ],
)
def test_g21_what_a_layout_cannot_say_is_refused_before_anything_is_sent(source, ids, size, name, message):
    with pytest.raises(InvalidValue, match=message):
        told(source, ids, size, name)


def test_a_record_without_rows_needs_no_message():
    assert told(record([]), [], 4, "plain") == []
