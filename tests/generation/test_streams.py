"""Output of a request's stream, for records as they come."""

import numpy as np
import pytest
from hal_core import FinishReason, HalError, InvalidValue, OutputRecord, SlotStatus
from hal_engine.model.streaming import AnswerText, StreamDecoder
from hal_engine.streams import Part, Stream, Streams


class Letters:
    """A tokenizer whose tokens are letters."""

    byte_token_ids = frozenset()

    def visible(self, ids):
        return list(ids)

    def decode(self, ids):
        return "".join(map(chr, ids))


def record(name, text, position, finish=FinishReason.NONE, message=""):
    token = bool(text) or finish is FinishReason.NONE
    return OutputRecord(
        0,
        (name,),
        np.array([SlotStatus.TOKEN if token else SlotStatus.ERROR], np.uint8),
        np.array([finish], np.uint8),
        np.array([position], np.int64),
        np.array([len(text)], np.int32),
        np.array([ord(letter) for letter in text], np.int64),
        np.array([token and position == 0]),
        messages={0: message} if message else {},
    )


@pytest.fixture
def streams():
    return Streams()


def begin(streams, stops=()):
    parts = []
    streams.add("r", Stream(AnswerText(StreamDecoder(Letters()), stops), parts.append))
    return parts


def test_the_last_part_says_why_the_request_ended(streams):
    parts = begin(streams)
    streams.take(record("r", "ab", 0))
    streams.take(record("other", "x", 0))
    streams.take(record("r", "c", 2, FinishReason.LENGTH))
    assert parts == [Part("ab", (97, 98)), Part("c", (99,), FinishReason.LENGTH)]
    assert not len(streams)


def test_a_stop_text_ends_the_stream_and_names_the_request(streams):
    parts = begin(streams, ["ll"])
    streams.take(record("r", "hel", 0))
    streams.take(record("r", "lo", 3))
    assert [(part.text, part.finish_reason) for part in parts] == [("he", None), ("ll", FinishReason.STOP)]
    assert list(streams.stopped) == ["r"]
    streams.take(record("r", "more", 5))
    assert len(parts) == 2


def test_text_that_was_held_back_comes_before_the_error(streams):
    parts = begin(streams, ["lost"])
    streams.take(record("r", "hello", 0))
    streams.end("r", 5, FinishReason.ERROR, "no worker is left")
    assert [getattr(part, "text", None) or part.what for part in parts] == ["hel", "lo", "no worker is left"]


def test_an_end_that_no_record_tells_waits_for_the_tokens_before_it(streams):
    parts = begin(streams)
    streams.end("r", 2, FinishReason.ABORT)
    assert parts == []
    streams.take(record("r", "ab", 0))
    assert [part.finish_reason for part in parts] == [FinishReason.ABORT]
    assert parts[0].text == "ab"


def test_a_request_that_was_refused_raises_its_message(streams):
    parts = begin(streams)
    streams.end("r", 0, FinishReason.ERROR, "the prompt has no tokens")
    assert isinstance(parts[0], InvalidValue)
    assert parts[0].what == "the prompt has no tokens"


def test_tokens_that_are_lost_on_the_way_are_an_error(streams):
    begin(streams)
    with pytest.raises(HalError, match="tokens from 1 on came after 0"):
        streams.take(record("r", "b", 1))


def test_after_a_failure_every_stream_has_its_error_once(streams):
    parts = begin(streams)
    error = HalError("gone")
    streams.fail(error)
    streams.fail(error)
    assert parts == [error]
