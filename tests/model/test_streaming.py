"""An answer's text, streamed: it is the whole text without the prompt's, and it ends with the first stop text in it."""

from __future__ import annotations

import pytest
from hal_engine.model.config import parse_config
from hal_engine.model.streaming import AnswerText, StreamDecoder
from hal_engine.model.tokenizer import Tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import share

from .conftest import LLAMA
from .tokenizers_of_kinds import KINDS

TEXTS = st.lists(
    st.sampled_from([*"ab !\n.'lé中文🐍", "👩🏽\u200d🚀", "e\u0301", "stop", "n't", "  ", "\ufffd", "\x00"])
    | st.characters(codec="utf-8"),
    max_size=12,
).map("".join)
BROKEN = "\ufffd"
FEW = settings(max_examples=share.of(30), deadline=None)  # of each kind of tokenizer

_made: dict[str, Tokenizer] = {}


def tokenizer_of(kind: str) -> Tokenizer:
    if kind not in _made:
        backend = KINDS[kind]()
        _made[kind] = Tokenizer(backend, parse_config(LLAMA | {"vocab_size": backend.get_vocab_size() + 3}))
    return _made[kind]


@pytest.fixture(scope="session", params=KINDS)
def tokenizer(request) -> Tokenizer:
    return tokenizer_of(request.param)


def ids_of(data, tokenizer: Tokenizer, label: str) -> list[int]:
    """Ids as a text has them, ids as a poor model has them, and both after one another."""
    text = st.builds(tokenizer.encode, TEXTS)
    loose = st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=12)
    return data.draw(
        text | loose | st.tuples(text, loose, text).map(lambda parts: [*parts[0], *parts[1], *parts[2]]), label=label
    )


def expected(tokenizer: Tokenizer, prompt: list[int], answer: list[int]) -> str:
    """The text of both without its common start with the prompt's text."""
    before, whole = tokenizer.decode(prompt), tokenizer.decode(prompt + answer)
    same = 0
    while same < min(len(before), len(whole)) and before[same] == whole[same]:
        same += 1
    return whole[same:]


def streamed(tokenizer: Tokenizer, prompt: list[int], answer: list[int], sizes: list[int]) -> list[str]:
    """The pieces of ``answer`` handed over in groups of ``sizes``, then one by one, and of ``finish``."""
    decoder, pieces, start = tokenizer.stream(prompt), [], 0
    for size in [*sizes, *[1] * len(answer)]:
        pieces.append(decoder.push(answer[start : start + size]))
        start += size
    return [*pieces, decoder.finish()]


@FEW
@given(data=st.data())
def test_pieces_join_to_the_whole_less_the_prompt(tokenizer, data):
    prompt, answer = ids_of(data, tokenizer, "prompt"), ids_of(data, tokenizer, "answer")
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=8), label="sizes")
    assert "".join(streamed(tokenizer, prompt, answer, sizes)) == expected(tokenizer, prompt, answer)


@FEW
@given(data=st.data())
def test_at_every_token_what_is_out_and_what_is_held_are_the_text_so_far(tokenizer, data):
    prompt, answer = ids_of(data, tokenizer, "prompt"), ids_of(data, tokenizer, "answer")
    decoder, out = tokenizer.stream(prompt), ""
    for count, token in enumerate(answer, 1):
        out += decoder.push([token])
        assert out + decoder.held == expected(tokenizer, prompt, answer[:count])


@FEW
@given(prompt=TEXTS, data=st.data())
def test_every_split_of_a_text_in_prompt_and_answer_gives_the_rest_of_it(tokenizer, prompt, data):
    ids = tokenizer.encode(prompt)
    whole = tokenizer.decode(ids)
    for at in range(len(ids) + 1):
        before = tokenizer.decode(ids[:at])
        if whole.startswith(before):  # the split is not inside a character
            assert before + "".join(streamed(tokenizer, ids[:at], ids[at:], [])) == whole


@FEW
@given(text=TEXTS.filter(lambda text: BROKEN not in text))
def test_half_a_character_is_never_given_out(tokenizer, text):
    ids = tokenizer.encode(text)
    assert BROKEN not in "".join(streamed(tokenizer, [], ids, []))
    decoder = tokenizer.stream(ids[: len(ids) // 2])
    assert all(BROKEN not in decoder.push([token]) for token in ids[len(ids) // 2 :])


def test_half_a_character_at_the_end_is_given_out_as_such():
    for kind in ("byte level", "llama-2", "gemma", "unigram, metaspace"):
        tokenizer = tokenizer_of(kind)
        ids = [token for token in tokenizer.encode("a🐍") if tokenizer.decode([token])]
        pieces = streamed(tokenizer, ids[:1], ids[1:-1], [])
        assert set("".join(pieces)) == {BROKEN}
        assert not any(pieces[:-1])


@pytest.mark.parametrize("kind", ["llama-2", "unigram, metaspace", "word pieces"])
def test_the_first_word_of_an_answer_keeps_its_space(kind):
    tokenizer = tokenizer_of(kind)
    prompt, answer = tokenizer.encode("a"), tokenizer.encode("a")[1:]  # without the start token
    assert streamed(tokenizer, prompt, answer, []) == [" a", ""]


def test_the_window_stays_small(tokenizer):
    prompt = tokenizer.encode("a stop ")
    decoder = tokenizer.stream(prompt)
    for token in tokenizer.encode("stop a") * 100:
        decoder.push([token])
        assert len(decoder._window) < 32


# -- stop texts ------------------------------------------------------------------------------------------------------


def first_stop(tokenizer, prompt, answer, stops, min_tokens):
    """The first token count at which a new stop text is complete, and the text up to it: found by decoding everything
    again for each token.
    """
    seen = 0
    for count in range(1, len(answer) + 1):
        text = expected(tokenizer, prompt, answer[:count]).rstrip(BROKEN)
        ends = [
            end for stop in stops for end in range(max(seen + 1, len(stop)), len(text) + 1) if text[:end].endswith(stop)
        ]
        if ends and count >= min_tokens:
            return count, text[: min(ends)]
        seen = max(seen, len(text))
    return None, expected(tokenizer, prompt, answer)


@FEW
@given(data=st.data())
def test_an_answer_ends_with_the_first_stop_text_wherever_tokens_end(tokenizer, data):
    prompt, answer = ids_of(data, tokenizer, "prompt"), ids_of(data, tokenizer, "answer")
    whole = expected(tokenizer, prompt, answer)
    parts = st.tuples(st.integers(0, len(whole)), st.integers(1, 5)).map(lambda at: whole[at[0] : at[0] + at[1]])
    texts = (parts | st.sampled_from(["a", "st", " a", "ab", "🐍"])).filter(lambda text: text and BROKEN not in text)
    stops = data.draw(st.lists(texts, max_size=3), label="stops")
    min_tokens = data.draw(st.integers(0, 4), label="min_tokens")
    wanted = first_stop(tokenizer, prompt, answer, stops, min_tokens)

    text, shown, found = AnswerText(tokenizer.stream(prompt), stops, min_tokens), "", None
    for count, token in enumerate(answer, 1):
        stopped = text.push(token)
        assert text.text[: text.settled].startswith(shown), "what was shown is taken back"
        shown = text.text[: text.settled]
        assert wanted[1].startswith(shown), "something behind the stop text was shown"
        if stopped:
            found = count
            break
    text.finish()
    assert (found, text.text) == wanted
    assert text.settled == len(text.text)


def push_all(text: AnswerText, ids: list[int]) -> int | None:
    return next((count for count, token in enumerate(ids, 1) if text.push(token)), None)


def test_a_stop_text_is_found_inside_across_and_between_tokens(tokenizer):
    """Its own tokens (a start token, a leading space, different pieces) are not affected."""
    ids = tokenizer.encode("a a")
    rest = expected(tokenizer, ids, ids)
    for at in range(len(rest)):
        for size in range(1, len(rest) - at + 1):
            text = AnswerText(tokenizer.stream(ids), [rest[at : at + size]])
            assert push_all(text, ids) is not None
            assert text.text == rest[: rest.index(rest[at : at + size]) + size]


def test_text_that_may_begin_a_stop_text_is_shown_when_it_does_not():
    tokenizer = tokenizer_of("byte level")
    text, shown = AnswerText(tokenizer.stream(), ["abab!"]), []
    for token in tokenizer.encode("xababab"):
        assert not text.push(token)
        shown.append(text.text[: text.settled])
    assert shown == ["x", "x", "x", "x", "x", "xab", "xab"][: len(shown)]
    text.finish()
    assert text.settled == len("xababab")


def test_of_two_stop_texts_in_one_token_the_first_to_end_counts():
    tokenizer = tokenizer_of("byte level")
    (stop,) = tokenizer.encode("stop")
    for stops in (["top", "st"], ["st", "top"]):
        text = AnswerText(tokenizer.stream(), stops)
        assert text.push(stop)
        assert text.text == "st"


def test_a_stop_text_before_min_tokens_is_ignored():
    tokenizer = tokenizer_of("byte level")
    ids = tokenizer.encode("abab")
    text = AnswerText(tokenizer.stream(), ["ab"], min_tokens=3)
    assert push_all(text, ids) == 4
    assert text.text == "abab"
    assert push_all(AnswerText(tokenizer.stream(), ["ab"], min_tokens=2), ids) == 2


def test_an_ignored_stop_text_in_a_byte_run_does_not_count_later():
    tokenizer = tokenizer_of("llama-2")
    snake = tokenizer.encode("a🐍")[2:]
    assert len(snake) == 4
    text = AnswerText(tokenizer.stream(tokenizer.encode("a")), ["🐍"], min_tokens=5)
    assert push_all(text, snake * 2) == 8
    assert text.text == "🐍🐍"


def test_a_prompt_of_broken_characters_is_decoded_a_few_times():
    """A client may send any ids: with one decoding for each, a prompt took seconds."""
    tokenizer, decoded = tokenizer_of("byte level"), []

    class Counting:
        byte_token_ids, own_texts = tokenizer.byte_token_ids, tokenizer.own_texts
        visible = staticmethod(tokenizer.visible)

        def decode(self, ids):
            decoded.append(len(ids))
            return tokenizer.decode(ids)

    broken = tokenizer.encode("🐍")[1:2]
    assert set(tokenizer.decode(broken)) == {BROKEN}
    StreamDecoder(Counting(), broken * 4096)
    assert sum(decoded) <= 3 * 4096
