"""Output of a request's stream, for records as they come."""

import numpy as np
import pytest
from hal_core import FinishReason, HalError, InvalidValue, OutputRecord, SlotStatus
from hal_engine.model.streaming import AnswerText, StreamDecoder
from hal_engine.streams import Part, Stream, Streams, joined
from hypothesis import given
from hypothesis import strategies as st

from tests.model.test_streaming import tokenizer_of
from tests.model.tokenizers_of_kinds import KINDS


class Letters:
    """A tokenizer whose tokens are letters."""

    byte_token_ids, own_texts = frozenset(), None

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


def begin(streams, stops=(), *, at_end=False):
    parts = []
    streams.add("r", Stream(AnswerText(StreamDecoder(Letters()), stops), parts.append, at_end=at_end))
    return parts


def test_the_last_part_says_why_the_request_ended(streams):
    parts = begin(streams)
    streams.take(record("r", "ab", 0))
    streams.take(record("other", "x", 0))
    streams.take(record("r", "c", 2, FinishReason.LENGTH))
    assert parts == [Part("ab", (97, 98)), Part("c", (99,), FinishReason.LENGTH)]
    assert not len(streams)


@pytest.mark.parametrize("by_record", [True, False])
def test_a_stream_that_is_read_at_its_end_has_one_part(streams, by_record):
    parts = begin(streams, at_end=True)
    streams.take(record("r", "ab", 0))
    assert not parts
    streams.take(record("r", "c", 2, FinishReason.LENGTH if by_record else FinishReason.NONE))
    if not by_record:
        streams.end("r", 3, FinishReason.LENGTH)
    assert parts == [Part("abc", (97, 98, 99), FinishReason.LENGTH)]
    assert not len(streams)


@pytest.mark.parametrize("at_end", [False, True])
def test_a_stop_text_ends_the_stream_and_names_the_request(streams, at_end):
    parts = begin(streams, ["ll"], at_end=at_end)
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
    streams.end("r", 0, FinishReason.ERROR, "the prompt has no tokens", refused=True)
    assert isinstance(parts[0], InvalidValue)
    assert parts[0].what == "the prompt has no tokens"


@pytest.mark.parametrize("by_record", [True, False])
def test_an_error_before_the_first_token_is_not_the_callers(streams, by_record):
    parts = begin(streams)
    if by_record:
        streams.take(record("r", "", 0, FinishReason.ERROR, "the runner raised"))
    else:
        streams.end("r", 0, FinishReason.ERROR, "no worker is left")
    assert type(parts[0]) is HalError


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


@pytest.mark.parametrize("kind", ["byte level", "llama-2"])
def test_whole_characters_behind_half_of_one_wait_with_it(kind):
    tokenizer, parts = tokenizer_of(kind), []
    letter, snake = tokenizer.encode("a")[-1], tokenizer.encode("🐍")[-4:]
    for tokens in ([letter, snake[0], letter], [letter, *snake, letter], [letter, *snake[:3], letter, *snake]):
        streams = Streams()
        streams.add("r", Stream(AnswerText(tokenizer.stream([]), []), parts.append))
        for number, token in enumerate(tokens):
            streams.take(record("r", chr(token), number))
        streams.end("r", len(tokens), FinishReason.LENGTH)
        assert joined(parts).text == tokenizer.decode(tokens)
        parts.clear()


def records_of(answers, sizes, rows):
    """Records of all answers, each with some tokens of some; with ends in the last ones."""
    at, found = [0] * len(answers), []
    for size, row in [*zip(sizes, rows, strict=False), *((2, None) for _ in range(64))]:
        some = [row % len(answers)] if row is not None else list(range(len(answers)))
        parts = [(number, answers[number][at[number] : at[number] + size]) for number in some]
        parts = [(number, tokens) for number, tokens in parts if tokens]
        if not parts:
            continue
        places = [at[number] for number, _ in parts]
        for number, tokens in parts:
            at[number] += len(tokens)
        ends = [FinishReason.LENGTH if at[n] == len(answers[n]) else FinishReason.NONE for n, _ in parts]
        found.append(
            OutputRecord(
                len(found),
                tuple(f"r{number}" for number, _ in parts),
                np.full(len(parts), SlotStatus.TOKEN, np.uint8),
                np.array(ends, np.uint8),
                np.array(places, np.int64),
                np.array([len(tokens) for _, tokens in parts], np.int32),
                np.array([token for _, tokens in parts for token in tokens], np.int64),
                np.array([place == 0 for place in places]),
            )
        )
    return found


def taken(tokenizer, answers, records, turns, stops):
    """Of each answer all parts as one, if so many records come at once in each turn."""
    streams, parts = Streams(), [[] for _ in answers]
    for number, some in enumerate(parts):
        streams.add(f"r{number}", Stream(AnswerText(tokenizer.stream([]), stops), some.append))
    left, count = list(records), []
    for turn in [*turns, *[1] * len(records)]:
        before = [len(some) for some in parts]
        streams.take(*left[:turn])
        count.append(max(len(some) - former for some, former in zip(parts, before, strict=True)))
        del left[:turn]
    assert max(count) <= 1, "what comes at once is one part"
    assert not len(streams)
    return [joined(some) for some in parts]


@pytest.mark.parametrize("kind", ["byte level", "llama-2", "word pieces"])
@given(data=st.data())
def test_parts_join_to_the_same_however_records_come(kind, data):
    assert kind in KINDS
    tokenizer = tokenizer_of(kind)
    ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=20)
    texts = st.text("ab é中🐍", min_size=1, max_size=8).map(tokenizer.encode).filter(bool)
    answers = data.draw(st.lists(ids | texts, min_size=1, max_size=3), label="answers")
    small = st.lists(st.integers(1, 4), max_size=12)
    sizes, rows, turns = (data.draw(small, label=label) for label in ("tokens", "rows", "records at once"))
    stops = data.draw(st.lists(st.text("ab ", min_size=1, max_size=3), max_size=2), label="stops")
    records = records_of(answers, sizes, rows)
    one_by_one = taken(tokenizer, answers, records, [], stops)
    assert taken(tokenizer, answers, records, turns, stops) == one_by_one
    assert taken(tokenizer, answers, records, [len(records)], stops) == one_by_one
    if not stops:
        assert [part.text for part in one_by_one] == [tokenizer.decode(answer) for answer in answers]
        assert [list(part.token_ids) for part in one_by_one] == answers
