"""The bytes that one token adds to a text, whatever stands beside it. Imports no framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from hal_engine.model.decoder import Step

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_PRINTED = (range(0x21, 0x7F), range(0xA1, 0xAD), range(0xAE, 0x100))


def _alphabet() -> dict[str, int]:
    """Return the bytes by their characters in byte-level vocabularies: a printed one stands for itself, the others
    follow from U+0100 on (GPT-2's ``bytes_to_unicode``)."""
    printed = [byte for part in _PRINTED for byte in part]
    others = [byte for byte in range(256) if byte not in {*printed}]
    return {chr(byte): byte for byte in printed} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTES = _alphabet()


class OwnBytes:
    """The bytes of single tokens, for the decoder of ``steps``.

    ``decode``: the tokenizer's. ``byte_token_ids``: tokens spelled ``<0xNN>`` that are a byte. ``visible``: ids that
    give text. One of them stands before and behind each token, as a text's first and last token may lose a space.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        steps: Iterable[Step],
        byte_token_ids: frozenset[int],
        visible: frozenset[int],
    ) -> None:
        self._decode, self._bytes = decode, byte_token_ids
        self._by_level = any(step["type"] == "ByteLevel" for step in steps)
        plain = (token for token in sorted(visible - byte_token_ids) if _BROKEN not in decode([token]))
        self._neighbor = next(([token] for token in plain if decode([token]).strip()), [])
        self._before = decode(self._neighbor)
        self._behind = decode(self._neighbor * 2).removeprefix(self._before)

    def of(self, token: int, spelled: str) -> bytes:
        """Return the bytes of a token, whose text in the vocabulary is ``spelled``."""
        if token in self._bytes:
            return bytes([int(spelled[1:-1], 16)])
        if self._by_level:
            complete = all(letter in _BYTES for letter in spelled)
            return bytes(_BYTES[letter] for letter in spelled) if complete else spelled.encode()
        text = self._decode([*self._neighbor, token, *self._neighbor])
        return text.removeprefix(self._before).removesuffix(self._behind).encode()


class OwnTexts(dict[int, str]):
    """Of each token the text that it adds behind any complete character, found when it is first wanted; "" for one that
    is no whole character, and for one that alone gives no text, which no window of a stream may begin with."""

    def __init__(self, bytes_of: Callable[[int], bytes | None], decode: Callable[[Sequence[int]], str]) -> None:
        """``bytes_of``, ``decode``: the tokenizer's, the former None for a token of a byte."""
        super().__init__()
        self._bytes_of, self._decode = bytes_of, decode

    def __missing__(self, token: int) -> str:
        """Find a token's text."""
        text = (self._bytes_of(token) or b"").decode(errors="replace")
        if _BROKEN in text or not self._decode([token]):
            text = ""
        self[token] = text
        return text
