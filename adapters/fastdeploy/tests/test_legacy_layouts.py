"""The six legacy messages: golden bytes by hand from the tables, and drawn records against the legacy reader."""

import struct

import numpy as np
import pytest
from hal_core.errors import InvalidValue
from hal_core.frames import envelope as frames
from hal_core.output.records import OutputRecord, SlotStatus
from hal_core.slots.fields import FinishReason
from hal_fastdeploy.sysv.layouts import Variant, layout_named, messages
from hypothesis import given, settings
from hypothesis import strategies as st

from . import legacy_reader as legacy

TOKEN, NONE, PREEMPTED, ABORTED = SlotStatus.TOKEN, SlotStatus.NONE, SlotStatus.PREEMPTED, SlotStatus.ABORTED
ERROR, RECOVERED = SlotStatus.ERROR, SlotStatus.RECOVERED


def record(rows, *, columns=None, first=(), drafts=None, draft_columns=None):
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
    if draft_columns:
        ids = optional["drafts"][:, None] + np.arange(draft_columns)
        optional["draft_logprob_token_ids"] = np.ascontiguousarray(ids)
        optional["draft_logprobs"] = np.ascontiguousarray(-(ids % 5).astype(np.float32) / 4)
        optional["draft_ranks"] = (optional["drafts"] % 3).astype(np.int32)
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


def encoded(source, batch_ids, size, name, variant=None, slots=None):
    variant = variant or Variant(slots=slots or 512)
    return [message.data for message in messages(source, batch_ids, size, layout_named(name, slots), variant)]


def golden(nbytes, parts):
    """Zeros, and at each byte offset the numbers given."""
    data = bytearray(nbytes)
    for offset, numbers in parts.items():
        kind = "f" if any(isinstance(number, float) for number in numbers) else "i"
        struct.pack_into(f"={len(numbers)}{kind}", data, offset, *numbers)
    return bytes(data)


GO, STOP, OVER, GONE = FinishReason.NONE, FinishReason.STOP, FinishReason.ERROR, FinishReason.ABORT


def test_golden_save_output():
    source = record([(TOKEN, [101], GO), (NONE, [], GO), (PREEMPTED, [], GO), (TOKEN, [2**31 - 1], STOP)])
    assert encoded(source, [0, 1, 2, 4], 5, "plain") == [golden(2_056, {0: [1, 5, 101, -1, -9, -1, 2**31 - 1]})]


def test_golden_save_output_topk_before_release_2_6():
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
    assert encoded(source, [0, 1, 2], 3, "topk", Variant(packed=False)) == [expected]


def test_golden_topk_today_takes_the_columns_from_the_second_word():
    source = record([(TOKEN, [7], STOP), (PREEMPTED, [], GO), (TOKEN, [14], GO), (ABORTED, [], GONE)], columns=3)
    expected = golden(
        88_072,
        {
            0: [1, 5 | 3 << 16],
            8: [7, 8, 9, -9, -9, -9, -1, -1, -1, 14, 15, 16, -9, -9, -9],
            43_016: [-0.0, -0.5, -1.0],
            43_016 + 4 * 9: [-0.0, -0.5, -1.0],
            86_024: [2, 0, 0, 4],
        },
    )
    assert encoded(source, [0, 1, 3, 4], 5, "topk") == [expected]


def test_golden_topk_today_without_log_probabilities_has_one_column():
    source = record([(TOKEN, [7], STOP), (ABORTED, [], GONE)])
    assert encoded(source, [0, 1], 2, "topk") == [golden(88_072, {0: [-1, 2 | 1 << 16, 7, -9]})]


def test_golden_speculate_save_output():
    source = record([(TOKEN, [1, 2, 3], GO), (PREEMPTED, [], GO), (NONE, [], GO), (ERROR, [], OVER), (TOKEN, [9], GO)])
    expected = golden(7_176, {0: [1, 6, 3, -9, 0, -3, 0, 1], 1_032: [1, 2, 3], 1_032 + 24 * 5: [9]})
    assert encoded(source, [0, 1, 2, 3, 5], 6, "speculative") == [expected]


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
    assert encoded(source, [0, 1], 2, "speculative-topk", variant, slots) == [expected]


def test_golden_mtp_save_first_token():
    source = record([(TOKEN, [11], GO), (NONE, [], GO)], first=[0], drafts=[[12], []])
    assert encoded(source, [0, 1], 2, "speculative") == [golden(7_176, {0: [1, 2, 2, 0], 1_032: [11, 12]})]


def test_golden_mtp_save_first_token_with_topk():
    source = record([(TOKEN, [11], STOP), (NONE, [], STOP)], columns=2, first=[0], drafts=[[13], []])
    expected = golden(
        530_448,
        {0: [-1, 3 | 2 << 8, 2, 2, 0], 2_060: [11, 12, *[-1] * 19, 13, *[-1] * 20], 2_564: [-2.0, -2.5], 3_068: [1]},
    )
    assert encoded(source, [0, 1], 2, "speculative-topk") == [expected]


numbers = st.integers(0, 2**31 - 8)  # alternatives are counted up from a token
#: An abort has the word of a preemption: the engine knows which it asked for, and waits for this word.
STATUS_WORDS = {NONE: (-1, 0), ABORTED: (-9, -9), PREEMPTED: (-9, -9), ERROR: (-3, -3), RECOVERED: (-3, -3)}
FINISHES = {ABORTED: GONE, ERROR: OVER, RECOVERED: OVER}


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


@pytest.mark.parametrize("packed", [False, True])
def test_golden_log_probabilities_of_drafts(packed):
    """A second message, with flag 4; the stop sign is in the last one."""
    source = record([(TOKEN, [4], STOP), (PREEMPTED, [], GO)], columns=1, drafts=[[6, 9], []], draft_columns=2)
    target, draft = encoded(source, [0, 1], 2, "speculative-topk", Variant(packed=packed))
    first = {0: [1, 3 | 1 << 8 if packed else 3, 2, 1, -9], 2_060: [4, *[-1] * 20], 2_564: [-2.0], 3_068: [4]}
    assert target == golden(530_448, first)
    second = {
        0: [-1, 4 | 2 << 8 if packed else 4, 2, 2, 0],
        2_060: [6, 7, *[-1] * 19, 9, 10, *[-1] * 19],
        2_564: [-0.25, -0.5],
        2_564 + 84: [-1.0, -0.0],
        3_068: [0, 0],
    }
    assert draft == golden(530_448, second)


def test_a_first_token_keeps_its_draft_beside_the_drafts_own_message():
    source = record([(TOKEN, [4], GO), (TOKEN, [5], GO)], columns=1, first=[0], drafts=[[6], [7]], draft_columns=1)
    target, draft = map(legacy.parse_speculative_topk_today, encoded(source, [0, 1], 2, "speculative-topk"))
    assert ([row[0][0] for row in target["tokens"]], target["counts"]) == ([4, 5], [2, 1])
    assert (target["tokens"][0][1], draft["counts"]) == ([6], [1, 1])
    assert draft["tokens"] == [[[6]], [[7]]]


def test_drafts_alone_are_one_message():
    source = record([(NONE, [], GO), (NONE, [], GO)], drafts=[[6], []], draft_columns=1)
    (draft,) = encoded(source, [0, 1], 2, "speculative-topk")
    assert legacy.parse_speculative_topk_today(draft)["flag"] == 4


def test_the_drafts_of_a_slots_present_request_are_reported():
    source = record([(TOKEN, [5], STOP), (TOKEN, [6], GO)], drafts=[[7], [8, 9]], draft_columns=1)
    *_, draft = encoded(source, [0, 0], 1, "speculative-topk")
    assert legacy.parse_speculative_topk_today(draft)["tokens"] == [[[8], [9]]]


@settings(deadline=None)
@given(batches(6), st.sampled_from([256, 512]), st.integers(1, 21), st.booleans(), st.data())
def test_both_generations_of_readers_read_drafts(batch, slots, columns, packed, data):
    """From a record through a frame and back, then as FastDeploy's readers read it."""
    rows, at, size = batch
    rows = [(status, [token % (2**31 - 32) for token in tokens], finish) for status, tokens, finish in rows]
    drafts = [data.draw(st.lists(st.integers(0, 2**31 - 32), max_size=6)) for _ in rows]
    source = record(rows, columns=columns, drafts=drafts, draft_columns=columns)
    source = frames.decode(frames.encode(source, session=1, sender=2, sequence=3)).record
    variant = Variant(packed=packed, slots=slots)
    *_, last = encoded(source, at, size, "speculative-topk", variant, slots)
    assert last == legacy.build_speculative_topk(legacy.parse_speculative_topk(last, slots), slots)
    got = (legacy.parse_speculative_topk_today if packed else legacy.parse_speculative_topk)(last, slots)
    by_id, pad = dict(zip(at, drafts, strict=True)), [] if packed else [-1] * (21 - columns)
    assert (got["flag"], got["counts"]) == (4, [len(by_id.get(i, [])) for i in range(size)])
    for i in range(size):
        tokens = by_id.get(i, [])
        assert got["tokens"][i] == [[token + column for column in range(columns)] + pad for token in tokens]
        for row, token in zip(got["scores"][i], tokens, strict=True):
            assert row[:columns] == [-((token + column) % 5) / 4 for column in range(columns)]
        assert got["ranks"][i] == [token % 3 for token in tokens]


def test_g19_two_requests_of_one_slot_take_two_messages_with_stop_last():
    source = record([(PREEMPTED, [], GO), (TOKEN, [5], STOP), (TOKEN, [6], STOP)])
    first, second = map(legacy.parse_plain, encoded(source, [0, 0, 1], 2, "plain"))
    assert first == {"stop": 1, "tokens": [-9, 6]}
    assert second == {"stop": -1, "tokens": [5, -1]}


@settings(deadline=None)
@given(batches(1))
def test_the_legacy_reader_reads_plain(batch):
    rows, at, size = batch
    (data,) = encoded(record(rows), at, size, "plain")
    got = legacy.parse_plain(data)
    by_id = dict(zip(at, rows, strict=True))
    for i in range(size):
        status, tokens, _ = by_id.get(i, (NONE, [], GO))
        assert got["tokens"][i] == (tokens[0] if tokens else STATUS_WORDS[status][0])
    assert data == legacy.build(2_056, [(0, [got["stop"], size, *got["tokens"]])])
    goes_on = any(status in (TOKEN, NONE) for status, _, _ in rows)
    assert got["stop"] == (1 if goes_on else -1)


@settings(deadline=None)
@given(batches(1), st.integers(0, 21), st.booleans())
def test_both_generations_of_readers_read_topk(batch, columns, packed):
    rows, at, size = batch
    rows = [(status, [token % (2**31 - 32) for token in tokens], finish) for status, tokens, finish in rows]
    (data,) = encoded(record(rows, columns=columns), at, size, "topk", Variant(packed=packed))
    got = (legacy.parse_topk_today if packed else legacy.parse_topk)(data)
    assert data == legacy.build_topk(got)
    width = max(1, columns)
    by_id = dict(zip(at, rows, strict=True))
    for i in range(size):
        status, tokens, _ = by_id.get(i, (NONE, [], GO))
        pad = [] if packed else [-1] * (21 - width)
        if tokens:
            assert got["tokens"][i] == [tokens[0] + column for column in range(width)] + pad
            assert got["ranks"][i] == (tokens[0] % 5 if columns else 0)
        else:
            assert got["tokens"][i] == [STATUS_WORDS[status][0]] * (width if packed else 21)
        expected = [-((tokens[0] + column) % 7) / 2 for column in range(columns)] if tokens else []
        assert got["scores"][i] == expected + [0.0] * (len(got["tokens"][i]) - len(expected))
    goes_on = any(status in (TOKEN, NONE) for status, _, _ in rows)
    assert got["stop"] == (1 if goes_on else -1)


@settings(deadline=None)
@given(batches(6))
def test_the_legacy_reader_reads_speculative_messages(batch):
    rows, at, size = batch
    (data,) = encoded(record(rows), at, size, "speculative")
    got = legacy.parse_speculative(data)
    by_id = dict(zip(at, rows, strict=True))
    for i in range(size):
        status, tokens, _ = by_id.get(i, (NONE, [], GO))
        assert got["counts"][i] == (len(tokens) if tokens else STATUS_WORDS[status][1])
        assert got["tokens"][i] == tokens
    parts = [(1_032 + 24 * i, row) for i, row in enumerate(got["tokens"])]
    assert data == legacy.build(7_176, [(0, [got["stop"], size, *got["counts"]]), *parts])


@settings(deadline=None)
@given(batches(6), st.sampled_from([256, 512]), st.integers(0, 21), st.booleans())
def test_both_generations_of_readers_read_speculative_topk(batch, slots, columns, packed):
    rows, at, size = batch
    rows = [(status, [token % (2**31 - 32) for token in tokens], finish) for status, tokens, finish in rows]
    variant = Variant(packed=packed, slots=slots)
    (data,) = encoded(record(rows, columns=columns), at, size, "speculative-topk", variant, slots)
    assert data == legacy.build_speculative_topk(legacy.parse_speculative_topk(data, slots), slots)
    got = (legacy.parse_speculative_topk_today if packed else legacy.parse_speculative_topk)(data, slots)
    assert got["flag"] == 3
    width = max(1, columns)
    by_id = dict(zip(at, rows, strict=True))
    for i in range(size):
        status, tokens, _ = by_id.get(i, (NONE, [], GO))
        assert got["counts"][i] == (len(tokens) if tokens else STATUS_WORDS[status][1])
        pad = [] if packed else [-1] * (21 - width)
        assert got["tokens"][i] == [[token + column for column in range(width)] + pad for token in tokens]
        for row, token in zip(got["scores"][i], tokens, strict=True):
            assert row[:columns] == [-((token + column) % 7) / 2 for column in range(columns)]
            assert not any(row[columns:])
        assert got["ranks"][i] == [token % 5 if columns else 0 for token in tokens]


READERS = {
    ("plain", True): legacy.parse_plain,
    ("topk", True): legacy.parse_topk_today,
    ("topk", False): legacy.parse_topk,
    ("speculative", True): legacy.parse_speculative,
    ("speculative-topk", True): legacy.parse_speculative_topk_today,
    ("speculative-topk", False): legacy.parse_speculative_topk,
}


@settings(deadline=None)
@given(batches(1), st.sampled_from(sorted(READERS)), st.booleans())
def test_g18_g19_todays_engine_gets_exactly_its_aborts_and_preemptions(batch, reader, again):
    """It requested some aborts and preemptions; each is confirmed once, by the expected word, and no other slot is.

    ``again``: each slot is taken by a new request in the same step.
    """
    rows, at, size = batch
    name, packed = reader
    if again:
        rows = [row for old in rows for row in (old, (TOKEN, [77], GO))]
        at = [slot for slot in at for _ in range(2)]
    leaving = [(slot, status) for slot, (status, _, _) in zip(at, rows, strict=True)]
    wanted = [{slot for slot, status in leaving if status is one} for one in (ABORTED, PREEMPTED)]
    engine = legacy.TodaysEngine(*wanted)
    bystander = legacy.TodaysEngine(*[set(range(size)) - wanted[0] - wanted[1]] * 2)
    for data in encoded(record(rows), at, size, name, Variant(packed=packed)):
        engine.take(READERS[reader](data))
        bystander.take(READERS[reader](data))
    assert not engine.aborting
    assert not engine.preempting
    assert bystander.aborting == bystander.preempting == set(range(size)) - wanted[0] - wanted[1]
    for slot in range(size):
        expected = [token for one, (_, tokens, _) in zip(at, rows, strict=True) if one == slot for token in tokens]
        assert engine.tokens[slot] == expected


def test_todays_readers_fail_with_messages_of_the_former_layout():
    """The reason for today's default: the readers before release 2.6 have no columns for them."""
    source = record([(TOKEN, [5], GO)], columns=2)
    (topk,) = encoded(source, [0], 1, "topk", Variant(packed=False))
    (speculative,) = encoded(source, [0], 1, "speculative-topk", Variant(packed=False))
    for parse, data in ((legacy.parse_topk_today, topk), (legacy.parse_speculative_topk_today, speculative)):
        with pytest.raises(IndexError):
            parse(data)


@pytest.mark.parametrize(
    ("source", "ids", "size", "name", "message"),
    [
        (record([(TOKEN, [5], GO)]), [0], 513, "plain", "a batch of 513, at most 512"),
        (record([(TOKEN, [5], GO)]), [0], 257, "speculative", "a batch of 257, at most 256"),
        (record([(TOKEN, [5, 6], GO)]), [0], 1, "plain", "r0: 2 tokens and drafts, at most 1"),
        (record([(TOKEN, [5] * 7, GO)]), [0], 1, "speculative", "7 tokens and drafts, at most 6"),
        (record([(TOKEN, [1 << 31], GO)]), [0], 1, "plain", "no int32"),
        (record([(TOKEN, [-1], GO)]), [0], 1, "plain", "no int32"),
        (record([(TOKEN, [-1], GO)], columns=1), [0], 1, "topk", "no int32"),
        (record([(TOKEN, [-(1 << 31) - 1], GO)]), [0], 1, "speculative", "no int32"),
        (record([(TOKEN, [2**31 - 2], GO)], columns=3), [0], 1, "topk", "an alternative is no int32"),
        (record([(TOKEN, [5], GO)], columns=22), [0], 1, "topk", "22 columns"),
        (record([(TOKEN, [5], GO)], columns=2), [0], 1, "plain", "log-probabilities have no place"),
        (record([(TOKEN, [5], GO)], first=[0], drafts=[[1]]), [0], 1, "plain", "2 tokens and drafts"),
        (record([(TOKEN, [5], GO)], drafts=[[1]]), [0], 1, "speculative", "without a first token"),
        (record([(TOKEN, [5], GO)], drafts=[[1]], draft_columns=1), [0], 1, "speculative", "of drafts have no place"),
        (record([(TOKEN, [5], GO)], drafts=[[1] * 7], draft_columns=1), [0], 1, "speculative-topk", "r0: 7 drafts"),
        (record([(TOKEN, [5], GO)], drafts=[[1]], draft_columns=22), [0], 1, "speculative-topk", "22 columns"),
        (record([(TOKEN, [5], GO)]), [1], 1, "plain", "batch ids"),
        (record([(TOKEN, [5], GO)] * 2), [0], 1, "plain", "batch ids"),
    ],
)
def test_g21_what_a_layout_cannot_say_is_refused_before_anything_is_sent(source, ids, size, name, message):
    with pytest.raises(InvalidValue, match=message):
        encoded(source, ids, size, name)


def test_a_record_without_rows_needs_no_message():
    assert encoded(record([]), [], 4, "plain") == []
