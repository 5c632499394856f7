"""The bytes of single tokens together are the text of all of them."""

import pytest
from hal_engine.model import DEFAULT_CHECKPOINT
from hal_engine.model.config import read_config
from hal_engine.model.tokenizer import Tokenizer
from hypothesis import given
from hypothesis import strategies as st

from .tokenizers_of_kinds import KINDS, gemma, llama2

CONFIG = read_config(DEFAULT_CHECKPOINT)
TEXTS = st.text(st.sampled_from("stopalb é中文🐍! \n"), max_size=12)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
def test_the_bytes_of_tokens_make_their_text(kind, text):
    tokenizer = Tokenizer(KINDS[kind](), CONFIG)
    ids = tokenizer.encode(text)
    own = [tokenizer.bytes_of(token) or b"" for token in ids]
    whole = b"".join(own).decode(errors="replace")
    assert whole.strip(" ") == tokenizer.decode(ids).strip(" "), "but for what decoders do at a text's ends"


def test_each_byte_of_a_byte_level_vocabulary_is_itself():
    tokenizer = Tokenizer(KINDS["byte level"](), CONFIG)
    found = {tokenizer.bytes_of(token) for token in range(tokenizer.vocab_size)}
    assert {bytes([byte]) for byte in range(256)} <= found


@pytest.mark.parametrize("make", [llama2, gemma])
def test_byte_tokens_spaces_and_special_tokens(make):
    backend = make()
    tokenizer = Tokenizer(backend, CONFIG)
    of = lambda text: tokenizer.bytes_of(backend.token_to_id(text))  # noqa: E731
    assert (of("<0xE2>"), of("<0x41>"), of("▁a"), of("▁▁"), of("中")) == (b"\xe2", b"A", b" a", b"  ", "中".encode())
    assert (of("<s>"), tokenizer.bytes_of(CONFIG.vocab_size - 1)) == (None, None)
    assert (tokenizer.spelled(backend.token_to_id("<s>")), tokenizer.spelled(CONFIG.vocab_size - 1)) == ("<s>", "")


def test_special_tokens_are_text_for_who_asks():
    tokenizer = Tokenizer(llama2(), CONFIG)
    ids = tokenizer.encode("a!")
    assert tokenizer.decode(ids) == "a!"
    assert tokenizer.decode(ids, skip_special_tokens=False).startswith("<s>")
