"""The save-output operations with FastDeploy's argument lists, read as FastDeploy's own readers read them."""

import numpy as np
import pytest
from hal_core.errors import InvalidValue, Undelivered
from hal_fastdeploy.saving import SaveOutput
from hal_fastdeploy.sysv.layouts import Variant, layout_named, messages

from . import sysv_place as shared

pytest.importorskip("sysv_ipc")
legacy, place, receive = shared.legacy, shared.place, shared.receive
ON, OFF = np.array([True]), np.array([False])
NOBODY = np.zeros((4, 1), np.int32)
PARSED = {
    "plain": legacy.parse_plain,
    "topk": legacy.parse_topk_today,
    "speculative": legacy.parse_speculative,
    "speculative-topk": legacy.parse_speculative_topk_today,
}


class Captured:
    """A sink that makes the messages and parses them with a reader."""

    def __init__(self, layout):
        self.layout, self.found, self.session = layout, [], 1

    def put(self, pending):
        record = pending.resolve()
        chosen = layout_named(self.layout)
        made = messages(record, pending.batch_ids, pending.batch_size, chosen, Variant(), pending.goes_on)
        self.found += [PARSED[self.layout](message.data) for message in made]
        pending.complete(None)

    def close(self, timeout):
        pass


@pytest.fixture
def saving():
    """The operations, and the parsed messages by layout."""
    sinks = {}

    def opened(layout):
        sinks[layout] = Captured(layout)
        return sinks[layout]

    return SaveOutput(opened), sinks


def rows(*values):
    return np.array(values, np.int64)


def test_save_output_has_a_token_a_slot_none_or_the_mark_of_a_preemption(saving):
    operations, read = saving
    left = np.array([[0], [0], [1], [0]], np.int32)
    operations.save_output(rows([5], [-1], [7], [-9]), OFF, left, 0, False)
    operations.save_output(rows([6], [-1], [-1], [-1]), ON, NOBODY, 0, False)
    assert read["plain"].found == [{"stop": -1, "tokens": [5, -1, -9, -9]}, {"stop": 1, "tokens": [6, -1, -1, -1]}]


def test_save_output_topk_has_the_columns_of_each_slot(saving):
    operations, read = saving
    ids, scores = rows([5, 8], [0, 0], [7, 3]), np.array([[-1, -2], [0, 0], [-3, -4]], np.float32)
    left = np.array([[0], [0], [1]], np.int32)
    operations.save_output_topk(rows([5], [-1], [7]), ids, scores, rows(1, 0, 2), OFF, left, 0)
    (found,) = read["topk"].found
    assert found["tokens"] == [[5, 8], [-1, -1], [-9, -9]]
    assert (found["scores"][0], found["ranks"][0]) == ([-1.0, -2.0], 1)


@pytest.mark.parametrize(("skip", "counts"), [(True, [2, 0, -9, 0]), (False, [2, 1, -9, 0])])
def test_speculate_save_output_has_the_accepted_tokens(saving, skip, counts):
    operations, read = saving
    tokens, left = rows([1, 2, 3], [4, 0, 0], [5, 6, 0], [0, 0, 0]), np.array([[0], [0], [1], [0]])
    decoder, prompts = rows([9], [3], [9], [0]), rows([4], [8], [4], [0])
    operations.speculate_save_output(tokens, rows(2, 1, 2, 0), OFF, decoder, prompts, left, 0, False, skip)
    (found,) = read["speculative"].found
    assert found["counts"] == counts
    assert found["tokens"][0] == [1, 2]


def test_speculate_save_output_topk_reads_rows_from_each_slots_offset(saving):
    operations, read = saving
    ids = rows([1, 10], [2, 11], [4, 12])
    scores, ranks = -ids.astype(np.float32), rows(0, 1, 2)
    tokens, at = rows([1, 2], [4, 0]), rows(0, 2)
    lengths = rows([9], [9]), rows([4], [4])
    operations.speculate_save_output_topk(
        tokens, ids, scores, ranks, rows(2, 1), at, OFF, *lengths, NOBODY, 3, 0, False
    )
    (found,) = read["speculative-topk"].found
    assert (found["counts"], found["flag"]) == ([2, 1], 3)
    assert found["tokens"] == [[[1, 10], [2, 11]], [[4, 12]]]
    assert found["scores"][1] == [[-4.0, -12.0]]
    assert found["ranks"] == [[0, 1], [2]]


def test_a_token_that_upstream_replaced_is_passed_on_with_the_score_that_was_drawn(saving):
    """At a length limit, or after another end token, upstream writes eos over the last token, and not over column 0
    of the log-probabilities. Its messages have the token in column 0, beside the drawn one's score and rank."""
    operations, read = saving
    ids, scores = rows([5, 8], [7, 3]), np.array([[-1, -2], [-3, -4]], np.float32)
    operations.save_output_topk(rows([2], [7]), ids, scores, rows(1, 2), OFF, NOBODY, 0)
    (found,) = read["topk"].found
    assert (found["tokens"], found["scores"], found["ranks"]) == ([[2, 8], [7, 3]], scores.tolist(), [1, 2])
    assert ids.tolist() == [[5, 8], [7, 3]], "the caller's array"
    lengths = rows([9], [9]), rows([4], [4])
    tokens, at = rows([1, 2], [4, 0]), rows(0, 2)
    ids = rows([1, 10], [9, 11], [4, 12])
    for flag in (3, 4):
        operations.speculate_save_output_topk(
            tokens, ids, -ids.astype(np.float32), rows(0, 1, 2), rows(2, 1), at, OFF, *lengths, NOBODY, flag, 0, False
        )
        found = read["speculative-topk"].found[-1]
        assert (found["flag"], found["tokens"]) == (flag, [[[1, 10], [2, 11]], [[4, 12]]])
        assert found["scores"][0][1] == [-9.0, -11.0]
    operations.close(1)


def test_a_batch_without_a_token_has_no_rows_of_log_probabilities(saving):
    """All slots are in prefill, so the sampler has made none: the tables are empty."""
    operations, read = saving
    nothing, scores = np.zeros((0, 21), np.int64), np.zeros((0, 21), np.float32)
    lengths = rows([3], [3]), rows([8], [8])
    operations.speculate_save_output_topk(
        rows([0, 0], [0, 0]), nothing, scores, rows(), rows(0, 0), rows(0, 0), OFF, *lengths, NOBODY, 3, 0, False
    )
    assert read["speculative-topk"].found[0]["counts"] == [0, 0]
    operations.save_output_topk(rows([-1], [-1]), nothing, scores, rows(), OFF, NOBODY, 0)
    assert read["topk"].found[0]["tokens"] == [[-1] * 21] * 2


def test_tokens_of_minus_one_are_passed_on_where_the_count_has_the_marks(saving):
    """Upstream writes -1 for a chunk's token, and leaves it in a draft that was not made."""
    operations, read = saving
    lengths = rows([9], [9]), rows([4], [4])
    operations.speculate_save_output(rows([-1, 2], [4, -1]), rows(1, 2), OFF, *lengths, NOBODY, 0, False, False)
    operations.mtp_save_first_token(rows([1, -1], [3, 4]), OFF, *lengths, rows([1], [1]), 0, False, True)
    assert [found["tokens"] for found in read["speculative"].found] == [[[-1], [4, -1]], [[1, -1], [3, 4]]]


def test_a_batch_without_slots_is_no_message(saving):
    operations, read = saving
    none = np.zeros((0, 1), np.int64)
    operations.save_output(none, OFF, NOBODY, 0, False)
    operations.save_output_topk(none, np.zeros((0, 21), np.int64), np.zeros((0, 21), np.float32), none, OFF, NOBODY, 0)
    operations.speculate_save_output(none, none, OFF, none, none, NOBODY, 0, False, True)
    operations.save_output(rows([5]), OFF, NOBODY, 0, False)
    assert (read["plain"].found, read["topk"].found) == ([{"stop": -1, "tokens": [5]}], [])


def test_arguments_with_a_row_for_every_slot_are_cut_to_the_batch(saving):
    """The draft model's counts are of the slots in the batch, lengths and marks of all slots."""
    operations, read = saving
    ids = rows([1, 10], [2, 11], [4, 12])
    decoder, prompts = rows([9], [9], [3], [9]), rows([4], [4], [8], [4])
    for flag in (3, 4):
        operations.speculate_save_output_topk(
            rows([1, 2], [4, 0], [5, 0], [6, 0]), ids, -ids.astype(np.float32), rows(0, 1, 2), rows(2, 1), rows(0, 2),
            OFF, decoder, prompts, NOBODY, flag, 0, False,
        )  # fmt: skip
        assert read["speculative-topk"].found[-1]["tokens"] == [[[1, 10], [2, 11]], [[4, 12]]]
    operations.speculate_save_output(
        rows([1, 2], [4, 0], [5, 0], [6, 0]), rows(2, 1), OFF, decoder, prompts, NOBODY, 0, False, True
    )
    operations.mtp_save_first_token_with_topk(
        rows([1, 2], [3, 4], [5, 6]), ids, -ids.astype(np.float32), rows(0, 3), rows(1, 0), rows(0, 1), OFF, decoder,
        prompts, NOBODY, 3, 0, False,
    )  # fmt: skip
    assert read["speculative"].found[-1]["tokens"] == [[1, 2], [4]]
    assert read["speculative-topk"].found[-1]["counts"] == [2, 0]


def test_mtp_save_first_token_has_the_token_and_a_draft_once(saving):
    operations, read = saving
    tokens, steps = rows([1, 2, 0], [3, 4, 0], [5, 6, 0], [7, 8, 0]), rows([1], [0], [2], [1])
    decoder, prompts = rows([4], [4], [4], [2]), rows([4], [4], [4], [4])
    operations.mtp_save_first_token(tokens, OFF, decoder, prompts, steps, 0, False, True)
    (found,) = read["speculative"].found
    assert (found["counts"], found["tokens"][0]) == ([2, 0, 0, 0], [1, 2])


def test_the_first_prefill_token_has_log_probabilities_and_its_draft_none(saving):
    """Pull request 7442: tokens, log-probabilities and counts belong to one slot each, continuing chunks have none."""
    operations, read = saving
    tokens = rows([1, 2], [3, 4], [5, 6])
    ids, scores = rows([1, 20], [5, 21]), np.array([[-1, -2], [-3, -4]], np.float32)
    decoder, prompts = rows([4], [2], [4]), rows([4], [4], [4])
    operations.mtp_save_first_token_with_topk(
        tokens, ids, scores, rows(0, 3), rows(1, 0, 1), rows(0, 1, 1), OFF, decoder, prompts, NOBODY, 3, 0, False
    )
    (found,) = read["speculative-topk"].found
    assert found["counts"] == [2, 0, 2]
    assert found["tokens"] == [[[1, 20], [2, -1]], [], [[5, 21], [6, -1]]]
    assert [slot[0] for slot in (found["scores"][0], found["scores"][2])] == [[-1.0, -2.0], [-3.0, -4.0]]
    assert (found["ranks"][0][0], found["ranks"][2][0]) == (0, 3)


def test_only_the_first_rank_saves_but_first_tokens_if_each_does(saving):
    """Pull request 7172: every rank but the first sent the same output again."""
    operations, read = saving
    tokens, one = rows([1, 2]), rows([1])
    operations.save_output(rows([5]), OFF, NOBODY, 1, True)
    operations.speculate_save_output(tokens, rows(1), OFF, one, one, NOBODY, 1, True, False)
    operations.mtp_save_first_token(tokens, OFF, one, one, one, 1, False, True)
    assert read == {}
    operations.mtp_save_first_token(tokens, OFF, one, one, one, 1, True, True)
    assert len(read["speculative"].found) == 1


def test_draft_log_probabilities_are_a_message_of_flag_4(saving):
    """The draft model's tokens, each with its row; a chunk that continues and a preempted slot have none."""
    operations, read = saving
    ids = rows([1, 10], [2, 11], [4, 12], [8, 13])
    scores, ranks = -ids.astype(np.float32), rows(0, 1, 2, 3)
    tokens, at = rows([1, 2, 0], [4, 0, 0], [5, 0, 0], [8, 0, 0]), rows(0, 2, 3, 3)
    decoder, prompts = rows([9], [9], [3], [9]), rows([4], [4], [8], [4])
    left = np.array([[0], [0], [0], [1]], np.int32)
    operations.speculate_save_output_topk(
        tokens, ids, scores, ranks, rows(2, 1, 1, 1), at, OFF, decoder, prompts, left, 4, 0, False
    )
    (found,) = read["speculative-topk"].found
    assert (found["counts"], found["flag"], found["columns"]) == ([2, 1, 0, 0], 4, 2)
    assert found["tokens"] == [[[1, 10], [2, 11]], [[4, 12]], [], []]
    assert found["scores"] == [[[-1.0, -10.0], [-2.0, -11.0]], [[-4.0, -12.0]], [], []]
    assert found["ranks"] == [[0, 1], [2], [], []]


def test_g26_another_message_flag_is_refused(saving):
    with pytest.raises(InvalidValue, match=r"message_flag: message flag 5 .give 3 or 4"):
        saving[0].speculate_save_output_topk(*[rows([1])] * 10, 5, 0, False)
    with pytest.raises(InvalidValue, match=r"message_flag: message flag 4 .give 3: 3 is the target's"):
        saving[0].mtp_save_first_token_with_topk(*[rows([1])] * 10, 4, 0, False)


def test_an_output_that_the_layout_cannot_hold_is_the_next_calls_error(saving):
    operations, _ = saving

    def refuse(pending):
        pending.complete(Undelivered("too wide", []))

    operations._open = lambda layout: type("Full", (), {"put": staticmethod(refuse)})()
    operations.save_output(rows([5]), OFF, NOBODY, 0, False)
    with pytest.raises(Undelivered, match="too wide"):
        operations.save_output(rows([6]), OFF, NOBODY, 0, False)


class Slow:
    """A sink whose thread has not come to its outputs yet; closing it raises."""

    def __init__(self, layout=""):
        self.outputs, self.timeouts = [], []

    def put(self, pending):
        self.outputs.append(pending)

    def close(self, timeout):
        self.timeouts.append(timeout)
        raise Undelivered("not read", [])


def test_an_error_that_comes_after_further_outputs_were_put_is_raised_too():
    sink = Slow()
    operations = SaveOutput(lambda layout: sink)
    for step in range(3):
        operations.save_output(rows([step]), OFF, NOBODY, 0, False)
    for output in sink.outputs:
        output.complete(Undelivered(f"step {output.step} is too wide", []) if output.step < 3 else None)
    with pytest.raises(Undelivered, match="step 1 is too wide"):
        operations.save_output(rows([6]), OFF, NOBODY, 0, False)
    assert len(sink.outputs) == 3
    operations._sinks.clear()
    with pytest.raises(Undelivered, match="step 2 is too wide"):
        operations.close(5)


def test_all_sinks_are_closed_within_one_timeout_though_the_first_raises():
    operations = SaveOutput(lambda layout: None)
    operations._sinks = sinks = {"plain": Slow(), "topk": Slow()}
    with pytest.raises(Undelivered, match="not read"):
        operations.close(0.0)
    assert [sink.timeouts for sink in sinks.values()] == [[0.0], [0.0]]


def test_fastdeploys_reader_gets_the_messages_from_its_queue(place):
    operations, reader = SaveOutput(lambda layout: place.sink(layout)), place.reader()
    for step in range(3):
        operations.save_output(rows([step], [-1], [9]), OFF, np.array([[0], [1], [0]]), 0, False)
    found = [legacy.parse_plain(data) for data in receive(reader, 3)]
    assert found == [{"stop": -1, "tokens": [step, -9, 9]} for step in range(3)]
    operations.close(5)
