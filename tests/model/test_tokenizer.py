"""Text to ids and back, whole and streamed."""

from __future__ import annotations

import pytest
from hal_core.errors import InvalidValue
from hal_engine.model import DEFAULT_CHECKPOINT
from hal_engine.model.config import parse_config, read_config
from hal_engine.model.tokenizer import StreamDecoder, Tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

TEXTS = st.text(alphabet=st.characters(codec="utf-8"), max_size=60)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEFAULT_CHECKPOINT, read_config(DEFAULT_CHECKPOINT))


@pytest.fixture(scope="session")
def word_tokenizer(checkpoints) -> Tokenizer:
    """Llama-2 style: word-boundary marks, bytes as a fallback, and a leading space that only a text's start loses."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁ab", "!"]
    backend = Backend(
        models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[], byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend, parse_config(checkpoints.llama | {"vocab_size": 300}))


def streamed(decoder: StreamDecoder, ids: list[int], sizes: list[int]) -> list[str]:
    """The pieces of ``ids`` handed over in groups of ``sizes`` (then one by one), and of ``finish``."""
    pieces, start = [], 0
    for size in [*sizes, *[1] * len(ids)]:
        pieces.append(decoder.push(ids[start : start + size]))
        start += size
    return [*pieces, decoder.finish()]


@given(text=TEXTS)
def test_any_text_survives_the_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(data=st.data())
def test_pieces_of_any_ids_join_to_the_decoded_whole(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40), label="ids")
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=10), label="sizes")
    assert "".join(streamed(tokenizer.stream(), ids, sizes)) == tokenizer.decode(ids)


@given(data=st.data())
def test_pieces_join_for_word_marks_and_byte_fallback_too(word_tokenizer, data):
    ids = word_tokenizer.encode(data.draw(st.text(alphabet="ab! éñ🐍\x00\n", max_size=20), label="text"))
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=10), label="sizes")
    assert "".join(streamed(word_tokenizer.stream(), ids, sizes)) == word_tokenizer.decode(ids)


@given(text=TEXTS.filter(lambda text: "\ufffd" not in text))
def test_no_piece_of_a_sound_text_holds_half_a_character(tokenizer, text):
    pieces = streamed(tokenizer.stream(), tokenizer.encode(text), [])
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_of_several_tokens_comes_with_the_last_of_them(tokenizer):
    ids = tokenizer.encode("🐍")
    assert len(ids) > 1
    decoder = tokenizer.stream()
    assert [decoder.push([token]) for token in ids] == [""] * (len(ids) - 1) + ["🐍"]
    assert decoder.finish() == ""


def test_the_window_does_not_grow_with_the_text(tokenizer):
    decoder = tokenizer.stream()
    for token in tokenizer.encode("value = 1\n" * 200):
        decoder.push([token])
        assert len(decoder._window) < 8


def test_special_tokens_give_no_text(tokenizer):
    (end,) = tokenizer.eos_token_ids
    assert tokenizer.decode([end, *tokenizer.encode("x"), end]) == "x"
    assert tokenizer.encode("<|endoftext|>") == [end]


def test_a_lone_surrogate_is_refused(tokenizer):
    with pytest.raises(InvalidValue, match="UTF-8"):
        tokenizer.encode("\ud800")


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"\xff\xfe", b"[1]"])
def test_a_broken_file_is_refused_with_its_path(tmp_path, checkpoints, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(InvalidValue, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path, parse_config(checkpoints.llama))


def test_a_missing_file_is_named(tmp_path, checkpoints):
    with pytest.raises(InvalidValue, match=r"tokenizer\.json.*no such file"):
        Tokenizer.load(tmp_path, parse_config(checkpoints.llama))


def test_ids_beyond_the_model_are_refused(checkpoints):
    with pytest.raises(InvalidValue, match="vocab_size=61"):
        Tokenizer.load(DEFAULT_CHECKPOINT, parse_config(checkpoints.llama))
