"""Records validate themselves, and sinks keep the order of their input."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
from hal_core.errors import InvalidValue, SinkClosed, Undelivered
from hal_core.output.records import OutputRecord, SlotStatus
from hal_core.output.sinks import MemorySink, Sink
from hal_core.slots.fields import FinishReason


def record_of(*rows: tuple[SlotStatus, list[int]], step: int = 0, **optional) -> OutputRecord:
    """Build a record of rows (status, tokens), whose requests are r0, r1, …, all at position 0."""
    tokens = [token for _, row in rows for token in row]
    arrays = {
        "status": np.array([status for status, _ in rows], np.uint8),
        "finish": np.zeros(len(rows), np.uint8),
        "positions": np.zeros(len(rows), np.int64),
        "counts": np.array([len(row) for _, row in rows], np.int32),
        "tokens": np.array(tokens, np.int64),
        "first_token": np.zeros(len(rows), np.bool_),
    }
    return OutputRecord(step, tuple(f"r{row}" for row in range(len(rows))), **(arrays | optional))


def of_drafts(ids):
    """One draft, 8, and log-probabilities with these token ids."""
    given = {"drafts": np.array([8]), "draft_counts": np.array([1, 0], np.int32)}
    return given | {"draft_logprob_token_ids": np.array(ids), "draft_logprobs": np.zeros((len(ids), 2), np.float32)}


PLAIN = record_of((SlotStatus.TOKEN, [5]), (SlotStatus.TOKEN, [6]))
MIXED = record_of((SlotStatus.TOKEN, [5, 6, 7]), (SlotStatus.PREEMPTED, []), (SlotStatus.NONE, []))


class Output:
    """A pending output that records its calls, and may have to wait for a latch or fail."""

    def __init__(self, step, error=None, latch=None):
        self.step, self.error, self.latch = step, error, latch
        self.request_ids = (f"r{step}",)
        self.settled = []

    def resolve(self):
        if self.latch is not None:
            assert self.latch.wait(10)
        if self.error is not None:
            raise self.error
        return replace(PLAIN, step=self.step)

    def complete(self, error):
        self.settled.append(error)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": -1}, "step is -1"),
        ({"step": True}, "step is True"),
        ({"request_ids": ["a", "b"]}, "not a tuple"),
        ({"request_ids": ("a",)}, "status has length 2, but there are 1 rows"),
        ({"request_ids": ("a", "")}, "an id is empty"),
        ({"request_ids": ("a", "b\0c")}, "NUL"),
        ({"request_ids": ("a", 3)}, "request_ids"),
        ({"status": np.ones(2, np.int64)}, r"status is int64\[2\]"),
        ({"status": np.array([1, 9], np.uint8)}, "unknown to its type"),
        ({"finish": np.array([0, FinishReason.ABORT], np.uint8)}, r"does not match the status in rows \[1\]"),
        ({"positions": np.array([0, -1])}, r"positions are negative in rows \[1\]"),
        ({"positions": np.zeros(4, np.int64)[::2]}, "not contiguous"),
        ({"counts": np.array([2, 1], np.int32)}, "counts add up to 3, but there are 2 tokens"),
        ({"counts": np.array([2, 0], np.int32)}, r"if and only if its status is TOKEN; rows \[1\] differ"),
        ({"counts": np.array([3, -1], np.int32)}, "counts add up"),
        ({"tokens": None}, "tokens is NoneType"),
        ({"drafts": np.zeros(1, np.int64)}, "drafts and draft_counts must be given together"),
        ({"drafts": np.zeros(1, np.int64), "draft_counts": np.zeros(2, np.int32)}, "draft_counts add up to 0"),
        ({"ranks": np.zeros(2, np.int32)}, "ranks needs logprobs"),
        ({"logprobs": np.zeros((2, 1), np.float32)}, "must be given together"),
        (
            {"logprobs": np.zeros((2, 2), np.float32), "logprob_token_ids": np.zeros((2, 1), np.int64)},
            "differ in shape",
        ),
        (
            {"logprobs": np.zeros((2, 1), np.float32), "logprob_token_ids": np.zeros((2, 1), np.int64)},
            "column 0 of logprob_token_ids is not the sampled token",
        ),
        ({"messages": {2: "late"}}, "messages has 2"),
        ({"draft_logprobs": np.zeros((2, 1), np.float32)}, "draft_logprob_token_ids must be given together"),
        ({"draft_ranks": np.zeros(2, np.int32)}, "draft_ranks needs draft_logprobs"),
        ({**of_drafts([[8, 1]]), "drafts": None, "draft_counts": None}, "draft_logprobs needs drafts"),
        (of_drafts([[8, 1], [9, 1]]), "draft_logprob_token_ids has length 2, but there are 1 drafts"),
        (of_drafts([[7, 1]]), "column 0 of draft_logprob_token_ids is not the draft"),
    ],
)
def test_g21_a_record_refuses_what_its_counts_and_bounds_forbid(changes, message):
    with pytest.raises(InvalidValue, match=message):
        replace(PLAIN, **changes)


def test_g26_an_error_lists_every_problem_and_names_hook_and_argument():
    with pytest.raises(InvalidValue, match="save_output: record: 2 problem") as caught:
        replace(PLAIN, positions=np.array([0, -1]), messages={7: "x"})
    assert "positions" in str(caught.value)
    assert "messages" in str(caught.value)


def test_g25_rows_give_each_request_its_own_part():
    record = replace(
        MIXED,
        draft_counts=np.array([0, 0, 2], np.int32),
        drafts=np.array([8, 9]),
        ranks=np.array([1, 2, 3], np.int32),
        logprobs=np.zeros((3, 2), np.float32),
        logprob_token_ids=np.array([[5, 1], [6, 2], [7, 3]]),
        messages={1: "no blocks left"},
        draft_logprob_token_ids=np.array([[8, 1], [9, 2]]),
        draft_logprobs=np.array([[-1, -2], [-3, -4]], np.float32),
        draft_ranks=np.array([5, 6], np.int32),
    )
    first, second, third = record.rows()
    assert (first.request_id, first.status, first.tokens.tolist()) == ("r0", SlotStatus.TOKEN, [5, 6, 7])
    assert first.logprob_token_ids.tolist() == [[5, 1], [6, 2], [7, 3]]
    assert first.ranks.tolist() == [1, 2, 3]
    assert (first.draft_logprobs.shape, second.draft_ranks.size) == ((0, 2), 0)
    assert (third.draft_logprob_token_ids.tolist(), third.draft_ranks.tolist()) == ([[8, 1], [9, 2]], [5, 6])
    assert third.draft_logprobs.tolist() == [[-1, -2], [-3, -4]]
    assert (second.status, second.tokens.size, second.message) == (SlotStatus.PREEMPTED, 0, "no blocks left")
    assert (third.status, third.drafts.tolist(), third.logprobs.shape) == (SlotStatus.NONE, [8, 9], (0, 2))


def test_g19_deliveries_name_every_row_that_tells_something():
    assert MIXED.deliveries() == [("r0", 0, 3), ("r1", 0, 0)]


def test_equality_is_bit_for_bit():
    logprobs = {"logprobs": np.full((2, 1), np.nan, np.float32), "logprob_token_ids": np.array([[5], [6]])}
    assert replace(PLAIN, **logprobs) == replace(PLAIN, **logprobs)
    assert replace(PLAIN, **logprobs) != PLAIN
    assert replace(PLAIN, tokens=np.array([5, 7])) != PLAIN


@pytest.mark.parametrize("threaded", [False, True])
def test_g19_the_memory_sink_keeps_order_past_a_failed_record(threaded):
    sink = MemorySink(threaded=threaded)
    outputs = [Output(0), Output(1, error=InvalidValue("too many drafts")), Output(2)]
    for output in outputs:
        sink.put(output)
    sink.close(10)
    assert isinstance(sink, Sink)
    assert [record.step for record in sink.records] == [0, 2]
    assert [output.settled for output in outputs] == [[None], [outputs[1].error], [None]]


def test_a_closed_sink_takes_nothing_and_closing_twice_is_fine():
    sink = MemorySink()
    sink.close(1)
    sink.close(1)
    with pytest.raises(SinkClosed):
        sink.put(Output(0))


def test_g19_closing_names_the_requests_whose_output_never_came():
    latch = threading.Event()
    sink = MemorySink(threaded=True)
    outputs = [Output(step, latch=latch) for step in range(3)]
    for output in outputs:
        sink.put(output)
    with pytest.raises(Undelivered) as caught:
        sink.close(0.01)
    latch.set()
    assert caught.value.records == (("r0", -1, -1), ("r1", -1, -1), ("r2", -1, -1))
    assert [type(output.settled[0]) for output in outputs[1:]] == [SinkClosed, SinkClosed]


def test_g19_after_a_close_that_gave_up_no_output_is_completed_again(caplog):
    latch, sink = threading.Event(), MemorySink(threaded=True)
    outputs = [Output(step, latch=latch) for step in range(3)]
    outputs[0].complete = lambda error: int("no number")
    for output in outputs:
        sink.put(output)
    with pytest.raises(Undelivered):
        sink.close(0.01)
    latch.set()
    sink._thread.join(10)
    assert "could not complete the output of step 0" in caplog.text
    assert [len(output.settled) for output in outputs[1:]] == [1, 1]
    assert sink.records == []


def test_g19_an_output_that_cannot_be_settled_does_not_stop_those_after_it(caplog):
    sink, settled = MemorySink(threaded=True), threading.Event()
    faulty, last = Output(0), Output(1)
    faulty.complete = lambda error: int("no number")
    last.complete = lambda error: settled.set()
    sink.put(faulty)
    sink.put(last)
    assert settled.wait(30)
    sink.close(30)
    assert [record.step for record in sink.records] == [0, 1]
    assert "could not complete the output of step 0" in caplog.text
