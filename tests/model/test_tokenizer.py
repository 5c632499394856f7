"""Text to ids and back."""

from __future__ import annotations

import pytest
from hal_core.errors import InvalidValue
from hal_engine.model import DEFAULT_CHECKPOINT
from hal_engine.model.config import parse_config, read_config
from hal_engine.model.tokenizer import Tokenizer
from hypothesis import given
from hypothesis import strategies as st

TEXTS = st.text(alphabet=st.characters(codec="utf-8"), max_size=60)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEFAULT_CHECKPOINT, read_config(DEFAULT_CHECKPOINT))


@given(text=TEXTS)
def test_any_text_survives_the_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_give_no_text(tokenizer):
    (end,) = read_config(DEFAULT_CHECKPOINT).eos_token_ids
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
