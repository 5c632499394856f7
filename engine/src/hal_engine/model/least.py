"""The longest token of a tokenizer, where each text has a token for so many of its bytes at least."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer as _Backend
from tokenizers import pre_tokenizers
from tokenizers.models import BPE

from .patterns import steps_in

_KEEP = {"ByteLevel", "Split", "Digits", "Metaspace", "Punctuation", "UnicodeScripts", "Sequence"}
"""Pre-tokenizers that drop no character (``Split`` and ``Punctuation`` unless they remove what they find)."""
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def longest_token(backend: _Backend) -> int:
    """Return the most bytes of a text that a token stands for: a text of n bytes has n / most tokens or more.

    0 where there is no such bound: a normalizer may shorten the text, characters may be dropped, one token may stand
    for many unknown characters, or an added token may take any number of spaces.
    """
    model, vocab = backend.model, backend.get_vocab(with_added_tokens=False)
    added = backend.get_added_tokens_decoder().values()
    splits = steps_in(backend.pre_tokenizer, "pretokenizers")
    by_bytes = any(part["type"] == "ByteLevel" for part in splits)
    bounded = (
        isinstance(model, BPE)
        and _is_covered(model, vocab, by_bytes=by_bytes)
        and not any(token.lstrip or token.rstrip for token in added)
        and all(_keeps(part) for part in splits)
        and all(_lengthens(part) for part in steps_in(backend.normalizer, "normalizers"))
    )
    if not bounded:
        return 0
    known = (len(text) if by_bytes else len(text.encode()) for text in vocab)  # a byte is a letter of ByteLevel's
    return max([4, *known, *(len(token.content.encode()) for token in added)])  # 4: an unknown character


def _is_covered(model: BPE, vocab: dict[str, int], *, by_bytes: bool) -> bool:
    """Return whether each character gives a token of its own at least, and none is dropped."""
    if by_bytes:
        return all(letter in vocab for letter in pre_tokenizers.ByteLevel.alphabet())
    if model.byte_fallback and all(byte in vocab for byte in _BYTES):
        return True
    return model.unk_token in vocab and not model.fuse_unk


def _keeps(part: dict[str, Any]) -> bool:
    return part["type"] in _KEEP and part.get("behavior") != "Removed"


def _lengthens(part: dict[str, Any]) -> bool:
    """Return whether a normalizer leaves at least as many bytes as it finds."""
    if part["type"] == "Replace" and "String" in part["pattern"]:
        return len(part["content"].encode()) >= len(part["pattern"]["String"].encode())
    return bool(part["type"] == "Prepend")
